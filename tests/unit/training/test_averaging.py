"""DDP that follows layers as they are frozen and unfrozen, and a recipe's DDP options."""

from __future__ import annotations

import re
from typing import Any

import pytest

from common.errors import UserError
from common.training.gradients.averaging import ddp_options
from tests.launch import REPOSITORY, Runner

SCRIPT = REPOSITORY / "tests" / "frozen_at_times.py"


@pytest.mark.parametrize(
    "cases", [(0, 12), pytest.param((12, 150), marks=pytest.mark.slow)], ids=str
)
def test_frozen_layers_are_trained_as_on_one_process(runner: Runner, cases: Any) -> None:
    """Random cases freeze layers before or after `prepare`, at any update, with or without
    accumulation. Drifted weights and a layer without a gradient give one sentence.
    """
    run = runner.run(SCRIPT, *cases, launcher="two forks", output_directory=False)
    assert f"{cases[1] - cases[0]} cases agree" in run.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"find_unused": True}, "use one of .*find_unused_parameters"),
        ({"comm_hook": "fp16"}, "--gradient-compression"),
        ({"find_unused_parameters": "yes"}, "pass a value of type bool, such as False"),
        ({"bucket_cap_mb": True}, "pass a value of type int, such as 25"),
    ],
)
def test_wrong_option_is_refused(options: dict[str, Any], message: str) -> None:
    """An option of DDP with a wrong name or type is refused."""
    with pytest.raises(UserError) as error:
        ddp_options(options, "no")
    assert re.search(message, error.value.message), error.value.message


def test_stated_options_override_the_defaults() -> None:
    """Options that a recipe does not state keep their defaults."""
    options = ddp_options({"find_unused_parameters": True, "broadcast_buffers": True}, "fp16")
    assert options.find_unused_parameters
    assert options.broadcast_buffers
    assert options.gradient_as_bucket_view
    assert options.comm_hook.value == "fp16"
