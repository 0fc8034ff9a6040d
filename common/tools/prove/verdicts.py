"""The verdict of a check, and the causes that it names."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """The result of a check: whether the recipe has passed, and if not, the causes and the advice.

    `run_check` in `proof.py` adds the check's name and duration, which gives a `CheckResult`.
    """

    passed: bool | None  # None: the check does not apply to this recipe
    # What was compared, such as "40 updates, 14 rows, 6 tensors", or why the check does not apply.
    compared: str
    # Sentences about the mistakes, the likeliest cause first, and then differences of the results.
    causes: tuple[str, ...] = ()
    advice: str = ""  # the change that the recipe needs; empty if it is unknown or not needed


@dataclass(frozen=True)
class Cause:
    """A mistake in the recipe, and the change that it needs."""

    sentence: str
    advice: str


def failed_verdict(
    compared: str, causes: Sequence[Cause], differences: Sequence[str] = ()
) -> Verdict:
    """Return the verdict of a check that fails, with the advice for its first cause.

    Args:
        compared: see `Verdict`.
        causes: the likeliest cause first. Equal sentences appear once.
        differences: further phrases for the end of the list, such as results that differ.
    """
    sentences = [*(cause.sentence for cause in causes), *differences]
    advice = causes[0].advice if causes else ""
    return Verdict(False, compared, tuple(dict.fromkeys(sentences)), advice)


def skipped_verdict(reason: str) -> Verdict:
    """Return the verdict for a recipe whose runs a check can't compare."""
    return Verdict(None, f"{reason}: not comparable, skipped")
