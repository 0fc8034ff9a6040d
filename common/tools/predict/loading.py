"""Load the trained model of a run, of a recipe or of any copy, as a PyTorch module."""

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from common.errors import UserError
from common.failures.sentences import reading
from common.run_directory.finished_model import WEIGHTS, model_folder
from common.run_directory.model_records import ModelFacts
from common.run_directory.recipe_source import RecipeSource, latest_source
from common.run_directory.record_files import read_record
from common.run_directory.records import MODEL_FOLDER, MODEL_JSON
from common.run_directory.status import advice_to_go_on, current_status
from common.tools.recipe import load_recipe

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
TRANSFORMERS_CONFIG = "config.json"  # a model folder has it if Transformers can build the model


class RecipeArgument(NamedTuple):
    """The caller's argument for the recipe's file."""

    file: str | Path | None  # None: this repository's own recipes are searched
    pattern: str = "--recipe {}"  # the argument as the caller writes it, with {} for the file

    def with_file(self, file: object) -> str:
        """Return the argument that names another file, for a message."""
        return self.pattern.format(file)


def load_model(
    run_directory: str | Path,
    recipe_file: str | Path | None = None,
    device: str | torch.device = "cpu",
) -> nn.Module:
    """Return the trained model of a finished run, in evaluation mode and fp32.

    Args:
        run_directory: the run's directory, or its `model` folder.
        recipe_file: the Python file that trained the model. It may be None for this repository's
            own recipes, and for a model that Transformers builds. A copied recipe must be named,
            because nothing in the run's directory is executed.
        device: the device of the returned model.

    Raises:
        ValueError: there is no finished model, or the file does not define this model. A program
            can catch it, unlike a `UserError`, which ends the program.
    """
    try:
        recipe = RecipeArgument(recipe_file, pattern='recipe_file="{}"')
        return load_trained_model(finished_model_folder(Path(run_directory)), recipe).to(device)
    except UserError as error:
        raise ValueError(error.message) from None


def load_trained_model(folder: Path, recipe: RecipeArgument) -> nn.Module:
    """Return a trained model on the CPU, in evaluation mode and fp32; see `load_model`.

    Args:
        folder: the model's folder, which `finished_model_folder` returns.

    Raises:
        UserError: the file does not define this model, or the folder's files are damaged.
    """
    facts = read_record(folder / MODEL_JSON, ModelFacts)
    if (folder / TRANSFORMERS_CONFIG).is_file():
        model = load_transformers_model(folder, facts, recipe)
    else:
        model = load_recipe_model(folder, facts, recipe)
    return model.float().eval()


def finished_model_folder(run: Path) -> Path:
    """Return the model folder of a run; `run` may also be the model folder itself.

    Raises:
        UserError: there is no finished model. The message says why.
    """
    if not os.path.isdir(run):
        raise UserError(
            f"there is no folder {run}",
            advice="pass the directory of a finished run, such as runs/NAME",
        )
    status = current_status(run).status
    # This refuses only an unfinished run without a model. A model folder has the status "unknown",
    # and an unfinished run may have a model from an earlier end: see `model_folder`.
    if status not in ("finished", "unknown") and not (run / MODEL_FOLDER).is_dir():
        raise UserError(
            f"{run} has no model yet, and its status is {status}", advice=advice_to_go_on(run)
        )
    return model_folder(run, flag="")  # the message needs no flag before the path


def load_transformers_model(folder: Path, facts: ModelFacts, recipe: RecipeArgument) -> nn.Module:
    """Build a model with Transformers. Its class is from Transformers or from a recipe.

    Args:
        folder: the model's folder.
        facts: the contents of `model.json`. Without a class there, the model is a classifier.
        recipe: the file that defines the class.

    Raises:
        UserError: the file does not define the class, or the weights are incomplete.
    """
    import transformers

    from common.models.bert import load_pretrained

    class_name = facts.class_name or "AutoModelForSequenceClassification"
    source = str(folder)
    options = {"attn_implementation": "sdpa"}
    if hasattr(transformers, class_name):
        model, loading_info = load_pretrained(class_name, name=source, subject=source, **options)
    else:
        # The class extends a class of Transformers, and has its `from_pretrained`. The type that
        # `class_of_recipe` returns does not say so, hence `Any`.
        model_class: Any = class_of_recipe(folder, facts, recipe)
        with reading(source, "copy the folder again from its source, or train the model again"):
            model, loading_info = model_class.from_pretrained(
                source, output_loading_info=True, use_safetensors=True, dtype="float32", **options
            )
    missing = loading_info["missing_keys"]
    if missing:  # Transformers fills missing weights with random values
        raise UserError(
            f"{folder} is incomplete, because {WEIGHTS} has no {min(map(str, missing))}",
            advice="copy the folder again from its source, or train the model again",
        )
    return model


