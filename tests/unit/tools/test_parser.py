"""What all subcommands check on their command lines."""

from __future__ import annotations

import pytest

from common.errors import UserError
from common.tools.prove.command import read_command_line as read_proof
from common.tools.reproduce.command import read_command_line as read_reproduction
from common.tools.vary.command import read_command_line as read_variants

READERS = {"prove": read_proof, "reproduce": read_reproduction, "vary": read_variants}


@pytest.mark.parametrize(
    ("tool", "mistake"),
    [
        (
            "prove",
            "--rate stands before the recipe: put the recipe first, as in recipes prove "
            "recipes/resnet.py --rate …",
        ),
        (
            "reproduce",
            "--rate stands before the run: put the run first, as in recipes reproduce runs/first "
            "--rate …",
        ),
        (
            "vary",
            "--rate stands before the recipe: put the recipe first, as in recipes vary "
            "recipes/resnet.py --rate …",
        ),
    ],
)
def test_flag_before_the_subject_is_refused(tool: str, mistake: str) -> None:
    """The parser would take the flag's value for the recipe or run."""
    with pytest.raises(UserError) as refused:
        READERS[tool](["--rate", "0.1", "subject"])
    assert refused.value.message == mistake
    _, flags = READERS[tool](["subject", "--rate", "0.1"])
    assert flags == ["--rate", "0.1"]
