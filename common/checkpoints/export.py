"""The final model on disk: safetensors, and what is needed to use it again."""

import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

from torch import nn

from common.checkpoints.copies import copied
from common.checkpoints.pack import Tensors, identity
from common.directory import FACTS, INITIAL, WEIGHTS, model_folder
from common.errors import UserError
from common.files import (
    read_tensors,
    replacing,
    write_json,
    write_tensors,
    write_text,
    writing,
)
from common.machine import is_main_rank


def save_model(folder: Path, model: nn.Module, facts: dict[str, Any], card: str = "") -> None:
    """Write a model's weights and `facts`, whole; a Transformers model as `from_pretrained` reads.

    Args:
        facts: what is needed to build and use the model: constructor arguments, class names,
            normalisation, image size. ``files`` is a folder to copy beside the weights.
        card: what `README.md` says of the model.
    """
    with writing(str(folder)), replacing(folder) as unfinished:
        if facts.get("files") is not None:
            shutil.copytree(facts["files"], unfinished, dirs_exist_ok=True)
        if save_pretrained := getattr(model, "save_pretrained", None):
            save_pretrained(unfinished)
        else:
            write_tensors(unfinished / WEIGHTS, copied(weights_of(model)))
        write_json(unfinished / FACTS, {name: facts[name] for name in facts if name != "files"})
        if card:
            write_text(unfinished / "README.md", card)


def load_initial(model: nn.Module, config: Any, directory: Path) -> None:
    """Load the weights that `--init-from` names, and keep a copy: a resume needs no other."""
    source = model_folder(config.init_from)
    load_weights(model, source)
    if is_main_rank() and config.resume is None and not config.evaluate_only:
        kept = directory / INITIAL
        with writing(str(kept)), replacing(kept) as unfinished:
            shutil.copytree(source, unfinished, dirs_exist_ok=True)


def weights_of(model: nn.Module) -> Tensors:
    """Return a model's state, not copied, each tensor under one name."""
    state = model.state_dict()
    return {name: state[name] for name, *_ in names_by_weight(model)}


def names_by_weight(model: nn.Module) -> list[list[str]]:
    """Return the names of each tensor in a model's state: several where weights are tied."""
    names: dict[Any, list[str]] = defaultdict(list)
    for name, value in model.state_dict().items():
        names[identity(value)].append(name)
    return [*names.values()]


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Load the weights of a run into `model`; a `UserError` says in what they don't fit."""
    put_weights(model, read_tensors(model_folder(path) / WEIGHTS), path)


def put_weights(model: nn.Module, weights: Tensors, path: str | Path) -> None:
    """Give `model` what `weights_of` returned of one like it, and what is at `path`."""
    state = model.state_dict()
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
