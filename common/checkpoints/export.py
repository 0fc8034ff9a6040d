"""The final model on disk: safetensors, and what is needed to use it again."""

import os
import shutil
from collections import defaultdict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from common.checkpoints.copies import copied
from common.checkpoints.pack import Tensors, identity
from common.checkpoints.shards import fill, is_sharded, read_rows
from common.checkpoints.tensors import write_in_turn, write_tensors
from common.console import say
from common.directory import FACTS, INITIAL, WEIGHTS, WEIGHTS_DIGEST, model_folder
from common.errors import UserError
from common.files import receipt_of, replacing, write_json, write_text, writing
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
        told = {name: facts[name] for name in facts if name != "files"}
        told[WEIGHTS_DIGEST] = receipt_of(unfinished / WEIGHTS)["sha256"]
        write_json(unfinished / FACTS, told)
        if card:
            write_text(unfinished / "README.md", card)


def load_initial(
    model: nn.Module, config: Any, directory: Path, class_names: list[str] | None
) -> None:
    """Load the weights that `--init-from` names, and keep a copy: a resume needs no other.

    A head for other classes than those named stays as it is: see `heads_to_begin_anew`.
    """
    source = weights_file(config.init_from)
    weights, names = read_rows([source]), initial_facts(config.init_from).get("class_names")
    refuse_other_kind(model.state_dict(), weights, config.init_from)
    if not config.evaluate_only:
        heads = heads_to_begin_anew(model, weights, names, class_names)
        for name, head in heads.items():
            say(f"--init-from {config.init_from}: of other classes, or none: {name} begins anew")
            weights |= {f"{name}.{key}": value for key, value in head.state_dict().items()}
    put_weights(model, weights, config.init_from)
    if is_main_rank() and config.resume is None and not config.evaluate_only:
        keep_initial(source, directory / INITIAL, is_file=os.path.isfile(config.init_from))


def keep_initial(source: Path, folder: Path, is_file: bool) -> None:
    """Copy weights, or the model's folder that they are in, for a resume to need nothing else."""
    with writing(str(folder)), replacing(folder) as unfinished:
        if is_file:
            shutil.copy(source, unfinished / WEIGHTS)
            write_json(unfinished / FACTS, {WEIGHTS_DIGEST: receipt_of(source)["sha256"]})
        else:
            shutil.copytree(source.parent, unfinished, dirs_exist_ok=True)


def heads_to_begin_anew(
    model: nn.Module,
    weights: Mapping[str, Any],
    names: Any,
    class_names: list[str] | None,
) -> dict[str, nn.Linear]:
    """Return the heads, by name, that can't take their weights, or must not.

    The last linear layer may be a head, and so may each with one output a class whose outputs no
    later layer takes. A head begins anew if the weights have none for it, or one with another
    number of outputs. One with an output a class does so, too, if the weights are known to be for
    other classes.

    Args:
        weights: tensors, or what has their shape, by name.
        names: the class names of the weights, if they are known.
        class_names: those of the data; None where there are no classes.
    """
    if class_names is None:
        return {}
    linear = [(n, layer) for n, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    anew = dict[str, nn.Linear]()
    for position, (name, layer) in enumerate(linear):
        later = [other for _, other in linear[position + 1 :]]
        is_hidden = any(other.in_features == layer.out_features for other in later)
        is_for_classes = layer.out_features == len(class_names) and not is_hidden
        there = weights.get(f"{name}.weight")
        if there is not None and there.shape[1:] != layer.weight.shape[1:]:
            continue  # of another model, as is told when the weights are loaded
        is_missing = there is None or there.shape[0] != layer.out_features
        has_other_classes = is_for_classes and names not in (None, class_names)
        if (is_missing and (is_for_classes or not later)) or has_other_classes:
            anew[name] = layer
    return anew


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
    refuse_other_model(state, weights, path)
    for name, value in state.items():
        fill(value, weights[name])


def refuse_other_model(state: Mapping[str, Any], weights: Mapping[str, Any], path: Any) -> None:
    """Raise a `UserError` that says in what weights do not fit a model's state."""
    refuse_other_kind(state, weights, path)
    advice = "take the same model flags and data set"
    for name in sorted(state.keys() | weights.keys()):
        here, there = (tuple(t[name].shape) if name in t else None for t in (state, weights))
        if here == there:
            continue
        missing = sorted(state.keys() - weights.keys())
        unknown = sorted(weights.keys() - state.keys())
        if here is None:
            words = f"it has {name}, which this model has not ({len(unknown):,} such tensors)"
        elif there is None:
            words = f"it has no {name}, which this model needs ({len(missing):,} such tensors)"
        else:
            words = f"{name} has the shape {there} there and {here} here"
        raise UserError(f"{path} is of another model: {words}: {advice}")


def refuse_other_kind(state: Mapping[str, Any], weights: Mapping[str, Any], path: Any) -> None:
    """Raise a `UserError` where weights and a model's state have no name in common."""
    if state and weights and not state.keys() & weights.keys():
        raise UserError(
            f"{path} has weights of another model: none of its {len(weights):,} tensors has a name "
            f"of this one ({min(weights)} there, {min(state)} here): pass weights of this "
            "recipe's model"
        )
