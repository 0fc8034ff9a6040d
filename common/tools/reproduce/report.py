"""Prints the differences from the old run before the training, and the result after it."""

from collections.abc import Sequence
from pathlib import Path

from common.console import say
from common.output.tables import print_facts, print_table
from common.storage.digests import shown_digest
from common.system.platforms.commands import shown_path
from common.system.wording import counted
from common.tools.reproduce.compared_run import ComparedRun
from common.tools.reproduce.comparison_in_words import (
    final_in_words,
    left_out_in_words,
    rows_in_words,
    weights_in_words,
)
from common.tools.reproduce.conclusion import Conclusion
from common.tools.reproduce.facts import VERSION_OF
from common.tools.reproduce.receipt import RECEIPT, FactDifference, Reproduction

MARKS = {True: "✓", False: "✗"}


def show_before_training(
    old: ComparedRun, code_source: str, flags: Sequence[str], differences: Sequence[FactDifference]
) -> None:
    """Print where the code comes from, what the old run did not record, and what differs from it.

    Args:
        code_source: where the code comes from, such as a commit with a patch.
        flags: the flags that replace those of the old run, as words of a command.
    """
    say(f"code: {code_source}")
    for sentence in old.gaps():
        say(f"not certain: {sentence}")
    if flags:
        say(f"flags that replace those of the run: {' '.join(flags)}")
    show_differences(differences)


def show_differences(differences: Sequence[FactDifference]) -> None:
    """Print a table of the facts that differ, or a line if none does.

    Packages that can't change bits are only counted, because there may be dozens of them.
    """
    if not differences:
        say("versions, hardware and code are the same as in the old run")
        return
    rows = [["", "old run", "now", "equal bits"]]
    other_packages = 0
    for difference in differences:
        if difference.fact.startswith(VERSION_OF) and not difference.changes_bits:
            other_packages += 1
            continue
        outlook = "unlikely" if difference.changes_bits else "not affected"
        rows.append([difference.fact, difference.before, difference.now, outlook])
    if len(rows) > 1:
        print_table(rows, title="differences from the old run")
    if other_packages:
        packages = counted(other_packages, "other package differs", "other packages differ")
        say(f"{packages}, which can't change bits; {RECEIPT} will list them")


def show_result(conclusion: Conclusion, receipt: Reproduction, directory: Path) -> None:
    """Print the comparison of both runs, and the result in one line.

    Args:
        directory: the folder of the receipt.
    """
    rows = [
        ["rows", rows_in_words(conclusion.rows)],
        ["weights", weights_in_words(conclusion.weights)],
    ]
    if conclusion.result != "equal bits":
        rows.append(["final figures", final_in_words(conclusion.final)])
        rows.append(["explanation", conclusion.explanation])
    rows.append(["receipt", shown_path(directory / RECEIPT)])
    print_facts(rows, title="comparison")
    say(receipt.line)


def result_line(
    conclusion: Conclusion, name: str, new: ComparedRun, commit: str | None, time: str
) -> str:
    """Return the result in one line, with the conditions under which it holds.

    Args:
        conclusion: the comparison of both runs.
        name: the name of the old run's directory.
        new: the new run.
        commit: the commit of the recipe's code; None if the code was not in a git repository.
        time: the time of the start, ISO 8601.
    """
    if conclusion.result == "equal bits":
        exported = " and the exported weights" if conclusion.weights.exported_is_equal else ""
        rows = counted(conclusion.rows.rows, "row")
        checkpoints = counted(conclusion.weights.checkpoints, "checkpoint")
        text = f"equal bits in {rows}, {checkpoints}{exported}"
        if conclusion.rows.left_out:
            text += f" ({left_out_in_words(conclusion.rows.left_out)})"
    else:
        text = f"{conclusion.result}: {rows_in_words(conclusion.rows)}; {conclusion.explanation}"
    conditions = [f"`{new.saved_config.recipe}`"]
    if commit is not None:
        conditions.append(f"commit {shown_digest(commit)}")
    torch_version = new.saved_config.environment.versions.get("torch")
    conditions += [f"torch {torch_version}", new.saved_config.environment.device, time[:10]]
    mark = MARKS[conclusion.exit_status == 0]
    return f"{mark} `recipes reproduce {name}`: {text}; {', '.join(conditions)}"
