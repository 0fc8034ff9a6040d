"""Adds a validation share to the flags of runs between which the user will choose."""

from collections.abc import Sequence


def with_validation_share(shared: Sequence[str]) -> list[str]:
    """Return the flags of all runs, with a validation share of 10 % if none is stated.

    The user must not choose between runs by test data. If the data have no validation split, this
    share of the training data serves as validation data.

    Args:
        shared: flags as `parse_space` returns them, where no word is ``--flag=value``.
    """
    if "--validation-share" in shared:
        return [*shared]
    return [*shared, "--validation-share", "0.1"]
