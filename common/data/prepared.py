"""Prepared data of a run that trains, or of one that evaluates what another did not train on."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.data.cache import cached
from common.data.evaluated import Evaluated, TrainedOn, relabelled
from common.data.sources import DataSource
from common.errors import UserError

Prepared = tuple[Path, dict[str, Any], dict[str, list[Any]]]  # as of `cached`


def prepared(
    source: DataSource,
    prepare: Callable[..., dict[str, Any]],
    version: str,
    names: tuple[str, ...],
    settings: dict[str, Any],
    evaluation_settings: dict[str, Any] | None = None,
) -> Prepared:
    """Return what `cached` does, in an evaluation of what the model was not trained on.

    Args:
        evaluation_settings: what `prepare` gets besides where one split is evaluated whole.

    Raises:
        UserError: the data have changed, and no one knows what the run held out.
    """
    evaluated = source.evaluated
    if evaluated is None:
        return cached(source, prepare, version, names, settings)
    if not source.is_whole:
        result = cached(source, prepare, version, names, settings)
        check_as_trained(source, evaluated.trained_on[0], result)
    else:
        more = settings | (evaluation_settings or {})
        result = cached(source, prepare, version, names, more)
        split = result[1].pop("evaluated")
        is_known = f"{evaluated.model} was not trained on them"
        if not evaluated.trained_on:
            is_known = f"what {evaluated.model} was trained on is not known"
        result[1]["notes"].append(f"{is_known}: {split} is evaluated whole")
        if split not in ("test", "validation"):
            again = moved_data(source, evaluated, result, prepare, version, names, settings)
            if again is None and evaluated.trained_on:
                result[1]["notes"].append(
                    f"if samples of {evaluated.trained_on[0].dataset} are among them, the figures "
                    "are too good: put new samples into a folder of their own, or name them test"
                )
            result = again or result
    return with_labels_of(evaluated, source, result)


def size_of(split: list[Any]) -> int:
    """Return the samples of a split, by its arrays or by the row groups of a streamed one."""
    if len(split) == 1:
        return int(split[0][:, 2].sum())
    return len(split[-1])


def moved_data(
    source: DataSource,
    evaluated: Evaluated,
    whole: Prepared,
    prepare: Callable[..., dict[str, Any]],
    version: str,
    names: tuple[str, ...],
    settings: dict[str, Any],
) -> Prepared | None:
    """Return the split that a run held out, where it was trained on the same data elsewhere."""
    total = sum(map(size_of, whole[2].values()))
    for trained in evaluated.trained_on:
        if trained.fingerprint is None or sum(trained.sizes.values()) != total:
            continue
        as_trained = replace(source, is_whole=False, validation_share=trained.validation_share)
        result = cached(as_trained, prepare, version, names, settings)
        if result[1]["fingerprint"] == trained.fingerprint:
            result[1]["notes"].append(
                f"{trained.run} was trained on the same data, in {trained.dataset}: what it held "
                "out is evaluated"
            )
            return result
    return None


def check_as_trained(source: DataSource, trained: TrainedOn, result: Prepared) -> None:
    """Say that what a run held out is evaluated, if it is as it was.

    Raises:
        UserError: there are other samples than when the run held some out: no one knows which.
    """
    _, facts, arrays = result
    facts["notes"].append(f"{trained.run} was trained on them: what it held out is evaluated")
    is_held_out = any(note.startswith("held out ") for note in facts["notes"])
    if not is_held_out or trained.fingerprint in (None, facts["fingerprint"]):
        return
    sizes = {name: size_of(split) for name, split in arrays.items()}
    if sizes != trained.sizes:
        raise UserError(
            f"{source.location} has changed since {trained.run} was trained on it, and which "
            "samples it held out is not known: put new samples into a folder of their own, or name "
            "them test"
        )
    facts["notes"].append(
        f"they are not as when {trained.run} read them, in content or flags: samples that it was "
        "trained on may be among them"
    )


def with_labels_of(evaluated: Evaluated, source: DataSource, result: Prepared) -> Prepared:
    """Number the classes of prepared data as the model does."""
    folder, facts, arrays = result
    names = facts["class_names"]
    if evaluated.class_names in (None, names):
        return result
    index = facts.get("index")
    if index is not None:
        raise UserError(
            f"data set {source.name} has other classes than {evaluated.model}, or in another "
            "order: leave --streaming out to evaluate them"
        )
    for split in arrays.values():
        split[-1], note = relabelled(evaluated, source.name, names, split[-1])
    facts["notes"] += [] if note is None else [note]
    facts["class_names"] = evaluated.class_names
    return folder, facts, arrays
