"""The model of a run that only evaluates: its classes, and the data on which it was trained.

The run needs the classes to number its labels as the model does. It needs the data to leave out
samples on which the model was trained.
"""

import os
from dataclasses import dataclass

import numpy as np

from common.config import TrainingConfig
from common.data.pixels import FULL_SCALE
from common.errors import UserError
from common.run_directory.initial import initial_facts, weights_file
from common.run_directory.records import CONFIG, MODEL_FOLDER, MODEL_JSON, excerpt_of
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


@dataclass(frozen=True)
class Evaluated:
    """The model of a run that only evaluates."""

    model: str  # as `--init-from` names it
    class_names: list[str] | None  # in the order of the model's outputs; None: not known
    preprocessing: dict[str, int]  # image_size, channels and white_level of images
    # The run of the model comes first, then the run of its initial weights, and so on.
    trained_on: tuple[TrainedOn, ...]


def read_evaluated(model: str) -> Evaluated:
    """Read what is known about the model that `--init-from` names.

    Nothing is known of a single file of weights, and little of a model of the Hub.

    Raises:
        UserError: there is no such model, or its files can't be read.
    """
    facts = initial_facts(model)
    class_names = None
    if isinstance(facts.class_names, list):
        class_names = [str(name) for name in facts.class_names]
    image_facts = {
        "image_size": facts.image_size,
        "channels": facts.channels,
        "white_level": facts.white_level,
    }
    preprocessing = {name: value for name, value in image_facts.items() if isinstance(value, int)}
    if preprocessing:  # a model of images
        # `recipes predict` uses the same default for a model that states no white level.
        preprocessing.setdefault("white_level", FULL_SCALE)
    return Evaluated(model, class_names, preprocessing, tuple(training_history(model)))


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
    while model is not None and len(history) < MAX_GENERATIONS and not os.path.isfile(model):
        try:
            folder = weights_file(model).parent
        except UserError:  # not reported here, because the code that loads the weights does so
            break
        contents = read_json_if_there(folder.parent / CONFIG)
        # The model belongs to a run if its folder has this name and both JSON files exist.
        if folder.name != MODEL_FOLDER or not (folder / MODEL_JSON).is_file() or contents is None:
            break
        # `excerpt_of` accepts old and edited files, which may still say on which data the run
        # trained.
        saved = excerpt_of(contents)
        if saved.config is None or saved.data is None:
            break
        config = saved.config
        history.append(
            TrainedOn(
                run=str(folder.parent),
                dataset=str(config.get("dataset")),
                configuration=config.get("dataset_config"),
                validation_share=config.get("validation_share"),
                fingerprint=saved.data.fingerprint,
                sizes=saved.data.sizes or {},
            )
        )
        initial_model = config.get("init_from")
        # Only a folder can be a run: a single file or a model of the Hub does not say which run it
        # comes from.
        is_run = isinstance(initial_model, str) and os.path.isdir(initial_model)
        model = initial_model if is_run else None
    return history


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
    if history and config.dataset != history[0].dataset:
        is_inherited = config.dataset_config == history[0].configuration
        return None if is_inherited else config.dataset_config
    return config.dataset_config


def model_labels_of(
    evaluated: Evaluated, dataset_name: str, class_names: list[str], used_labels: set[int]
) -> tuple[np.ndarray, str | None]:
    """Return the model's label of each class of the data, and a note for the user.

    The data may name their classes as the model does, in any order, or by the model's numbers, as
    folders called 0, 1 and 2 do. A class without samples may have any name: the type of a label
    column may list such classes.

    Args:
        dataset_name: the name of the data set.
        class_names: the classes of the data, with at least one that differs from the model's.
        used_labels: the classes that samples have, as indices into `class_names`.

    Returns:
        First, int64 [classes of the data], -1 for a class without samples. Second, the note; None
        if the data have all classes of the model, under the same names.

    Raises:
        UserError: samples have a class that the model does not have.
    """
    model_classes = evaluated.class_names
    assert model_classes is not None  # the caller compares the classes only if they are known
    name_of_label = {label: class_names[label] for label in sorted(used_labels)}
    used_names = set(name_of_label.values())
    label_by_name = {class_name: label for label, class_name in enumerate(model_classes)}
    label_by_number = {str(label): label for label in range(len(model_classes))}
    note: str | None = None
    if used_names <= label_by_name.keys():
        model_labels = label_by_name
        if len(name_of_label) < len(model_classes):
            note = (
                f"of the {len(model_classes)} classes of {evaluated.model}, the data have "
                f"{len(name_of_label)}"
            )
    elif used_names <= label_by_number.keys():
        model_labels = label_by_number
        meanings = ", ".join(
            f"{number} is {model_classes[int(number)]}" for number in name_of_label.values()
        )
        note = f"classes are named by their numbers: {meanings:.200}"
    else:
        raise unknown_class(dataset_name, [*name_of_label.values()], evaluated.model, model_classes)
    renumbering = np.full(len(class_names), -1, dtype=np.int64)
    for label, class_name in name_of_label.items():
        renumbering[label] = model_labels[class_name]
    return renumbering, note


def unknown_class(
    name: str, class_names: list[str], model: str, model_classes: list[str]
) -> UserError:
    """Return the error for data with a class that the model does not have.

    Args:
        name: the name of the data set.
        class_names: the classes of the data, of which at least one is not the model's.
        model: the value of `--init-from`.
        model_classes: the classes of the model.
    """
    unknown = [class_name for class_name in class_names if class_name not in model_classes]
    # A class called 0 may stand for the model's class 0. So a class that is certainly unknown is a
    # better example, if there is one.
    numbers = {str(label) for label in range(len(model_classes))}
    certain = [class_name for class_name in unknown if class_name not in numbers]
    example = (certain or unknown)[0]
    return UserError(
        (
            f"data set {name} has the class {example:.60}, but {model} knows only "
            f"{', '.join(model_classes):.200}"
        ),
        advice=(
            "rename the classes of the data to those of the model, or remove the samples of "
            "classes that the model lacks"
        ),
    )


def is_same_place(trained: TrainedOn, location: str, configuration: str | None) -> bool:
    """Whether a run was trained on the data set at this place, which may have changed since.

    Args:
        location: a Hub id, an absolute path, or a built-in name.
        configuration: the configuration of a Hub data set; not compared for paths.
    """
    if os.path.isabs(location) or os.path.isabs(trained.dataset):
        is_same_path = os.path.realpath(location) == os.path.realpath(trained.dataset)
        # `realpath` returns a path even for a Hub id, so check that the run's data set is a path.
        return os.path.isabs(trained.dataset) and is_same_path
    return (location, configuration) == (trained.dataset, trained.configuration)
