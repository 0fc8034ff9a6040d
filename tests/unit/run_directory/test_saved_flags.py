"""Comparing saved flags with present ones: what counts as a difference, and its words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.run_directory.saved_flags import (
    FlagDifference,
    differing_flags,
    fixed_flags,
    flags_in_words,
    has_moved,
    values_in,
)
from recipes.mnist_mlp import Config


def test_common_flags_are_compared_in_order() -> None:
    """A flag that only one side has, as of another version, is not compared."""
    saved = {"seed": 0, "batch_size": 32, "old": 1, "epochs": 3}
    present = {"epochs": 3, "seed": 1, "batch_size": 64, "new": 1}
    assert differing_flags(saved, present) == [
        FlagDifference("batch_size", 32, 64),
        FlagDifference("seed", 0, 1),
    ]


@pytest.mark.parametrize(
    ("saved", "present", "rules", "differs"),
    [
        (1, 1.0, {}, False),
        ((1, 2), [1, 2], {}, True),
        (None, 0, {}, True),
        ("auto", "bf16", {}, True),
        ("bf16", "auto", {}, True),
        ("auto", "bf16", {"is_saved_auto_fine": True}, False),
        ("bf16", "auto", {"is_saved_auto_fine": True}, True),
        ("auto", "bf16", {"is_current_auto_fine": True}, True),
        ("bf16", "auto", {"is_current_auto_fine": True}, False),
        (3, 5, {"given_flags": {"flag": 5}}, False),
        (3, 5, {"given_flags": {"flag": None}}, True),
        (3, None, {"given_flags": {"flag": None}}, False),
    ],
)
def test_each_rule_has_its_argument(
    saved: object, present: object, rules: dict[str, Any], differs: bool
) -> None:
    """Without arguments, only equal values fit."""
    assert bool(differing_flags({"flag": saved}, {"flag": present}, **rules)) == differs


def test_moved_data_fit_on_request(tmp_path: Path) -> None:
    """Only the flag of the data set may name another path."""
    saved = {"dataset": str(tmp_path / "old"), "init_from": str(tmp_path / "old")}
    present = dict.fromkeys(saved, str(tmp_path))
    assert has_moved(saved["dataset"], present["dataset"])
    names = [difference.name for difference in differing_flags(saved, present)]
    assert names == ["dataset", "init_from"]
    (difference,) = differing_flags(saved, present, is_moved_data_fine=True)
    assert difference.name == "init_from"
    (tmp_path / "old").mkdir()
    assert len(differing_flags(saved, present, is_moved_data_fine=True)) == 2


def test_words_follow_the_pattern() -> None:
    """A long value is shortened, and one with braces stays as it is."""
    differences = [
        FlagDifference("batch_size", 32, 64),
        FlagDifference("dataset", "{x}", "a" * 200),
    ]
    assert flags_in_words(differences, "{flag} {current} (the run has {saved})") == [
        "--batch-size 64 (the run has 32)",
        f"--dataset {'a' * 99}… (the run has {{x}})",
    ]


def test_fixed_flags_are_those_that_a_resume_keeps() -> None:
    """The number of workers may change, for example."""
    config = Config()
    values = values_in(config, ("seed", "num_workers"))
    assert values == {"seed": config.seed, "num_workers": config.num_workers}
    assert fixed_flags(Config, values) == {"seed": config.seed}
