"""Shows the results of a proof: a table, the causes of failures, and a line for a README."""

from collections.abc import Sequence
from pathlib import Path

from common.console import say
from common.output.tables import print_facts
from common.storage.digests import shown_digest
from common.tools.prove.receipt import CheckResult, ProofReceipt

MARKS = {True: "✓", False: "✗", None: "–"}
NOTHING_PROVEN = (
    "nothing is proven, because none of these checks applies to this recipe: leave out --checks, "
    "or name others"
)


def show_result(result: CheckResult) -> None:
    """Print the result of a check."""
    say(f"{MARKS[result.passed]} {result.name}: {result.compared or result.question}")
    if result.passed is False:
        for cause in result.causes:
            say(f"    {cause}")
        if result.advice:
            say(f"    to change: {result.advice}")


def show_report(receipt: ProofReceipt, path: Path) -> None:
    """Print the table of all results, and the line for a README.

    Args:
        path: the file of the receipt.
    """
    print_facts(rows_of_checks(receipt.checks), title="checks")
    say(f"receipt: {path}")
    if no_check_applies(receipt):
        say(NOTHING_PROVEN)
    say(readme_line(receipt))


def rows_of_checks(results: Sequence[CheckResult]) -> list[list[str]]:
    """Return a row for each check: its mark and name, and its question and duration."""
    rows = []
    for result in results:
        name = f"{MARKS[result.passed]} {result.name}"
        rows.append([name, f"{result.question} ({result.seconds:.0f} s)"])
    return rows


def no_check_applies(receipt: ProofReceipt) -> bool:
    """Whether no check applies to the recipe."""
    return all(result.passed is None for result in receipt.checks)


def readme_line(receipt: ProofReceipt) -> str:
    """Return a line of Markdown for a README: the result, the code, the machine and the date."""
    applicable = [result for result in receipt.checks if result.passed is not None]
    passed_count = sum(result.passed is True for result in applicable)
    facts = [f"`{Path(receipt.recipe).name}` {shown_digest(receipt.recipe_sha256)}"]
    if receipt.recipe_commit:
        edited = ", edited" if receipt.recipe_is_edited else ""
        facts.append(f"commit {shown_digest(receipt.recipe_commit)}{edited}")
    facts += patches_in_words(receipt)
    if receipt.environment is not None:
        torch_version = receipt.environment.versions.get("torch", "unknown")
        facts += [f"torch {torch_version}", receipt.environment.device]
    facts.append(receipt.began[:10])
    if no_check_applies(receipt):
        return f"{MARKS[None]} `recipes prove`: no check applies; {'; '.join(facts)}"
    names = ", ".join(result.name for result in applicable if result.passed)
    return (
        f"{MARKS[receipt.passed]} `recipes prove`: {passed_count} of {len(applicable)} checks "
        f"passed ({names or 'none'}); {'; '.join(facts)}"
    )


def patches_in_words(receipt: ProofReceipt) -> list[str]:
    """Return a phrase for each folder of code that differs from its commit, or has none.

    A folder that is not in git has a patch that creates all of its files.
    """
    phrases = []
    for code in receipt.code:
        state = "code with the patch" if code.commit is not None else "code not in git, digest"
        if code.patch_sha256 is not None:
            phrases.append(f"{state} {shown_digest(code.patch_sha256)}")
    return phrases
