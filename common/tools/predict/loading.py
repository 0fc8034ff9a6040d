"""A trained model as a module: of a recipe or of any copy, from a run or its `model` folder."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.directory import FACTS, WEIGHTS, model_folder
from common.errors import UserError
from common.files import read_json, reading
from common.recipe import load_recipe
from common.standing import advice_to_go_on, present_status

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
TRANSFORMERS_CONFIG = "config.json"  # in a model folder; Transformers builds the model from it


def load_model(
    run_directory: str | Path,
    recipe_file: str | Path | None = None,
    device: str | torch.device = "cpu",
) -> nn.Module:
    """Return the trained model of a finished run, in evaluation mode and fp32.

    Args:
        run_directory: the run's directory, or its `model` folder.
        recipe_file: the Python file that trained it. It may be left out for this repository's own
            recipes, and for a model that Transformers builds. Nothing in the run's directory is
            executed, so that a copy must be named.
        device: where the model is put.

    Raises:
        UserError: there is no finished model, or the file defines another one.
    """
    folder = finished_model(Path(run_directory))
    facts = read_json(folder / FACTS)
    if (folder / TRANSFORMERS_CONFIG).is_file():
        model = load_transformers_model(folder, facts, recipe_file)
    else:
        model = load_recipe_model(folder, facts, recipe_file)
    return model.float().eval().to(device)


def finished_model(run: Path) -> Path:
    """Return the model folder of a run; a `UserError` says why there is none."""
    if not os.path.isdir(run):
        raise UserError(f"{run} is no folder: pass a run that finished, such as runs/NAME")
    status = present_status(run).get("status", "finished")
    if status != "finished" and not (run / "model").is_dir():
        raise UserError(f"{run} is {status} and has no model yet: {advice_to_go_on(run)}")
    return model_folder(run, "")


def load_transformers_model(
    folder: Path, facts: dict[str, Any], recipe_file: str | Path | None
) -> nn.Module:
    """Build a model by Transformers: of the class that was trained, which may be a copy's own."""
    import transformers

    from common.models.bert import load_pretrained

    class_name = str(facts.get("class", "AutoModelForSequenceClassification"))
    place = str(folder)
    options = {"attn_implementation": "sdpa"}
    if hasattr(transformers, class_name):
        model, loading = load_pretrained(class_name, place, place, **options)
    else:
        model_class: Any = class_of_recipe(folder, facts, recipe_file)
        with reading(place):
            model, loading = model_class.from_pretrained(
                place, output_loading_info=True, use_safetensors=True, dtype="float32", **options
            )
    if missing := loading["missing_keys"]:  # Transformers has drawn these at random
        raise UserError(f"{folder} is no whole model: {WEIGHTS} has no {min(missing)}")
    return model


def load_recipe_model(
    folder: Path, facts: dict[str, Any], recipe_file: str | Path | None
) -> nn.Module:
    """Build the model by the class and the arguments that the run's description states."""
    from common.checkpoints.export import load_weights

    model_class = class_of_recipe(folder, facts, recipe_file)
    if "arguments" not in facts:
        name = model_class.__name__
        advice = f'add "arguments", those of {name}, to the description given to run.start'
        raise UserError(f"{folder / FACTS} does not say how to build a {name}: {advice}")
    with reading(str(folder / FACTS)):
        model = model_class(**facts["arguments"])
    load_weights(model, folder)
    return model


def class_of_recipe(
    folder: Path, facts: dict[str, Any], recipe_file: str | Path | None
) -> type[nn.Module]:
    """Return the model's class, which the recipe defines or imports."""
    path = own_recipe(folder, facts) if recipe_file is None else Path(recipe_file)
    class_name = str(facts.get("class"))
    model_class = getattr(load_recipe(path).module, class_name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
        raise UserError(f"{path} has no model {class_name}: name another by --recipe")
    return model_class


def own_recipe(folder: Path, facts: dict[str, Any]) -> Path:
    """Return the file of this repository's recipe that trained a model."""
    name = str(facts.get("recipe"))
    path = RECIPES / f"{name}.py"
    if Path(name).name != name or not path.is_file():
        advice = f"add --recipe {name}.py, or in a program pass it to load_model"
        raise UserError(f"{folder} is of the recipe {name}: {advice}")
    return path
