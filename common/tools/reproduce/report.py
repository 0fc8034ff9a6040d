"""Shows how the present differs from a past run before the training, and the result after it."""

from collections.abc import Sequence
from pathlib import Path

from common.console import say
from common.system.platforms import shown_path
from common.tables import print_facts, print_table
from common.tools.reproduce.conclusion import (
    final_in_words,
    rows_in_words,
    weights_in_words,
)
from common.tools.reproduce.past_run import PastRun
from common.tools.reproduce.receipt import RECEIPT, FactDifference, Reproduction

MARKS = {True: "✓", False: "✗"}
COMMIT_DIGITS = 7


def show_plan(
    past: PastRun, code: str, flags: Sequence[str], differences: Sequence[FactDifference]
) -> None:
    """Print where the code comes from, what the run lacks, and what differs from then."""
    say(f"code: {code}")
    for sentence in past.gaps():
        say(f"not certain: {sentence}")
    if flags:
        say(f"flags that replace those of the run: {' '.join(flags)}")
    show_differences(differences)


def show_differences(differences: Sequence[FactDifference]) -> None:
    """Print a table of the facts that differ, or a line if none does."""
    if not differences:
        say("versions, hardware and code are the same as then")
        return
    rows = [["", "then", "now", "equal bits"]]
    for difference in differences:
        outlook = "unlikely" if difference.changes_bits else "not affected"
        rows.append([difference.fact, difference.before, difference.now, outlook])
    print_table(rows, title="what differs from then")


def show_result(receipt: Reproduction, directory: Path) -> None:
    """Print what was compared, and the result in one line."""
    assert receipt.rows is not None
    assert receipt.weights is not None
    assert receipt.final is not None
    rows = [
        ["rows", rows_in_words(receipt.rows)],
        ["weights", weights_in_words(receipt.weights)],
    ]
    if receipt.result != "equal bits":
        rows.append(["final figures", final_in_words(receipt.final, receipt.tolerance)])
        rows.append(["explanation", receipt.explanation])
    rows.append(["receipt", shown_path(directory / RECEIPT)])
    print_facts(rows, title="comparison")
    say(receipt.line)


def line_of(receipt: Reproduction, past: PastRun) -> str:
    """Return the result in one line, with the conditions under which it holds."""
    assert receipt.rows is not None
    assert receipt.weights is not None
    assert receipt.final is not None
    name = Path(receipt.original).name
    if receipt.result == "equal bits":
        exported = " and the exported weights" if receipt.weights.exported_is_equal else ""
        text = (
            f"equal bits in {receipt.rows.rows} rows, {receipt.weights.checkpoints} checkpoints"
            f"{exported}"
        )
    else:
        text = f"{receipt.result}: {rows_in_words(receipt.rows)}; {receipt.explanation}"
    conditions = [f"`{past.config.recipe}`"]
    if receipt.commit is not None:
        conditions.append(f"commit {receipt.commit[:COMMIT_DIGITS]}")
    torch_version = past.config.environment.versions.get("torch")
    conditions += [f"torch {torch_version}", past.config.environment.device, receipt.began[:10]]
    mark = MARKS[receipt.exit_status == 0]
    return f"{mark} `recipes reproduce {name}`: {text}; {', '.join(conditions)}"
