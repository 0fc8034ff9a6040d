"""The final model on disk: safetensors, and what is needed to use it again."""

import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.checkpoints.copies import copied
from common.checkpoints.pack import identity
from common.directory import FACTS, INITIAL, WEIGHTS, model_folder
from common.errors import UserError
from common.files import (
    read_json,
    read_tensors,
    reading,
    replacing,
    write_json,
    write_tensors,
    writing,
)
from common.machine import is_main_rank


def save_model(folder: Path, model: nn.Module, facts: dict[str, Any]) -> None:
    """Write a model's weights and `facts`, whole; a Transformers model as `from_pretrained` reads.

    Args:
        facts: what is needed to build and use the model: constructor arguments, class names,
            normalisation, image size. ``files`` is a folder to copy beside the weights.
    """
    with writing(str(folder)), replacing(folder) as unfinished:
        if facts.get("files") is not None:
            shutil.copytree(facts["files"], unfinished, dirs_exist_ok=True)
        if save_pretrained := getattr(model, "save_pretrained", None):
            save_pretrained(unfinished)
        else:
            state = model.state_dict()
            weights = {name: state[name] for name, *_ in names_by_weight(model)}
            write_tensors(unfinished / WEIGHTS, copied(weights))
        write_json(unfinished / FACTS, {name: facts[name] for name in facts if name != "files"})


def load_initial(model: nn.Module, config: Any, directory: Path) -> None:
    """Load the weights that `--init-from` names, and keep a copy: a resume needs no other."""
    source = model_folder(config.init_from)
    load_weights(model, source)
    if is_main_rank() and config.resume is None and not config.evaluate_only:
        kept = directory / INITIAL
        with writing(str(kept)), replacing(kept) as unfinished:
            shutil.copytree(source, unfinished, dirs_exist_ok=True)


def names_by_weight(model: nn.Module) -> list[list[str]]:
    """Return the names of each tensor in a model's state: several where weights are tied."""
    names: dict[Any, list[str]] = defaultdict(list)
    for name, value in model.state_dict().items():
        names[identity(value)].append(name)
    return [*names.values()]


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Load the weights of a run into `model`; a `UserError` says in what they don't fit."""
    state, weights = model.state_dict(), read_tensors(model_folder(path) / WEIGHTS)
    for names in names_by_weight(model):
        if stored := [weights[name] for name in names if name in weights]:
            weights |= dict.fromkeys(names, stored[0])
    for name in sorted(state.keys() | weights.keys()):
        here, there = (tuple(t[name].shape) if name in t else None for t in (state, weights))
        if here != there:
            raise UserError(
                f"--init-from {path} is another model: {name} has the shape {there} there and "
                f"{here} here: pass the same model flags and data set"
            )
    model.load_state_dict(weights)


class ImagePreprocessor:
    """Turns a Pillow image into the batch of one that the model was trained on."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.class_names: list[str] = [*facts["class_names"]]
        self.size, self.channels = int(facts["image_size"]), int(facts["channels"])
        self.mean, self.std = (torch.tensor(facts[name]).float() for name in ("mean", "std"))

    def __call__(self, image: Any) -> torch.Tensor:
        """Return float32 [1, channels, image_size, image_size]."""
        from common.data.images import image_to_pixels

        pixels = torch.from_numpy(image_to_pixels(image, self.size, self.channels).copy()) / 255
        return ((pixels - self.mean) / self.std).permute(2, 0, 1)[None]


def load_model(
    model_class: type[nn.Module], path: str | Path
) -> tuple[nn.Module, ImagePreprocessor]:
    """Return the trained image model of a run, or of its `model` folder, and its preprocessing.

    `model_class` is the recipe's, such as `recipes.resnet.ResNet`.
    """
    file = model_folder(path) / FACTS
    facts = read_json(file)
    with reading(str(file)):
        model, preprocess = model_class(**facts["arguments"]), ImagePreprocessor(facts)
    load_weights(model, path)
    return model.eval(), preprocess
