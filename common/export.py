"""The final model on disk: safetensors, and what is needed to use it again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from common.errors import UserError

WEIGHTS, FACTS = "model.safetensors", "model.json"


def save_model(folder: Path, model: nn.Module, facts: dict[str, Any]) -> None:
    """Write a model's weights and `facts`; a Transformers model also as `from_pretrained` reads.

    Args:
        facts: what is needed to build and use the model: constructor arguments, class names,
            normalisation, image size.
    """
    folder.mkdir(exist_ok=True)
    save_pretrained: Any = getattr(model, "save_pretrained", None)
    if save_pretrained is not None:
        save_pretrained(folder)
    else:
        weights = {name: value.contiguous().cpu() for name, value in model.state_dict().items()}
        save_file(weights, folder / WEIGHTS)
    (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n")


def model_folder(path: str | Path) -> Path:
    """Return the folder of the model in a run, or of the model itself.

    Raises:
        UserError: when there is none.
    """
    for folder in (Path(path, "model"), Path(path)):
        if (folder / WEIGHTS).is_file() and (folder / FACTS).is_file():
            return folder
    raise UserError(
        f"--init-from {path} holds no finished model ({WEIGHTS} and {FACTS}): "
        "pass a run that finished, or its model folder"
    )


def read_facts(path: str | Path) -> dict[str, Any]:
    """Return what `save_model` wrote beside the weights."""
    return json.loads((model_folder(path) / FACTS).read_text())


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Load the weights of a run into `model`.

    Raises:
        UserError: when the file is damaged, or the architectures differ: says in what.
    """
    folder = model_folder(path)
    try:
        weights = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as problem:
        raise UserError(f"{folder / WEIGHTS} is damaged: {problem}") from None
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in weights.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise UserError(
                f"--init-from {path} is another model: {name} has the shape {found.get(name)} "
                f"there and {expected.get(name)} here: pass the same model flags and data set"
            )
    model.load_state_dict(weights)


def load_model(
    model_class: type[nn.Module], path: str | Path
) -> tuple[nn.Module, ImagePreprocessor]:
    """Return the trained image model of a run, ready to predict, and its preprocessing.

    Args:
        model_class: the class of the recipe, such as `recipes.resnet.ResNet`.
        path: a run's directory, or its `model` folder.
    """
    facts = read_facts(path)
    model = model_class(**facts["arguments"])
    load_weights(model, path)
    return model.eval(), ImagePreprocessor(facts)


class ImagePreprocessor:
    """Turns a Pillow image into the batch of one that the model was trained on."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.class_names: list[str] = facts["class_names"]

    def __call__(self, image: Any) -> torch.Tensor:
        """Return float32 [1, channels, image_size, image_size]."""
        from common.decode import image_to_pixels

        size, channels = self.facts["image_size"], self.facts["channels"]
        pixels = torch.from_numpy(image_to_pixels(image, size, channels).copy()) / 255
        mean, std = torch.tensor(self.facts["mean"]), torch.tensor(self.facts["std"])
        return ((pixels - mean) / std).permute(2, 0, 1)[None]
