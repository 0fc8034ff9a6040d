"""DDP that follows layers as they are frozen and unfrozen, and the options that a recipe states."""

from __future__ import annotations

import re
from typing import Any

import pytest

from common.errors import UserError
from common.training.averaging import ddp_options
from tests.launch import REPOSITORY, Runner

SCRIPT = REPOSITORY / "tests" / "frozen_at_times.py"


@pytest.mark.parametrize(
    "cases", [(0, 12), pytest.param((12, 150), marks=pytest.mark.slow)], ids=str
)
def test_frozen_layers_are_trained_as_on_one_process(runner: Runner, cases: Any) -> None:
    """Drawn cases: frozen before or after `prepare`, at any update, with accumulation or without.

    Drifted weights and a layer without a gradient are told in a sentence.
    """
    run = runner.run(SCRIPT, *cases, launcher="two", output_directory=False)
    assert f"{cases[1] - cases[0]} cases agree" in run.output


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"find_unused": True}, "state one of .*find_unused_parameters"),
        ({"comm_hook": "fp16"}, "--gradient-compression"),
        ({"find_unused_parameters": "yes"}, "give bool, such as False"),
        ({"bucket_cap_mb": True}, "give int, such as 25"),
    ],
)
def test_wrong_option_is_refused(stated: dict[str, Any], message: str) -> None:
    """By its name, or its type."""
    with pytest.raises(UserError) as error:
        ddp_options(stated, "no")
    assert re.search(message, error.value.message), error.value.message


def test_options_are_those_of_recipes_and_what_is_stated() -> None:
    """A recipe's option takes the place of the default."""
    options = ddp_options({"find_unused_parameters": True, "broadcast_buffers": True}, "fp16")
    assert options.find_unused_parameters
    assert options.broadcast_buffers
    assert options.gradient_as_bucket_view
    assert options.comm_hook.value == "fp16"
