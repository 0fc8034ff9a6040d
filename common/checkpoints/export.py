"""Writes a finished model to a folder, and loads such weights into a model."""

import contextlib
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from common.checkpoints.copies import copied
from common.checkpoints.pack import Tensors, storage_key
from common.checkpoints.shards import Rows, fill, is_sharded, read_sharded
from common.checkpoints.tensors import write_in_turn, write_tensors
from common.config import TrainingConfig
from common.console import say
from common.errors import UserError
from common.failures.sentences import writing
from common.run_directory.directory import INITIAL
from common.run_directory.finished_model import WEIGHTS, model_folder
from common.run_directory.init_from import initial_facts, weights_file
from common.run_directory.model_records import WeightsDigest
from common.run_directory.records import MODEL_JSON
from common.storage.digests import sha256_of_file
from common.storage.files import replacing, write_text
from common.storage.json_files import write_json
from common.system.launch_variables import is_main_rank
from common.system.wording import counted


def save_model(
    folder: Path,
    model: nn.Module,
    facts: Mapping[str, object],
    card: str,
    skeleton: nn.Module | None,
) -> None:
    """Write a finished model's folder: weights, facts and card, completely or not at all.

    A Transformers model is written so that `from_pretrained` reads the folder. Only rank 0 may call
    this function, unless the model is sharded: see `skeleton`.

    Args:
        facts: the contents of `model.json`, by which the model is built and used: constructor
            arguments, class names, normalisation, image size. An entry ``files`` is not written
            there: it is the path of a folder whose files are copied beside the weights, or None.
        card: the text of `README.md`; without a text, there is no such file.
        skeleton: the same model on the meta device, without values, if the model is sharded; None
            otherwise. All ranks must call this function for a sharded model, and rank 0 writes one
            tensor at a time.

    Raises:
        UserError: the folder can't be written.
    """
    weights = weights_of(model)
    if skeleton is not None and not is_main_rank():
        take_part_in_gathering(weights)
        return
    with writing(str(folder)), replacing(folder) as unfinished:
        files = facts.get("files")
        if files is not None:
            shutil.copytree(str(files), unfinished, dirs_exist_ok=True)
        if skeleton is None:
            write_whole_model(unfinished, model, weights)
        else:
            write_sharded_model(unfinished, skeleton, weights)
        model_facts = {name: facts[name] for name in facts if name != "files"}
        model_facts |= digest_of_weights_file(unfinished / WEIGHTS).to_json()
        write_json(unfinished / MODEL_JSON, model_facts)
        if card:
            write_text(unfinished / "README.md", card)


def write_whole_model(folder: Path, model: nn.Module, weights: Tensors) -> None:
    """Write the weights of a model that is not sharded; also a Transformers model's other files."""
    save_pretrained = getattr(model, "save_pretrained", None)
    if save_pretrained is not None:
        with without_progress_bar():
            save_pretrained(folder)
    else:
        write_tensors(folder / WEIGHTS, copied(weights))


def write_sharded_model(folder: Path, skeleton: nn.Module, weights: Tensors) -> None:
    """Write the weights of a sharded model on rank 0, and a Transformers model's other files."""
    save_pretrained = getattr(skeleton, "save_pretrained", None)
    if save_pretrained is not None:
        with without_progress_bar():
            save_pretrained(folder, state_dict={})  # the files besides the weights
    write_sharded_weights(folder / WEIGHTS, weights)


@contextlib.contextmanager
def without_progress_bar() -> Iterator[None]:
    """Have Transformers show no progress bar in the block, because a run has its own display."""
    if "transformers" not in sys.modules:  # the model is of another library
        yield
        return
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def digest_of_weights_file(path: Path) -> WeightsDigest:
    """Return the digest of a file of weights, as `model.json` records it.

    Before weights are loaded, `require_written_weights` in `common.run_directory.finished_model`
    compares the digest with the file, and refuses a file that has changed.

    Raises:
        OSError: the file can't be read.
    """
    return WeightsDigest(weights_sha256=sha256_of_file(path))