def load_recipe_model(folder: Path, facts: ModelFacts, recipe: RecipeArgument) -> nn.Module:
    """Build the model from the class and the arguments that `model.json` states.

    Raises:
        UserError: the file does not define the class, the arguments are missing or do not fit, or
            the weights do not fit.
    """
    from common.checkpoints.model_weights import load_weights

    model_class = class_of_recipe(folder, facts, recipe)
    if facts.arguments is None:
        name = model_class.__name__
        advice = (
            f'add "arguments": {{...}} with the arguments of {name} to this file, and for later '
            "runs, to the description that run.start gets in the recipe"
        )
        raise UserError(
            f"{folder / MODEL_JSON} does not contain the arguments with which to build the model "
            f"{name}",
            advice=advice,
        )
    advice = f'correct its "arguments", or pass the file of the model: {recipe.with_file("FILE")}'
    with reading(str(folder / MODEL_JSON), advice):
        model = model_class(**facts.arguments)
    load_weights(model, folder)
    return model


def class_of_recipe(folder: Path, facts: ModelFacts, recipe: RecipeArgument) -> type[nn.Module]:
    """Return the model's class, which the recipe's file defines or imports.

    Args:
        folder: the model's folder, for a message.
        facts: the contents of `model.json`.
        recipe: the file.

    Raises:
        UserError: the file has no model of this name.
    """
    path = Path(recipe.file or recipe_of_repository(folder, facts, recipe))
    warn_of_other_code(path, folder.parent, facts, recipe)
    class_name = str(facts.class_name)  # a damaged file may lack it, and nothing is called "None"
    model_class = getattr(load_recipe(path).module, class_name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
        raise UserError(
            f"{path} neither defines nor imports the model's class, {class_name}",
            advice=f"pass the recipe that trained the model: {recipe.with_file('FILE')}",
        )
    return model_class


def warn_of_other_code(path: Path, run: Path, facts: ModelFacts, recipe: RecipeArgument) -> None:
    """Warn if a recipe's code is not the code that trained the model.

    Other code of the network may fit the weights, and change each prediction.

    Args:
        path: the recipe's file.
        run: the run's directory. A model folder may have been copied without it.
        facts: the contents of `model.json`, which name the recipe that trained the model.
        recipe: the argument with which the caller can name another file.
    """
    source = latest_source(run)
    if source is None or not path.is_file() or RecipeSource(path).is_same_code(source):
        return
    difference = f"{path} was changed after this model was trained"
    if facts.recipe not in (None, path.stem):
        difference = f"{path} has other code than {facts.recipe}.py, which trained this model"
    # To stderr, because `recipes predict` prints its predictions as JSON.
    print(
        f"{difference}; to use the code that trained it, pass {recipe.with_file(source)}",
        file=sys.stderr,
    )


def recipe_of_repository(folder: Path, facts: ModelFacts, recipe: RecipeArgument) -> Path:
    """Return the recipe of this repository that trained a model, as a path.

    Raises:
        UserError: the model's recipe is not in `recipes/`, so the user must name its file.
    """
    name = str(facts.recipe)
    path = RECIPES / f"{name}.py"
    # A name with slashes could lead to a file outside of the repository, which must not run.
    if Path(name).name != name or not path.is_file():
        raise UserError(
            f"{folder} was trained by the recipe {name}, which is not one of the files in recipes/",
            advice=f"pass the path of that file, such as {recipe.with_file('examples/lora.py')}",
        )
    return path
