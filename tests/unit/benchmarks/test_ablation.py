"""Ablations: the plan for the CIFAR-10 recipe fits the recipe, and edits are made whole."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.edited_recipe import edited_once, edited_recipe, edited_text
from benchmarks.harness.recipe_side import load_recipe
from benchmarks.suites import cifar10_ablation
from benchmarks.suites.cifar10_ablation import (
    AS_IT_IS,
    SMALL_IDEAS,
    TOGETHER,
    make_plan,
    make_speedrun_plan,
    make_together_plan,
)
from tests.launch import REPOSITORY

RECIPE = REPOSITORY / "recipes" / "cifar10_fast.py"
PLAN = make_plan("cifar10", 2, 0.1, [0])
SPEEDRUN_PLAN = make_speedrun_plan("cifar10", [0])
TOGETHER_PLAN = make_together_plan("cifar10", [0])
VARIANTS = [
    *(pytest.param(PLAN, variant, id=variant) for variant in PLAN["variants"]),
    *(
        pytest.param(SPEEDRUN_PLAN, variant, id=f"speedrun, {variant}")
        for variant in SPEEDRUN_PLAN["variants"]
    ),
    pytest.param(TOGETHER_PLAN, TOGETHER, id="speedrun, together"),
]


@pytest.mark.parametrize(("plan", "variant"), VARIANTS)
def test_variant_fits_the_recipe(plan: dict[str, Any], variant: str) -> None:
    """Each variant's edits find their texts and leave a program, and its flags exist."""
    text = RECIPE.read_text()
    edited = edited_text(text, plan["edits"].get(variant, {}))
    compile(edited, variant, "exec")
    flags = plan["variants"][variant]
    assert (edited == text and not flags) == (variant == AS_IT_IS)
    names = {field.name for field in dataclasses.fields(load_recipe("cifar10_fast").Config)}
    for flag in [*plan["flags"], *flags][::2]:
        assert flag.removeprefix("--").replace("-", "_") in names


def test_plan_needs_validation_data() -> None:
    """Variants must not be compared on test data."""
    with pytest.raises(SystemExit, match="--validation-share above 0"):
        make_plan("cifar10", 2, 0.0, [0])


def written_plan(monkeypatch: pytest.MonkeyPatch, folder: Path, *flags: str) -> dict[str, Any]:
    """Return the plan that the script writes with these flags."""
    path = folder / "plan.json"
    monkeypatch.setattr(sys, "argv", ["cifar10_ablation.py", str(path), *flags])
    cifar10_ablation.main()
    plan: dict[str, Any] = json.loads(path.read_text())
    return plan


@pytest.mark.parametrize("seeds", [[], [3], [0, 1, 2]], ids=str)
@pytest.mark.parametrize(
    ("flags", "expected"),
    [((), [0, 1, 2]), (("--speedrun",), [0]), (("--speedrun", "--together"), [0, 1, 2])],
)
def test_seeds_are_those_of_the_flag(
    flags: tuple[str, ...],
    expected: list[int],
    seeds: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Each plan has a default of its own."""
    words = ["--seeds", *map(str, seeds)] if seeds else []
    assert written_plan(monkeypatch, tmp_path, *flags, *words)["seeds"] == (seeds or expected)


def test_together_takes_out_each_small_idea() -> None:
    """The one variant has the flags and edits of each of these variants."""
    for idea in SMALL_IDEAS:
        flags = SPEEDRUN_PLAN["variants"][idea]
        edits = SPEEDRUN_PLAN["edits"].get(idea, {})
        assert flags or edits
        assert " ".join(flags) in " ".join(TOGETHER_PLAN["variants"][TOGETHER])
        assert edits.items() <= TOGETHER_PLAN["edits"][TOGETHER].items()


def test_together_needs_the_speedrun(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ideas that are too small in ten epochs may be large in two."""
    with pytest.raises(SystemExit):
        written_plan(monkeypatch, tmp_path, "--together")
    assert "add --speedrun" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--epochs", "--validation-share"])
def test_flags_without_effect_are_refused(
    flag: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The speedrun has epochs and data of its own."""
    with pytest.raises(SystemExit):
        written_plan(monkeypatch, tmp_path, "--speedrun", flag, "0")
    assert "leave out --epochs and --validation-share" in capsys.readouterr().err


def test_edits_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """A variant that is the recipe itself would look as if its idea did nothing."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text("rate = 1\nrate = 1\n")
    with edited_recipe(recipe, {"rate = 1": "rate = 2"}) as copy:
        assert copy.name == recipe.name
        assert copy.read_text() == "rate = 2\nrate = 2\n"
    assert not copy.exists()
    with edited_recipe(recipe, {}) as same:
        assert same == recipe
    with pytest.raises(SystemExit, match="adapt the edits"), edited_recipe(recipe, {"speed": ""}):
        pass


@pytest.mark.parametrize("text", ["rate = 2\n", "rate = 1\nrate = 1\n"])
def test_text_that_is_not_there_once_is_refused(text: str) -> None:
    """A mistake that is made nowhere, or twice, would not be the one that a test describes."""
    edits = [("rate", "speed"), ("speed = 1", "speed = 2")]
    assert edited_once("rate = 1\n", edits) == "speed = 2\n"
    with pytest.raises(ValueError, match=r"'rate = 1' (0|2) times instead of once"):
        edited_once(text, [("rate = 1", "rate = 3")])