def whole_tensors(weights: Tensors) -> Iterator[torch.Tensor]:
    """Yield each tensor whole, on the CPU; all ranks must iterate together if any is sharded."""
    for value in weights.values():
        yield value.full_tensor().cpu() if is_sharded(value) else value.cpu()


def take_part_in_gathering(weights: Tensors) -> None:
    """Take this rank's part in `whole_tensors` on rank 0, without keeping the tensors.

    Gathering a sharded tensor is a collective operation, in which all ranks must take part.
    """
    for _ in whole_tensors(weights):
        pass


def write_sharded_weights(path: Path, weights: Tensors) -> None:
    """Write the weights of a sharded model on rank 0, one whole tensor at a time."""
    tensors = whole_tensors(weights)
    try:
        write_in_turn(path, weights, tensors)
    finally:
        # After an error, go through the remaining tensors: the other ranks wait for rank 0 at each.
        for _ in tensors:
            pass


def load_initial(model: nn.Module, config: TrainingConfig, class_names: list[str] | None) -> None:
    """Load the weights that `--init-from` names.

    A resume loads them too, because the run begins again if no checkpoint is whole. `init_from`
    then names the copy of `keep_initial`: `run_directory/resume.py` sets it.

    A head for other classes keeps its random values, except in an evaluation: see
    `heads_to_reinitialize`.

    Args:
        class_names: the classes of the run's data; None if the data have no classes.

    Raises:
        UserError: the weights can't be read or do not fit the model.
    """
    initial_model = config.init_from
    assert initial_model is not None  # otherwise there is nothing to load
    weights = read_sharded([weights_file(initial_model)])
    initial_class_names = initial_facts(initial_model).class_names
    refuse_unrelated_weights(model.state_dict(), weights, initial_model)
    if not config.evaluate_only:  # an evaluation must not use a head with random values
        heads = heads_to_reinitialize(model, weights, initial_class_names, class_names)
        for name, head in heads.items():
            say(
                f"--init-from {initial_model} has different classes from these data, or none, so "
                f"{name} starts with random values"
            )
            # `put_weights` needs a value for each weight. The head gets its current random values.
            for key, value in head.state_dict().items():
                weights[f"{name}.{key}"] = value
    put_weights(model, weights, initial_model)


def keep_initial(config: TrainingConfig, directory: Path) -> None:
    """Copy the weights of `--init-from` into a run's directory; called on all ranks.

    Then a resume needs no other files. If `--init-from` names a folder, the whole folder is copied.
    Nothing is copied on a resume, which has the copy, or in an evaluation, which is not resumed.

    Raises:
        UserError: the weights can't be copied.
    """
    initial_model = config.init_from
    assert initial_model is not None  # otherwise there is nothing to copy
    if config.resume is not None or config.evaluate_only:
        return
    source = weights_file(initial_model)  # on all ranks, because it may ask rank 0
    if not is_main_rank():
        return
    folder = directory / INITIAL
    with writing(str(folder)), replacing(folder) as unfinished:
        if os.path.isfile(initial_model):
            shutil.copy(source, unfinished / WEIGHTS)
            write_json(unfinished / MODEL_JSON, digest_of_weights_file(source).to_json())
        else:
            shutil.copytree(source.parent, unfinished, dirs_exist_ok=True)


def heads_to_reinitialize(
    model: nn.Module,
    weights: Mapping[str, torch.Tensor | Rows],
    initial_class_names: object,
    class_names: list[str] | None,
) -> dict[str, nn.Linear]:
    """Return by name the heads that keep random values instead of taking initial weights.

    A head is the last linear layer, or a layer with one output per class that feeds no later layer.
    It keeps random values in two cases:

    - The weights lack it, or have another number of outputs for it.
    - It has one output per class, and the weights are known to be for other classes.

    The result is empty if the data have no classes.

    Args:
        weights: the initial weights, by name.
        initial_class_names: the class names that belong to the weights, as their `model.json` has
            them: normally a list of strings; None if they are unknown.
        class_names: the classes of the run's data; None if the data have no classes.
    """
    if class_names is None:
        return {}
    linear_layers = [
        (name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)
    ]
    has_other_classes = initial_class_names not in (None, class_names)
    heads: dict[str, nn.Linear] = {}
    for position, (name, layer) in enumerate(linear_layers):
        later_layers = [other for _, other in linear_layers[position + 1 :]]
        # A hidden layer may have as many outputs as there are classes, by chance.
        is_hidden = any(other.in_features == layer.out_features for other in later_layers)
        is_for_classes = layer.out_features == len(class_names) and not is_hidden
        is_head = is_for_classes or not later_layers
        weight = weights.get(f"{name}.weight")
        if weight is not None and weight.shape[1:] != layer.weight.shape[1:]:
            continue  # weights of another model, which loading refuses with a message
        lacks_values = weight is None or weight.shape[0] != layer.out_features
        has_values_of_other_classes = is_for_classes and has_other_classes
        if (is_head and lacks_values) or has_values_of_other_classes:
            heads[name] = layer
    return heads


