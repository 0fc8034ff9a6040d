"""Entries of `config.json` that depend on the recipe's own flags or on an earlier attempt."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import TrainingConfig
from common.flags import flag
from common.lifecycle.start.run_config import (
    flags_at_first_start,
    roles_of_recipe,
    wandb_run_id_of,
)
from tests.unit.saved_config import saved_config


def test_roles_without_flags_are_left_out() -> None:
    """The files of most runs have no entry for the roles of a recipe's own flags."""

    @dataclass(kw_only=True)
    class Config(TrainingConfig):
        nickname: str = flag("", role="record")

    assert roles_of_recipe(TrainingConfig()) == {}
    assert roles_of_recipe(Config()) == {
        "compared": {"nickname": False},
        "free_on_resume": {"nickname": True},
    }


def test_resume_keeps_the_flags_and_the_id_of_the_first_start() -> None:
    """A flag that the recipe has no longer is left out, and a new one is not added."""
    earlier_config = saved_config(given={"seed": 3, "gone": 1}, wandb_run_id="01234567")
    given = {"seed": 0, "epochs": 9}
    assert flags_at_first_start(given, earlier_config) == {"seed": 3}
    assert flags_at_first_start(given, None) == given
    assert wandb_run_id_of(earlier_config) == "01234567"
    assert wandb_run_id_of(None) != wandb_run_id_of(None)
