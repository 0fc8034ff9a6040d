"""Matches the classes of data to those of the model that is evaluated.

The data may number their classes in another order. Their labels must be the numbers of the model's
outputs, or the metrics of the evaluation would be wrong.
"""

import numpy as np

from common.data.evaluated_model.model import EvaluatedModel
from common.errors import UserError


def model_labels_of(
    evaluated: EvaluatedModel, dataset_name: str, class_names: list[str], used_labels: set[int]
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
    used_names = [*name_of_label.values()]
    model_labels, note = match_classes(used_names, model_classes, evaluated.model, dataset_name)
    renumbering = np.full(len(class_names), -1, dtype=np.int64)
    for label, class_name in name_of_label.items():
        renumbering[label] = model_labels[class_name]
    return renumbering, note


def match_classes(
    used_names: list[str], model_classes: list[str], model: str, dataset_name: str
) -> tuple[dict[str, int], str | None]:
    """Return the model's labels by the names that the data use, and a note for the user.

    Args:
        used_names: the names of the classes that samples have.
        model_classes: the classes of the model, in the order of its outputs.
        model: the value of `--init-from`.
        dataset_name: the name of the data set.

    Raises:
        UserError: a name is neither a class of the model nor the number of one.
    """
    label_by_name = {class_name: label for label, class_name in enumerate(model_classes)}
    label_by_number = {str(label): label for label in range(len(model_classes))}
    if label_by_name.keys() >= set(used_names):
        if len(used_names) >= len(model_classes):
            return label_by_name, None
        note = f"of the {len(model_classes)} classes of {model}, the data have {len(used_names)}"
        return label_by_name, note
    if label_by_number.keys() >= set(used_names):
        meanings = [f"{number} is {model_classes[int(number)]}" for number in used_names]
        return label_by_number, f"classes are named by their numbers: {', '.join(meanings):.200}"
    raise unknown_class_error(dataset_name, used_names, model, model_classes)


def unknown_class_error(
    dataset_name: str, class_names: list[str], model: str, model_classes: list[str]
) -> UserError:
    """Return the error for data with a class that the model does not have.

    Args:
        dataset_name: the name of the data set.
        class_names: the classes of the data, of which at least one is not the model's.
        model: the value of `--init-from`.
        model_classes: the classes of the model.
    """
    unknown = [class_name for class_name in class_names if class_name not in model_classes]
    # A class called 0 may stand for the model's class 0. So a class that is certainly unknown is a
    # better example, if there is one.
    names_that_are_numbers = {str(label) for label in range(len(model_classes))}
    certainly_unknown = [name for name in unknown if name not in names_that_are_numbers]
    example = (certainly_unknown or unknown)[0]
    return UserError(
        (
            f"data set {dataset_name} has the class {example:.60}, but {model} knows only "
            f"{', '.join(model_classes):.200}"
        ),
        advice=(
            "rename the classes of the data to those of the model, or remove the samples of "
            "classes that the model lacks"
        ),
    )
