"""The data on which the evaluated model was trained.

A run that only evaluates needs to know them, to leave out samples on which the model was trained.
"""

import os
from dataclasses import dataclass
from typing import NamedTuple

from common.config import TrainingConfig
from common.errors import UserError
from common.run_directory.excerpts import excerpt_of
from common.run_directory.init_from import weights_file
from common.run_directory.records import CONFIG, MODEL_FOLDER, MODEL_JSON
from common.storage.json_files import read_json_if_there

MAX_GENERATIONS = 20  # runs that are followed back, each to the run of its initial weights


@dataclass(frozen=True)
class TrainedOn:
    """The data of one run, as its `config.json` describes them."""

    run: str  # the run's directory
    dataset: str  # name, Hub id, or absolute path
    configuration: str | None  # the value of `--dataset-config`
    validation_share: float | None  # the value of `--validation-share`
    fingerprint: str | None  # of the prepared data; None: not known
    sizes: dict[str, int]  # samples of each split; empty: not known


class Generation(NamedTuple):
    """One run of a model's history."""

    trained_on: TrainedOn
    initial_model: str | None  # the folder of the run's initial weights, if they come from a run


def training_history(model: str | None) -> list[TrainedOn]:
    """Return the data on which a model was trained.

    If a run began with the weights of another run, its model was trained on the data of both. The
    data of the last run come first. At most `MAX_GENERATIONS` runs are followed back.

    Args:
        model: the value of `--init-from`.

    Returns:
        An empty list if `model` is None, or if its origin is not known because it is not in the
        directory of a run. A single file of weights is an example.
    """
    history: list[TrainedOn] = []
    if model is not None and os.path.isfile(model):
        return history
    while model is not None and len(history) < MAX_GENERATIONS:
        generation = generation_of(model)
        if generation is None:
            break
        history.append(generation.trained_on)
        model = generation.initial_model
    return history


def generation_of(model: str) -> Generation | None:
    """Return the data and the initial model of the run that a model comes from.

    The result is None if the run is not known; see `training_history`.
    """
    try:
        folder = weights_file(model).parent
    except UserError:  # not reported here, because the code that loads the weights does so
        return None
    contents = read_json_if_there(folder.parent / CONFIG)
    # The model belongs to a run if its folder has this name and both JSON files exist.
    if folder.name != MODEL_FOLDER or not (folder / MODEL_JSON).is_file() or contents is None:
        return None
    # `excerpt_of` accepts old and edited files, which may still say on which data the run trained.
    saved = excerpt_of(contents)
    if saved.config_flags is None or saved.data is None:
        return None
    config = saved.config_flags
    trained_on = TrainedOn(
        run=str(folder.parent),
        dataset=str(config.get("dataset")),
        configuration=config.get("dataset_config"),
        validation_share=config.get("validation_share"),
        fingerprint=saved.data.fingerprint,
        sizes=saved.data.sizes or {},
    )
    initial_model = config.get("init_from")
    # Only a folder can be a run: a single file or a model of the Hub does not say which run it
    # comes from.
    if not isinstance(initial_model, str) or not os.path.isdir(initial_model):
        initial_model = None
    return Generation(trained_on, initial_model)


def own_configuration(config: TrainingConfig) -> str | None:
    """Return the `--dataset-config` that applies to `--dataset`.

    A run that only evaluates takes the flags that the user has not set from the model's run. If the
    user names another data set and no configuration, `config` has the configuration of the run's
    data set. This does not apply to the other data set, so the result is None.

    A configuration that equals the run's counts as taken from the run, even if the user has set it.
    """
    if not config.evaluate_only:
        return config.dataset_config
    history = training_history(config.init_from)
    if not history or names_data_of(history[0], config.dataset):
        return config.dataset_config
    is_inherited = config.dataset_config == history[0].configuration
    return None if is_inherited else config.dataset_config


def names_data_of(trained: TrainedOn, dataset: str) -> bool:
    """Whether `--dataset`, a name or a path of any form, names the data that a run trained on.

    The configuration is not compared, because `own_configuration` is still to find it.
    """
    if dataset == trained.dataset:
        return True
    path = os.path.expanduser(dataset)
    return os.path.isabs(trained.dataset) and is_same_path(path, trained.dataset)


def is_same_place(trained: TrainedOn, location: str, configuration: str | None) -> bool:
    """Whether a run was trained on the data set at this place, which may have changed since.

    If so, only the samples that this run held out are evaluated.

    Args:
        location: a Hub id, an absolute path, or a built-in name.
        configuration: the configuration of a Hub data set; not compared for paths.
    """
    if os.path.isabs(location) and os.path.isabs(trained.dataset):
        return is_same_path(location, trained.dataset)
    return (location, configuration) == (trained.dataset, trained.configuration)


def is_same_path(path: str, other: str) -> bool:
    """Whether two paths lead to the same place, which need not exist."""
    return os.path.realpath(path) == os.path.realpath(other)
