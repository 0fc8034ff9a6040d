"""Runs between which the user chooses have validation data."""

from __future__ import annotations

from common.tools.launching.validation_share import with_validation_share


def test_default_validation_share_is_part_of_the_command() -> None:
    """A validation share on the command line replaces the default."""
    assert with_validation_share(["--seed", "1"]) == ["--seed", "1", "--validation-share", "0.1"]
    assert with_validation_share(["--validation-share", "0.2"]) == ["--validation-share", "0.2"]
