"""The errors for mistakes in a user's data that more than one module can find.

Different modules read tables, streamed parquet files and a recipe's own splits. They share these
functions, so that a mistake gets the same sentence in all of them.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from common.data.places import attributes_of, values_with_places
from common.errors import UserError

# The types of values in samples that torch's `default_collate` knows.
COLLATED_TYPES = (torch.Tensor, np.ndarray, np.generic, int, float, str, bytes, Mapping, Sequence)

# What to do about a label that is not a class. Data on the Hub can't be edited in place.
CORRECT_LABEL = "correct this label in the data (in a local copy, if they are from the Hub)"


def empty_split_error(data_set: str, split: str, advice: str | None = None) -> UserError:
    """Return the error for a split without samples.

    Args:
        advice: what the user can do; None: for a split that is read from files.
    """
    problem = f"split {split} of data set {data_set} is empty"
    return UserError(problem, advice=advice or advice_for_empty_files(split))


def advice_for_empty_files(split: str) -> str:
    """Return what to do if the files of a split, on this machine or on the Hub, have no rows."""
    advice = "add rows to the files of this split"
    if split != "train":  # a run needs this one
        advice += ", or remove these files"
    return f"{advice}; if the data set is from the Hub, pass another --dataset or --dataset-config"


def no_values_error(data_set: str, split: str, required: str) -> UserError:
    """Return the error for a split whose rows all lack a label, a text or an image.

    Args:
        required: what the rows lack: "label", "text" or "image".
    """
    flags = {"label": "--label-column", "text": "--text-columns", "image": "--image-column"}
    flag = flags[required]
    return UserError(
        f"the rows of split {split} of data set {data_set} have no {required}s",
        advice=f"fill in the {required}s in the data, or name another column with {flag}",
    )


def single_class_error(data_set: str, split: str) -> UserError:
    """Return the error for a training split whose rows all have the same class."""
    return UserError(
        f"all rows of split {split} of data set {data_set} have the same label, but classification "
        "needs at least two classes",
        advice="add rows of another class, or name another column with --label-column",
    )


def other_columns_error(
    file: str, columns: Mapping[str, object], first_file: str, expected: Mapping[str, object]
) -> UserError:
    """Return the error for a file whose columns differ from those of the first file.

    A data set is read with one list of columns, so no file may have others.

    Args:
        file: the file in words, such as its path.
        columns: the types of the file's columns, by name.
        first_file: the file whose columns are expected, in words.
        expected: the types of the first file's columns, by name.
    """
    names = {**expected, **columns}
    differing = ", ".join(name for name in names if expected.get(name) != columns.get(name))
    return UserError(
        f"{file} and {first_file} have different columns, by name or type: {differing}",
        advice=(
            "give all files the same columns, with the same types, or move a file that does not "
            "belong to these data, such as an unlabelled test set, out of the folder"
        ),
    )


def different_sizes_error(
    rows: Sequence[object], indices: Sequence[int] | None
) -> UserError | None:
    """Return the error for samples of different sizes in one batch; None if all sizes are equal.

    Args:
        rows: the samples, each as the data set returned it.
        indices: the indices of the samples; None if they have none.
    """
    expected = dict(sizes_in(rows[0]))
    for number, row in enumerate(rows):
        for place, size in sizes_in(row):
            if size == expected.get(place, size):
                continue
            this_sample = "one sample"
            first_sample = "another one in the same batch"
            if indices is not None:
                this_sample = f"sample {indices[number]}"
                first_sample = f"sample {indices[0]}"
            return UserError(
                f"{this_sample} of the data set has {place or 'a value'} of size {size}, but "
                f"{first_sample} has {expected[place]}",
                advice=(
                    "give all samples the same size, or pass your own collate_fn that pads them, "
                    "as in DatasetSamples(dataset, collate_fn)"
                ),
                every_rank=True,
            )
    return None


def no_value_error(rows: Sequence[object], indices: Sequence[int] | None) -> UserError | None:
    """Return the error for a sample that is or contains None; None if there is no such sample.

    Args:
        rows: the samples, each as the data set returned it.
        indices: the indices of the samples; None if they have none.
    """
    for number, row in enumerate(rows):
        for place, value in values_with_places(row):
            if value is not None:
                continue
            sample = "a sample" if indices is None else f"sample {indices[number]}"
            lack = f"has None in {place}" if place else "is None"
            return UserError(
                f"{sample} of the data set {lack}, which can't be in a batch",
                advice=(
                    "return a value from __getitem__ in each case, or leave such samples out of "
                    "the data set"
                ),
                every_rank=True,
            )
    return None


def type_error_of_sample(rows: Sequence[object], indices: Sequence[int] | None) -> UserError | None:
    """Return the error for a sample with a value that torch can't collate; None if there is none.

    Args:
        rows: the samples, each as the data set returned it.
        indices: the indices of the samples; None if they have none.
    """
    for number, row in enumerate(rows):
        for place, value in values_with_places(row):
            if isinstance(value, COLLATED_TYPES):
                continue
            sample = "a sample" if indices is None else f"sample {indices[number]}"
            type_name = type(value).__name__
            content = (
                f"has a value of type {type_name} in {place}" if place else f"is a {type_name}"
            )
            return UserError(
                f"{sample} of the data set {content}, of which torch's default_collate can't make "
                "a batch",
                advice=(
                    "return tensors, arrays and numbers in dictionaries, lists or tuples from "
                    "__getitem__, or pass your own collate_fn, as in DatasetSamples(dataset, "
                    "collate_fn)"
                ),
                every_rank=True,
            )
    return None


def batch_error(batch: object) -> UserError | None:
    """Return the error for a batch of a user's collate function; None if it can be used.

    It is None, or a run can't copy tensors in it to its device. On a CPU, such a batch would work.
    On a GPU, its tensors would stay on the host.
    """
    if batch is None:
        return UserError(
            "collate_fn returns None instead of a batch",
            advice="return the batch at its end, as in return {'inputs': inputs}",
            every_rank=True,
        )
    for place, value in values_with_places(batch):
        if isinstance(value, COLLATED_TYPES) or hasattr(value, "to"):
            continue
        if not any(isinstance(item, torch.Tensor) for item in attributes_of(value)):
            continue
        type_name = type(value).__name__
        content = f"has a {type_name} in {place}" if place else f"is a {type_name}"
        return UserError(
            f"the batch that collate_fn makes {content}, and a run can't copy the tensors in it to "
            "the device",
            advice=(
                "return the tensors in dictionaries, lists or tuples, or give the class "
                f"{type_name} a method to(device) that returns a copy"
            ),
            every_rank=True,
        )
    return None


def sizes_in(sample: object) -> Iterator[tuple[str, list[int]]]:
    """Yield the place and the size of each tensor, array, list and tuple in a sample."""
    for place, value in values_with_places(sample):
        if isinstance(value, torch.Tensor | np.ndarray):
            yield place, [*value.shape]
        elif isinstance(value, list | tuple):
            yield place, [len(value)]
