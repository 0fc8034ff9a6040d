"""The model of a run that only evaluates: its classes, and the data on which it was trained.

The run needs both, to number its labels as the model does, and to leave out training samples.
"""

import os
from dataclasses import dataclass

import numpy as np

from common.config import TrainingConfig
from common.data.pixels import FULL_SCALE
from common.errors import UserError
from common.initial import initial_facts, weights_file
from common.json_files import read_json_if_there
from common.run_directory.records import CONFIG, MODEL_JSON, excerpt_of

MOST_GENERATIONS = 20  # runs that are followed back, each to the run of its initial weights


@dataclass(frozen=True)
class TrainedOn:
    """The data of one run, as its `config.json` describes them."""

    run: str  # the run's directory
    dataset: str  # name, Hub id, or absolute path
    configuration: str | None
    validation_share: float | None
    fingerprint: str | None
    sizes: dict[str, int]  # samples of each split


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
    # `recipes predict` uses the same default for a model that states no white level.
    if preprocessing:
        preprocessing.setdefault("white_level", FULL_SCALE)
    return Evaluated(model, class_names, preprocessing, tuple(training_history(model)))


def training_history(model: str | None) -> list[TrainedOn]:
    """Return the data on which a model was trained.

    A run may begin with the weights of another run, and its model was then trained on the data of
    both. The data of the last run come first. The list is empty for a model that is not in the
    directory of a run, such as a single file: its origin is not known.
    """
    history: list[TrainedOn] = []
    while model is not None and len(history) < MOST_GENERATIONS and not os.path.isfile(model):
        try:
            folder = weights_file(model).parent
        except UserError:  # the code that loads the weights reports this error
            break
        contents = read_json_if_there(folder.parent / CONFIG)
        # Only the folder `model` in a run's directory has this name, and both JSON files.
        if folder.name != "model" or not (folder / MODEL_JSON).is_file() or contents is None:
            break
        # `excerpt_of` checks little: an old or edited file may still say on which data the run
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
        # A single file or a model of the Hub does not say which run it comes from.
        is_run = isinstance(initial_model, str) and os.path.isdir(initial_model)
        model = initial_model if is_run else None
    return history


def own_configuration(config: TrainingConfig) -> str | None:
    """Return the `--dataset-config` that applies to `--dataset`.

    An evaluation takes the flags that the user does not set from the run of the model. If the user
    names another data set but no configuration, that of the run's data set was taken and does not
    apply: the result is None. (A configuration that equals that of the run is assumed to be the
    run's.)
    """
    if not config.evaluate_only:
        return config.dataset_config
    history = training_history(config.init_from)
    if history and config.dataset != history[0].dataset:
        is_inherited = config.dataset_config == history[0].configuration
        return None if is_inherited else config.dataset_config
    return config.dataset_config


def model_labels_of(
    evaluated: Evaluated, name: str, class_names: list[str], occurring: set[int]
) -> tuple[np.ndarray, str | None]:
    """Return the model's label of each class of the data, and a note for the user.

    The data may name their classes as the model does, in any order, or by the model's numbers, as
    folders called 0, 1 and 2 do. The note is None if the data have all classes of the model, under
    the same names. A class without samples may have any name, because the type of a column may list
    such classes.

    Args:
        name: the name of the data set.
        class_names: the classes of the data, with at least one that differs from the model's.
        occurring: the classes that samples have, as indices into `class_names`.

    Returns:
        int64 [classes of the data], -1 for a class that does not occur; and the note.

    Raises:
        UserError: samples have a class that the model does not have.
    """
    model_classes = evaluated.class_names
    assert model_classes is not None  # otherwise, nothing is known to differ
    names = {label: class_names[label] for label in sorted(occurring)}
    occurring_names = set(names.values())
    by_name = {class_name: label for label, class_name in enumerate(model_classes)}
    by_number = {str(label): label for label in range(len(model_classes))}
    note: str | None = None
    if occurring_names <= by_name.keys():
        model_labels = by_name
        if len(names) < len(model_classes):
            note = (
                f"of the {len(model_classes)} classes of {evaluated.model}, the data have "
                f"{len(names)}"
            )
    elif occurring_names <= by_number.keys():
        model_labels = by_number
        meanings = ", ".join(f"{each} is {model_classes[int(each)]}" for each in names.values())
        note = f"classes are named by their numbers: {meanings:.200}"
    else:
        raise unknown_class(name, [*names.values()], evaluated.model, model_classes)
    renumbering = np.full(len(class_names), -1, dtype=np.int64)
    for label, class_name in names.items():
        renumbering[label] = model_labels[class_name]
    return renumbering, note


def unknown_class(
    name: str, class_names: list[str], model: str, model_classes: list[str]
) -> UserError:
    """Return the error for data with a class that the model does not have.

    Args:
        class_names: the classes of the data, of which at least one is not the model's.
    """
    unknown = [class_name for class_name in class_names if class_name not in model_classes]
    # Other classes may be meant as the model's numbers.
    numbers = {str(label) for label in range(len(model_classes))}
    example = next((class_name for class_name in unknown if class_name not in numbers), unknown[0])
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
    """Whether a run was trained on the data set at this place, which may have changed since."""
    if os.path.isabs(location) or os.path.isabs(trained.dataset):
        is_same_path = os.path.realpath(location) == os.path.realpath(trained.dataset)
        # A Hub id on which the run was trained is not a path, although `realpath` returns a path.
        return os.path.isabs(trained.dataset) and is_same_path
    return (location, configuration) == (trained.dataset, trained.configuration)
