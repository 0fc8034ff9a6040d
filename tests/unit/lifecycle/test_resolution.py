"""Resolution of a config: one module of `common` changes it, and records the changes."""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from common.command_line.flag_reads import record_reads, stop_recording
from common.config import TrainingConfig
from common.errors import UserError
from common.flags import flag_values_of
from common.lifecycle.resolution import ConfigResolution
from tests.launch import REPOSITORY

MODULES = sorted((REPOSITORY / "common").rglob("*.py"))


def is_config(node: ast.AST) -> bool:
    """Return whether an expression is named `config`, or is an attribute of this name."""
    if isinstance(node, ast.Name):
        return node.id == "config"
    return isinstance(node, ast.Attribute) and node.attr == "config"


def changes_of_config(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that assign to attributes of a config, or may do so."""
    for node in ast.walk(tree):
        is_assigned = isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))
        if isinstance(node, ast.Attribute) and is_assigned and is_config(node.value):
            yield node.lineno
        if isinstance(node, ast.Call) and node.args and is_config(node.args[0]):
            name = getattr(node.func, "id", None) or getattr(node.func, "attr", "")
            if name in ("setattr", "delattr", "__setattr__"):
                yield node.lineno


@pytest.mark.parametrize(
    "line",
    [
        "config.epochs = 3",
        "self.config.epochs += 3",
        "setattr(config, name, 3)",
        "config.epochs, other = 3, 4",
        "object.__setattr__(self.config, name, 3)",
    ],
)
def test_change_is_recognised(line: str) -> None:
    """Code may write it in several forms."""
    assert [*changes_of_config(ast.parse(line))] == [1]


def test_only_one_module_changes_a_config() -> None:
    """Other modules compute values and return them."""
    for path in MODULES:
        lines = [*changes_of_config(ast.parse(path.read_text()))]
        assert bool(lines) == (path.name == "resolution.py"), f"{path}, lines {lines}"


def test_resolution_keeps_the_stated_values() -> None:
    """Resolving a flag does not count as reading it."""
    config = TrainingConfig(batch_size=8)
    record_reads(config)
    resolution = ConfigResolution(config)
    resolution.resolve(epochs=3, batch_size=8)
    assert "epochs" not in stop_recording(config)
    assert config.epochs == 3
    assert config.batch_size == 8
    assert resolution.given_flags["epochs"] is None


def test_unknown_flag_is_an_error() -> None:
    """A misspelt name is an error, and not an attribute that nothing reads."""
    with pytest.raises(AttributeError, match="no flag epoch"):
        ConfigResolution(TrainingConfig()).resolve(epoch=3)


@dataclasses.dataclass(kw_only=True)
class ConfigOfRecipe(TrainingConfig):
    width: int = 64


@pytest.mark.parametrize("name", ["epochs", "width", "of_no_flag"])
@pytest.mark.parametrize("reads_are_recorded", [False, True])
def test_resolved_flags_are_frozen(name: str, reads_are_recorded: bool) -> None:
    """Neither a recipe nor the run changes a flag once `config.json` is written."""
    config = ConfigOfRecipe()
    if reads_are_recorded:
        record_reads(config)
    resolution = ConfigResolution(config)
    resolution.resolve(epochs=3)
    config.width = 32
    resolution.freeze()
    values = dict(vars(config))
    with pytest.raises(UserError, match=rf"config\.{name} after run\.start"):
        setattr(config, name, 5)
    stop_recording(config)
    with pytest.raises(UserError, match=rf"config\.{name} after run\.start"):
        setattr(config, name, 5)
    assert vars(config) == values
    config.unfreeze()
    config.width = 16
    assert config.width == 16


def test_frozen_flags_can_be_copied() -> None:
    """A loader's worker gets a pickled config, and a program may derive the next run's flags."""
    config = ConfigOfRecipe(width=32)
    config.freeze()
    for copied in (pickle.loads(pickle.dumps(config)), copy.copy(config), copy.deepcopy(config)):
        assert vars(copied) == vars(config)
        copied.width = 16
        assert config.width == 32
    wider = dataclasses.replace(config, width=128)
    wider.epochs = 2
    assert wider.width == 128
    assert config.width == 32


def test_values_of_a_program_take_the_form_of_flags() -> None:
    """NumPy's numbers and a path equal the flags' values, but no JSON file could store them."""
    config = TrainingConfig(epochs=np.int64(3), output_dir=Path("runs/a"))  # type: ignore[arg-type]
    resolution = ConfigResolution(config)
    resolution.settle(flag_values_of(config))
    for values in (vars(config), resolution.given_flags):
        assert type(values["epochs"]) is int
        assert values["output_dir"] == str(Path("runs/a"))
        json.dumps(values)
