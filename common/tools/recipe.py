"""Imports a recipe without running it, so that tools can read its flags and its objective."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from common.config import TrainingConfig
from common.errors import UserError
from common.objective import Objective
from common.sentences import reading


class Recipe(NamedTuple):
    """An imported recipe, and the parts of it that tools need."""

    path: Path
    module: ModuleType
    config_class: type[TrainingConfig]  # its fields are the recipe's flags
    objective: Objective


def load_recipe(path: Path) -> Recipe:
    """Import a recipe under another name than ``__main__``, so that it does not train.

    Raises:
        UserError: the path is not a recipe.
    """
    if not os.path.isfile(path):
        raise UserError(f"{path} is no file", advice="pass a recipe, such as recipes/resnet.py")
    spec = importlib.util.spec_from_file_location(f"imported_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(
            f"{path} is no Python file", advice="pass a recipe, such as recipes/resnet.py"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # `dataclass` looks up the types of the fields there
    # The recipe may import modules from its own folder, as a launched recipe can.
    beside = str(path.resolve().parent)
    sys.path.insert(0, beside)
    try:
        with reading(str(path), "pass a recipe that Python runs"):
            spec.loader.exec_module(module)
    finally:
        sys.path.remove(beside)
    config_class = getattr(module, "Config", None)
    if not (isinstance(config_class, type) and issubclass(config_class, TrainingConfig)):
        raise UserError(
            f"{path} is no recipe, because it has no class Config",
            advice="add class Config(TrainingConfig) to it, or pass another file",
        )
    if not hasattr(module, "OBJECTIVE"):
        raise UserError(
            f"{path} states no objective", advice='add OBJECTIVE = "METRIC:max" or "METRIC:min"'
        )
    return Recipe(path, module, config_class, Objective.parse(str(module.OBJECTIVE)))
