"""What a run that is evaluated was trained on: whether data are new to it, and which were its."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.data.pixels import FULL_SCALE
from common.directory import FACTS
from common.errors import UserError
from common.files import read_json_if_there
from common.initial import initial_facts, weights_file

MOST_GENERATIONS = 20  # of runs that began with the weights of another


@dataclass(frozen=True)
class TrainedOn:
    """The data of one run, as its `config.json` has them."""

    run: str  # its directory
    dataset: str  # name, Hub id, or absolute path
    configuration: str | None
    validation_share: float | None
    fingerprint: str | None
    sizes: dict[str, int]  # samples of each split


@dataclass(frozen=True)
class Evaluated:
    """A model that is evaluated, and nothing trained."""

    model: str  # as `--init-from` names it
    class_names: list[str] | None  # in the order of its outputs; None: not known
    preprocessing: dict[str, Any]  # of images: image_size, channels, white_level
    trained_on: tuple[TrainedOn, ...]  # by its run, and by those whose weights that began with


def read_evaluated(model: str) -> Evaluated:
    """Read what is known of the model that `--init-from` names."""
    facts = initial_facts(model)
    names = facts.get("class_names")
    class_names = [str(name) for name in names] if isinstance(names, list) else None
    kept = ("image_size", "channels", "white_level")
    preprocessing = {name: facts[name] for name in kept if facts.get(name) is not None}
    if preprocessing:  # as `common.predict` reads images of more bits than any in training
        preprocessing.setdefault("white_level", FULL_SCALE)
    return Evaluated(model, class_names, preprocessing, tuple(histories(model)))


def histories(model: str | None) -> list[TrainedOn]:
    """Return what a model was trained on, the last run first; nothing of one of no run."""
    found: list[TrainedOn] = []
    while model is not None and len(found) < MOST_GENERATIONS and not os.path.isfile(model):
        try:
            folder = weights_file(model).parent
        except UserError:  # which is told of where its weights are loaded
            break
        record = read_json_if_there(folder.parent / "config.json")
        if folder.name != "model" or not (folder / FACTS).is_file() or record is None:
            break
        config, data = record.get("config"), record.get("data")
        if not isinstance(config, dict) or not isinstance(data, dict):
            break
        found.append(
            TrainedOn(
                run=str(folder.parent),
                dataset=str(config.get("dataset")),
                configuration=config.get("dataset_config"),
                validation_share=config.get("validation_share"),
                fingerprint=data.get("fingerprint"),
                sizes=data.get("sizes") or {},
            )
        )
        earlier = config.get("init_from")
        model = earlier if isinstance(earlier, str) and os.path.isdir(earlier) else None
    return found


def own_configuration(config: Any) -> str | None:
    """Return `--dataset-config`, but not that of the run to evaluate with another data set."""
    if config.evaluate_only:
        for trained in histories(config.init_from)[:1]:
            is_other = config.dataset != trained.dataset
            if is_other and config.dataset_config == trained.configuration:
                return None
    return config.dataset_config


def relabelled(
    evaluated: Evaluated, name: str, class_names: list[str], labels: np.ndarray
) -> tuple[np.ndarray, str | None]:
    """Return labels numbered by the model's classes, and a note where these are not the data's.

    Args:
        name: of the data set.
        class_names: of the data, by the numbers that `labels` (int64 [samples]) holds.

    Raises:
        UserError: the data have a class that the model does not.
    """
    wanted = evaluated.class_names
    if wanted is None or wanted == class_names:
        return labels, None
    numbers = {class_name: number for number, class_name in enumerate(wanted)}
    if {*class_names} <= numbers.keys():
        order = np.array([numbers[class_name] for class_name in class_names], dtype=np.int64)
        note = f"of the {len(wanted)} classes of {evaluated.model}, the data have {len(order)}"
        return order[labels], note if len(order) < len(wanted) else None
    if {*class_names} <= {str(number) for number in range(len(wanted))}:
        order = np.array([int(class_name) for class_name in class_names], dtype=np.int64)
        meant = ", ".join(f"{n} is {wanted[n]}" for n in order.tolist())
        return order[labels], f"classes by their numbers: {meant:.200}"
    unknown = next(class_name for class_name in class_names if class_name not in numbers)
    raise UserError(
        f"data set {name} has the class {unknown:.60}, and {evaluated.model} has "
        f"{', '.join(wanted):.200}: rename the classes, or leave its samples out"
    )


def is_same_place(trained: TrainedOn, location: str, configuration: str | None) -> bool:
    """Whether a run trained on the data set at a place, perhaps as it was before."""
    if os.path.isabs(location) or os.path.isabs(trained.dataset):
        here = os.path.realpath(location), os.path.realpath(Path(trained.dataset))
        return os.path.isabs(trained.dataset) and here[0] == here[1]
    return (location, configuration) == (trained.dataset, trained.configuration)
