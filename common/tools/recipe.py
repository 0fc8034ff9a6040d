"""Imports a recipe without running it, so that tools can read its flags and its objective."""

import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from common.config import TrainingConfig
from common.errors import UserError
from common.failures.sentences import cause_text
from common.objective import Objective
from common.system.platforms.commands import quoted


class Recipe(NamedTuple):
    """An imported recipe, and the parts of it that tools need."""

    path: Path
    module: ModuleType
    config_class: type[TrainingConfig]  # its fields are the recipe's flags
    objective: Objective


@contextmanager
def loading(path: Path) -> Iterator[None]:
    """Turn any error while Python loads or parses a recipe into a `UserError`.

    A mistake in a recipe then ends a tool with advice, and not with a traceback. The message names
    the line of the user's code, if the error passed through some.
    """
    try:
        yield
    except (SystemExit, KeyboardInterrupt, GeneratorExit):  # a `UserError` is a `SystemExit`
        raise
    except BaseException as error:  # includes a panic in Rust code, which is not an `Exception`
        location = error_location(error, path)
        remedy = "correct the file"
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        # A missing module of this library is in no package that could be installed. It was probably
        # renamed after the recipe was copied.
        if missing is not None and not missing.startswith("common."):
            remedy = f"install the package that has {missing}, or correct the import"
        raise UserError(
            f"{path} fails when Python loads it ({location}{cause_text(error)})",
            advice=f"{remedy}, and check it with python {quoted(path)} --help",
        ) from None


def error_location(error: BaseException, path: Path) -> str:
    """Return the file and line of the user's code where an error arose, as in ``a.py, line 3: ``.

    The text ends in a colon and a space, so that the cause can follow. The user's code is the
    recipe and what it imports from its own folder. The result is empty if the error passed through
    none of this code, or if the error's own text has the line.
    """
    if isinstance(error, SyntaxError):  # its text names the file and the line
        return ""
    folder = path.resolve().parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).resolve().parent == folder:
            return f"{Path(frame.filename).name}, line {frame.lineno}: "
    return ""


def load_recipe(path: Path) -> Recipe:
    """Import a recipe under a name other than ``__main__``, so that it does not train.

    Raises:
        UserError: there is no such file, Python can't load it, or it does not define `Config` and a
            valid `OBJECTIVE`.
    """
    if not os.path.isfile(path):
        problem = f"{path} is a folder" if os.path.isdir(path) else f"there is no file {path}"
        raise UserError(
            problem, advice="pass the path of a recipe, absolute or relative to the current folder"
        )
    spec = importlib.util.spec_from_file_location(f"imported_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(
            f"{path} is not a Python file", advice="pass a recipe, such as recipes/resnet.py"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # `dataclass` looks up the types of the fields there
    # Python must find the modules that a recipe imports from its own folder.
    recipe_folder = str(path.resolve().parent)
    sys.path.insert(0, recipe_folder)
    try:
        with loading(path):
            spec.loader.exec_module(module)
    finally:
        sys.path.remove(recipe_folder)
    config_class = getattr(module, "Config", None)
    if not (isinstance(config_class, type) and issubclass(config_class, TrainingConfig)):
        raise UserError(
            f"{path} is not a recipe, because it does not define class Config(TrainingConfig)",
            advice="add this class to it, or pass another file",
        )
    if not hasattr(module, "OBJECTIVE"):
        raise UserError(
            f"{path} does not define OBJECTIVE",
            advice='add OBJECTIVE = "METRIC:max" or "METRIC:min", such as "accuracy:max"',
        )
    return Recipe(path, module, config_class, Objective.parse(str(module.OBJECTIVE)))