def weights_of(model: nn.Module) -> Tensors:
    """Return a model's state, not copied.

    Tied weights are there once, under their first name, so that a file does not repeat them.
    """
    state = model.state_dict()
    return {name: state[name] for name, *_ in names_by_weight(model)}


def names_by_weight(model: nn.Module) -> list[list[str]]:
    """Return the names of each tensor in a model's state; tied weights have several names."""
    names: dict[Hashable, list[str]] = defaultdict(list)
    for name, value in model.state_dict().items():
        names[storage_key(value)].append(name)
    return [*names.values()]


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Load the weights of a finished run into a model; a `UserError` if they don't fit."""
    put_weights(model, read_sharded([model_folder(path) / WEIGHTS]), path)


def put_weights(
    model: nn.Module, weights: dict[str, torch.Tensor | Rows], path: str | Path
) -> None:
    """Copy weights into a model, in place; a `UserError` if they don't fit.

    Args:
        weights: the weights by name. Tied weights need only one of their names; `put_weights` adds
            the others to the dict.
        path: the file or folder of the weights, for a message.
    """
    state = model.state_dict()
    for names in names_by_weight(model):
        stored = [weights[name] for name in names if name in weights]
        if stored:
            for name in names:
                weights[name] = stored[0]
    refuse_unfit_weights(state, weights, path)
    for name, value in state.items():
        fill(value, weights[name])


def refuse_unfit_weights(
    state: Tensors, weights: Mapping[str, torch.Tensor | Rows], path: str | Path
) -> None:
    """Raise a `UserError` that names the first weight that is missing, unknown or of another shape.

    Weights of another model, which have no name in common with this one, are refused first.
    """
    refuse_unrelated_weights(state, weights, path)
    advice = "use the flags and the data set of the run that wrote these weights, or other weights"
    for name in sorted(state.keys() | weights.keys()):
        model_shape = tuple(state[name].shape) if name in state else None
        stored_shape = tuple(weights[name].shape) if name in weights else None
        if model_shape == stored_shape:
            continue
        if model_shape is None:
            count = len(weights.keys() - state.keys())
            tensors = counted(count, "such tensor")
            difference = f"it has {name}, which this model lacks ({tensors})"
        elif stored_shape is None:
            count = len(state.keys() - weights.keys())
            tensors = counted(count, "such tensor")
            difference = f"it has no {name}, which this model needs ({tensors})"
        else:
            difference = (
                f"{name} has the shape {stored_shape} in it, but {model_shape} in this model"
            )
        raise UserError(f"{path} does not fit this model, because {difference}", advice=advice)


def refuse_unrelated_weights(
    state: Tensors, weights: Mapping[str, torch.Tensor | Rows], path: str | Path
) -> None:
    """Raise a `UserError` if weights and a model's state have no name in common.

    `load_initial` calls this before it looks for heads, and not only through `put_weights`. Such
    weights lack all heads. Without the early call, `load_initial` would say that each head starts
    with random values, and only then refuse the weights.
    """
    if state and weights and not state.keys() & weights.keys():
        raise UserError(
            (
                f"{path} has weights of another model: this model has none of its "
                f"{counted(len(weights), 'tensor')} ({min(weights)}, for example), but others "
                f"({min(state)}, for example)"
            ),
            advice="pass weights that this recipe wrote, or run the recipe that wrote these",
        )
