"""The final model on disk: safetensors, and what is needed to use it again."""

import os
import shutil
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

from torch import nn

from common.checkpoints.copies import copied
from common.checkpoints.pack import Tensors, identity
from common.checkpoints.shards import fill, is_sharded, read_rows
from common.checkpoints.tensors import write_in_turn, write_tensors
from common.console import say
from common.directory import FACTS, INITIAL, WEIGHTS, model_folder
from common.errors import UserError
from common.files import replacing, write_json, write_text, writing
from common.initial import initial_facts, weights_file
from common.machine import is_main_rank


def save_model(
    folder: Path, model: nn.Module, facts: dict[str, Any], card: str = "", bare: Any = None
) -> None:
    """Write a model's weights and `facts`, whole; a Transformers model as `from_pretrained` reads.

    Args:
        facts: what is needed to build and use the model: constructor arguments, class names,
            normalisation, image size. ``files`` is a folder to copy beside the weights.
        card: what `README.md` says of the model.
        bare: of a model in shards, itself without values. All ranks call this then, and the first
            writes one tensor at a time.
    """
    weights: dict[str, Any] = weights_of(model)
    values = (v.full_tensor().cpu() if is_sharded(v) else v.cpu() for v in weights.values())
    if bare is not None and not is_main_rank():
        deque(values, 0)
        return
    with writing(str(folder)), replacing(folder) as unfinished:
        if facts.get("files") is not None:
            shutil.copytree(facts["files"], unfinished, dirs_exist_ok=True)
        save_pretrained: Any = getattr(model if bare is None else bare, "save_pretrained", None)
        if bare is not None:
            if save_pretrained is not None:
                save_pretrained(unfinished, state_dict={})  # what is not weights
            try:
                write_in_turn(unfinished / WEIGHTS, weights, values)
            finally:
                deque(values, 0)  # the other ranks wait at each
        elif save_pretrained is not None:
            save_pretrained(unfinished)
        else:
            write_tensors(unfinished / WEIGHTS, copied(weights))
        write_json(unfinished / FACTS, {name: facts[name] for name in facts if name != "files"})
        if card:
            write_text(unfinished / "README.md", card)


def load_initial(
    model: nn.Module, config: Any, directory: Path, class_names: list[str] | None
) -> None:
    """Load the weights that `--init-from` names, and keep a copy: a resume needs no other.

    The last linear layer stays as it is where it is for other classes than those named.
    """
    source = weights_file(config.init_from)
    weights, names = read_rows([source]), initial_facts(config.init_from).get("class_names")
    layers = [(n, layer) for n, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    if class_names is not None and layers and not config.evaluate_only:
        name, head = layers[-1]
        there = weights.get(f"{name}.weight")
        is_same = there is not None and there.shape[0] == len(class_names)
        others = not is_same or names not in (None, class_names)
        if others and (there is None or there.shape[1:] == head.weight.shape[1:]):
            say(f"--init-from {config.init_from}: of other classes, or none: {name} begins anew")
            weights |= {f"{name}.{key}": value for key, value in head.state_dict().items()}
    put_weights(model, weights, config.init_from)
    if is_main_rank() and config.resume is None and not config.evaluate_only:
        kept = directory / INITIAL
        with writing(str(kept)), replacing(kept) as unfinished:
            if os.path.isfile(config.init_from):
                shutil.copy(source, unfinished / WEIGHTS)
                write_json(unfinished / FACTS, {})
            else:
                shutil.copytree(source.parent, unfinished, dirs_exist_ok=True)


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
    put_weights(model, read_rows([model_folder(path) / WEIGHTS]), path)


def put_weights(model: nn.Module, weights: dict[str, Any], path: str | Path) -> None:
    """Give `model` what `weights_of` returned of one like it, and what is at `path`."""
    state = model.state_dict()
    for names in names_by_weight(model):
        if stored := [weights[name] for name in names if name in weights]:
            weights |= dict.fromkeys(names, stored[0])
    for name in sorted(state.keys() | weights.keys()):
        here, there = (tuple(t[name].shape) if name in t else None for t in (state, weights))
        if here != there:
            shapes = f"{name} has the shape {there} there and {here} here"
            advice = "take the same model flags and data set"
            raise UserError(f"{path} is of another model: {shapes}: {advice}")
    for name, value in state.items():
        fill(value, weights[name])
