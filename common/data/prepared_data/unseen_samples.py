"""Chooses the samples of a run that only evaluates: those that its model has not seen in training.

Such a run finds out which samples the training run held out, or that no known run was trained on
the data. A run that trains uses all prepared data.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Generic

import numpy as np

from common.data.evaluated_model.class_numbers import model_labels_of
from common.data.evaluated_model.model import EvaluatedModel
from common.data.evaluated_model.training_data import TrainedOn
from common.data.prepared_data.cache import FactsType, Prepared, cached
from common.data.prepared_data.row_groups import ROWS
from common.data.sources import DataSource
from common.errors import UserError


@dataclass(frozen=True)
class Preparation(Generic[FactsType]):
    """How a data set is prepared: the arguments of `cached`, without the source."""

    prepare: Callable[..., FactsType]
    version: str
    array_names: tuple[str, ...]
    settings: Mapping[str, object]

    def apply_to(self, source: DataSource) -> Prepared[FactsType]:
        """Return the prepared data of a source, from the cache if they are there."""
        return cached(source, self.prepare, self.version, self.array_names, self.settings)


def prepared_samples(
    source: DataSource,
    prepare: Callable[..., FactsType],
    version: str,
    array_names: tuple[str, ...],
    settings: Mapping[str, object],
    evaluation_settings: Mapping[str, object],
) -> Prepared[FactsType]:
    """Return the prepared data of a run.

    If the run only evaluates a model, the labels are the numbers that the model's classes have.

    `prepare`, `version`, `array_names` and `settings` are those of `cached`.

    Args:
        evaluation_settings: if a split is evaluated as a whole, these are added to `settings`, and
            replace settings of the same name. With them, the samples are prepared in the same way
            as those on which the model was trained.

    Raises:
        UserError: the data can't be read; they have changed since the model was trained, so that it
            is not known which samples its run held out; or they have a class that the model lacks.
    """
    preparation = Preparation(prepare, version, array_names, settings)
    evaluated = source.evaluated
    if evaluated is None:
        return preparation.apply_to(source)
    if source.is_whole:
        extended = replace(preparation, settings={**settings, **evaluation_settings})
        data = prepare_whole(source, evaluated, preparation, extended)
    else:
        data = preparation.apply_to(source)
        # `for_evaluation` has kept only the run that was trained on this data set.
        trained = evaluated.trained_on[0]
        require_same_sizes(source, trained, data)
        note_held_out_samples(trained, data)
    renumber_labels(data, evaluated, source.name)
    return data


def prepare_whole(
    source: DataSource,
    evaluated: EvaluatedModel,
    preparation: Preparation[FactsType],
    for_model: Preparation[FactsType],
) -> Prepared[FactsType]:
    """Return one whole split of data on which no known run of the model was trained.

    If this split is train, the data may be a copy, in another place, of the data on which a known
    run was trained. Then all splits are returned as that run divided them, so that only the samples
    that it held out are evaluated.

    A note tells the user what is evaluated, and why.

    Args:
        preparation: how a run that trains prepares the data.
        for_model: how the data are prepared for the model that is evaluated.
    """
    data = for_model.apply_to(source)
    split = data.facts["evaluated"]
    if evaluated.trained_on:
        reason = f"{evaluated.model} was not trained on these data"
    else:
        reason = f"it is not known on which data {evaluated.model} was trained"
    data.facts["notes"].append(f"{reason}: the whole split {split} is evaluated")
    if split in ("test", "validation"):
        return data
    training_data = recognise_training_data(source, evaluated, data, preparation)
    if training_data is not None:
        return training_data
    if evaluated.trained_on:
        data.facts["notes"].append(
            f"if these data include samples of {evaluated.trained_on[0].dataset}, the metrics are "
            "too good: put new samples into a folder of their own, or into a split named test"
        )
    return data


def size_of(arrays: list[np.ndarray]) -> int:
    """Return how many samples a split has.

    Args:
        arrays: the split's arrays, of which the last has one label for each sample; or, for a
            streamed split, its row groups alone.
    """
    if len(arrays) == 1:
        return int(arrays[0][:, ROWS].sum())
    return len(arrays[-1])


def recognise_training_data(
    source: DataSource,
    evaluated: EvaluatedModel,
    whole: Prepared[FactsType],
    preparation: Preparation[FactsType],
) -> Prepared[FactsType] | None:
    """Return the data divided as in training, if they are a copy of a known run's training data.

    A copy has as many samples as that run had in all splits. It also has the same fingerprint, once
    it is divided with the same `--validation-share`. A note tells the user that it was recognised.

    Args:
        whole: the data with nothing held out.
        preparation: how a run that trains prepares the data.

    Returns:
        The data with all of their splits, or None if no known run was trained on them.
    """
    total = sum(size_of(arrays) for arrays in whole.arrays.values())
    for trained in evaluated.trained_on:
        if trained.fingerprint is None or sum(trained.sizes.values()) != total:
            continue
        divided_source = replace(source, is_whole=False, validation_share=trained.validation_share)
        data = preparation.apply_to(divided_source)
        if data.facts["fingerprint"] == trained.fingerprint:
            data.facts["notes"].append(
                f"{trained.run} was trained on the same data, in {trained.dataset}: what it held "
                "out is evaluated"
            )
            return data
    return None


def held_out_samples_may_differ(trained: TrainedOn, data: Prepared[FactsType]) -> bool:
    """Whether other samples may be held out now than when the model was trained.

    This is so if samples are held out, and the prepared data have changed since, by their content
    or by a flag. Without the fingerprint of the training data, they count as unchanged.
    """
    # If nothing was held out, the data set has its own split to evaluate on, and changes of its
    # training samples do not matter.
    has_held_out_samples = data.facts["held_out"] > 0
    is_fingerprint_known = trained.fingerprint is not None
    has_changed = is_fingerprint_known and trained.fingerprint != data.facts["fingerprint"]
    return has_held_out_samples and has_changed


def require_same_sizes(source: DataSource, trained: TrainedOn, data: Prepared[FactsType]) -> None:
    """Raise a `UserError` if the sizes of splits have changed since the model was trained.

    Other samples would then be held out. The sizes may change if nothing is held out.
    """
    if not held_out_samples_may_differ(trained, data):
        return
    sizes = {name: size_of(arrays) for name, arrays in data.arrays.items()}
    if sizes != trained.sizes:
        raise UserError(
            (
                f"{source.location} now has another number of rows than when {trained.run} was "
                "trained, so it is not known which samples that run held out; either the data or a "
                "flag that chooses rows, such as --dataset-config, has changed"
            ),
            advice=(
                "restore the data and the flags as they were, or put the new samples into a data "
                "set of their own, and pass it with --dataset"
            ),
        )


def note_held_out_samples(trained: TrainedOn, data: Prepared[FactsType]) -> None:
    """Note for the user that only samples are evaluated that the model's run held out.

    Another note warns that training samples may be among them, if the content of the data has
    changed.
    """
    notes = data.facts["notes"]
    notes.append(
        f"{trained.run} was trained on these data, so only its held-out samples are evaluated"
    )
    if held_out_samples_may_differ(trained, data):
        notes.append(
            f"the data or their flags have changed since {trained.run} was trained, so some of the "
            "evaluated samples may have been training samples"
        )


def renumber_labels(
    data: Prepared[FactsType], evaluated: EvaluatedModel, dataset_name: str
) -> None:
    """Number the classes of prepared data as the model does, in place.

    The arrays of labels and the facts of `data` are replaced. They stay as they are if the model's
    classes are the same or not known.

    Raises:
        UserError: the data have a class that the model lacks; or they are streamed, and their
            classes differ from the model's.
    """
    class_names = data.facts["class_names"]
    if evaluated.class_names is None or evaluated.class_names == class_names:
        return
    if data.facts.get("index") is not None:
        raise UserError(
            (
                f"the classes of data set {dataset_name} differ from those of {evaluated.model}, "
                "or are in another order"
            ),
            advice="pass --no-streaming, so that the classes can be matched by name",
        )
    # The last array of each split holds the labels.
    used_labels: set[int] = set()
    for arrays in data.arrays.values():
        used_labels.update(np.unique(arrays[-1]).tolist())
    model_labels, note = model_labels_of(evaluated, dataset_name, class_names, used_labels)
    for arrays in data.arrays.values():
        arrays[-1] = model_labels[arrays[-1]]
    if note is not None:
        data.facts["notes"].append(note)
    data.facts["class_names"] = evaluated.class_names
