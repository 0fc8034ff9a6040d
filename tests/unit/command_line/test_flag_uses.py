"""Uses of flags in a recipe's source that its first update does not reach."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from common.command_line.flag_uses import find_flag_uses


@pytest.fixture(autouse=True)
def in_a_folder_without_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the folder of the tests, whose modules would count as those of a recipe."""
    monkeypatch.chdir(tmp_path)


USES = {
    "later in the loop": "if run.epoch > 3:\n    loss = loss * config.tau\n",
    "in a nested function": "def main(c):\n    def finish():\n        return c.tau\n",
    "by its name": 'value = getattr(config, "tau")\n',
    "in a copy of all": "model = Net(**vars(config))\n",
    "in another copy": "values = dataclasses.asdict(config)\n",
    "in its dictionary": "values = config.__dict__\n",
}
NO_USES = {
    "stated only": "class Config(TrainingConfig):\n    tau: float = 1.0\n",
    "another variable": "tau = 0.5\nloss = loss * tau\n",
    "an argument": "optimizer = Optimizer(tau=0.1)\n",
    "written": "self.tau = 0.5\n",
    "in a comment": '"""It reads config.tau."""\n# config.tau\n',
}


@pytest.mark.parametrize("case", USES)
def test_use_is_found(tmp_path: Path, case: str) -> None:
    """The place of the use has the file and the line."""
    recipe = tmp_path / "mine.py"
    recipe.write_text(USES[case])
    place = find_flag_uses(recipe).place_of("tau")
    assert place is not None
    assert place.startswith("mine.py:")


@pytest.mark.parametrize("case", NO_USES)
def test_other_code_is_no_use(tmp_path: Path, case: str) -> None:
    """Code that defines or assigns a flag, or uses its name otherwise, does not use the flag."""
    recipe = tmp_path / "mine.py"
    recipe.write_text(NO_USES[case])
    assert find_flag_uses(recipe).place_of("tau") is None


@pytest.mark.parametrize(
    ("line", "is_use"),
    [
        ("if late:\n    run.clip_grad_norm_(model, optimizer)\n", True),
        ("if late:\n    self.run.clip_grad_norm_(model, optimizer)\n", True),
        ("accelerator.clip_grad_norm_(model.parameters(), 1.0)\n", False),
        ("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", False),
    ],
)
def test_later_call_is_a_use(tmp_path: Path, line: str, is_use: bool) -> None:
    """Clipping may start at a later update. Another library's clipping does not read the flag."""
    recipe = tmp_path / "mine.py"
    recipe.write_text(line)
    assert (find_flag_uses(recipe).place_of("max_grad_norm") is not None) == is_use


def test_imported_modules_beside_a_recipe_are_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that was not imported is not searched."""
    recipe = tmp_path / "mine.py"
    recipe.write_text("import helpers_of_mine\n")
    (tmp_path / "helpers_of_mine.py").write_text("def scale(config):\n    return config.tau\n")
    assert find_flag_uses(recipe).place_of("tau") is None
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("helpers_of_mine")
    place = find_flag_uses(recipe).place_of("tau")
    assert place is not None
    assert place.startswith("helpers_of_mine.py:")


def test_missing_source_may_use_any_flag(tmp_path: Path) -> None:
    """The recipe may have been typed into a notebook."""
    assert find_flag_uses(tmp_path / "typed.py").place_of("tau") == "the recipe"
