"""The weights of `--init-from`: loaded into the model, and copied into the run's directory."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from common.checkpoints.export import digest_of_weights_file
from common.checkpoints.model_weights import put_weights, refuse_unrelated_weights
from common.checkpoints.shards import Rows, read_sharded
from common.config import TrainingConfig
from common.console import say
from common.failures.sentences import writing
from common.run_directory.directory import INITIAL
from common.run_directory.finished_model import WEIGHTS
from common.run_directory.init_from import initial_facts, weights_file
from common.run_directory.records import MODEL_JSON
from common.storage.files import replacing
from common.storage.json_files import write_json
from common.system.launch_variables import is_main_rank


def load_initial(model: nn.Module, config: TrainingConfig, class_names: list[str] | None) -> None:
    """Load the weights that `--init-from` names.

    A resume loads them too, because the run begins again if no checkpoint is whole. `init_from`
    then names the copy of `keep_initial`: `run_directory/run_to_resume.py` sets it.

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
