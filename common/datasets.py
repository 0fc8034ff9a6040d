"""Find a data set: on the Hub, in a local folder or built in; its columns, classes and splits.

Nothing here imports `datasets` before it must: a start on cached data never does.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from common.errors import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from datasets import Dataset, DatasetDict

Answer = TypeVar("Answer")

# Short names of public data sets: Hub id and configuration.
PUBLIC = {
    "mnist": ("ylecun/mnist", None),
    "cifar10": ("uoft-cs/cifar10", None),
    "sst2": ("nyu-mll/glue", "sst2"),
    "mrpc": ("nyu-mll/glue", "mrpc"),
}
BUILT_IN = ("digits", "docstrings", "synthetic")
VALIDATION_NAMES = ("validation", "valid", "val", "dev", "validation_matched")
LABEL_NAMES = ("label", "labels", "class", "target", "category")


@dataclass(frozen=True)
class DataSource:
    """Where a data set comes from, known before any of it is read."""

    name: str  # short name, as the recipes' tables know it
    location: str  # Hub id, absolute folder, or the built-in name
    configuration: str | None
    reason: str  # why this one, for the person at the terminal
    fingerprint: str  # changes when the data do


@dataclass
class RawData:
    """Labelled splits of a data set as `datasets.Dataset`s, and the classes' names."""

    splits: dict[str, Dataset]
    labels: dict[str, np.ndarray]  # split -> int64 [rows]
    class_names: list[str]
    label_column: str
    notes: list[str] = field(default_factory=list)


def choose_source(
    config: Any, accelerator: Accelerator, *, public: str, built_in: str, public_on_cpu: bool
) -> DataSource:
    """Resolve `--dataset`; on rank 0 alone, so that all ranks get the same answer.

    Args:
        config: has ``dataset`` and ``dataset_config``.
        public: what ``auto`` means where it makes sense to train it and it can be had.
        built_in: what ``auto`` means elsewhere.
        public_on_cpu: whether training `public` without an accelerator makes sense.
    Raises:
        UserError: for a named data set that can't be had; a name is never replaced.
    """
    return ask_rank_zero(
        accelerator, lambda: find_source(config, accelerator, public, built_in, public_on_cpu)
    )


def ask_rank_zero(accelerator: Accelerator, choose: Callable[[], Answer]) -> Answer:
    """Return what `choose` returns on rank 0, on all ranks; its `UserError` ends all of them."""
    from accelerate.utils import broadcast_object_list

    answer: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            answer = [choose()]
        except UserError as error:
            answer = [error]
    broadcast_object_list(answer)
    if isinstance(answer[0], UserError):
        raise answer[0]
    return answer[0]


def find_source(
    config: Any, accelerator: Accelerator, public: str, built_in: str, public_on_cpu: bool
) -> DataSource:
    """Resolve `--dataset` on this rank; see `choose_source`."""
    if config.dataset != "auto":
        return find_named(config.dataset, config.dataset_config)
    if accelerator.device.type == "cpu" and not public_on_cpu:
        return built_in_source(built_in, f"auto: {public} would take hours without a GPU")
    location, configuration = PUBLIC[public]
    commit = hub_commit(location)
    if commit is None:
        return built_in_source(built_in, f"auto: {public} is not cached, the Hub does not answer")
    return DataSource(public, location, configuration, "auto: from the Hub", commit)


def built_in_source(name: str, reason: str) -> DataSource:
    """Return the source of a built-in data set."""
    import platform

    version = platform.python_version() if name == "docstrings" else "1"
    return DataSource(name, name, None, reason, f"{name}-{version}")


def find_named(name: str, configuration: str | None) -> DataSource:
    """Resolve a data set that the user named: built in, a local folder, or a Hub id."""
    if name in BUILT_IN:
        return built_in_source(name, "named, built in")
    folder = Path(name).expanduser()
    if folder.is_dir():
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        listing = [
            (str(f.relative_to(folder)), f.stat().st_size, f.stat().st_mtime_ns) for f in files
        ]
        fingerprint = hashlib.sha256(json.dumps([str(folder.resolve()), listing]).encode())
        return DataSource(
            folder.resolve().name.lower(),
            str(folder.resolve()),
            configuration,
            "named, a local folder",
            fingerprint.hexdigest()[:16],
        )
    if folder.exists():
        raise UserError(f"--dataset {name} is a file: pass the folder that holds it")
    location, known_configuration = PUBLIC.get(name, (name, None))
    commit = hub_commit(location)
    if commit is None:
        raise UserError(
            f"--dataset {name} can't be had: there is no such folder, it is not cached, and the "
            f"Hub has no {location} or does not answer. Pass a local folder, or one that is "
            f"built in: {', '.join(BUILT_IN)}"
        )
    reason = "named, from the Hub"
    return DataSource(name, location, configuration or known_configuration, reason, commit)


def hub_commit(hub_id: str, kind: Literal["datasets", "models"] = "datasets") -> str | None:
    """Return the commit of a Hub repository: from the Hub within 3 s, else from the local cache.

    `datasets.load_dataset` would take 24 s to find that the Hub does not answer.
    """
    import requests
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers

    if not constants.HF_HUB_OFFLINE:
        address = f"{constants.ENDPOINT}/api/{kind}/{hub_id}"
        try:
            answer = requests.get(address, headers=build_hf_headers(), timeout=3)
            if answer.ok:
                return answer.json()["sha"]
        except (requests.RequestException, KeyError):
            pass  # out of reach: what the cache has will do
    folder = f"{kind}--{hub_id.replace('/', '--')}"
    reference = Path(constants.HF_HUB_CACHE, folder, "refs", "main")
    return reference.read_text().strip() if reference.is_file() else None


def cache_folder(source: DataSource, **settings: object) -> Path:
    """Return the folder that caches `source` prepared with `settings`; it may not exist yet."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "accelerate-recipes")
    key = json.dumps([source.fingerprint, source.location, source.configuration, settings])
    return root / f"{source.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def load_raw(source: DataSource, label_column: str | None) -> RawData:
    """Read all labelled splits of a data set.

    Rows without a label are dropped, and said; a split without any label is left out. With
    neither validation nor test, a deterministic, stratified 10 % of `train` is held out.

    Raises:
        UserError: for a data set that can't be read or can't be trained on.
    """
    dataset = load_splits(source)
    train_name = "train" if "train" in dataset else next(iter(dataset))
    label = find_label_column(dataset[train_name], label_column, source.name)
    raw = RawData({}, {}, [], label)
    columns: dict[str, tuple[Dataset, list[Any]]] = {}
    for name, split in dataset.items():
        role = "train" if name == train_name else str(name)
        role = "validation" if role in VALIDATION_NAMES else role
        if (
            role not in ("train", "validation", "test")
            or role in columns
            or label not in split.column_names
        ):
            continue
        values = split[label][:]
        kept = [
            row
            for row, value in enumerate(values)
            if value not in (None, "", -1) and value == value
        ]
        if len(kept) < len(values):
            raw.notes.append(
                f"{role}: {len(values) - len(kept):,} of {len(values):,} rows have no label"
            )
        if kept:
            columns[role] = (split.select(kept), [values[row] for row in kept])
    if "train" not in columns:
        raise UserError(
            f"data set {source.name}: split {train_name} has no labelled row in column {label}: "
            "check the data, or name another with --label-column"
        )
    encode = label_encoder(dataset[train_name].features[label], columns, raw, source.name, label)
    for role, (split, values) in columns.items():
        raw.splits[role] = split
        raw.labels[role] = np.array([encode[value] for value in values], dtype=np.int64)
    present = len(np.unique(raw.labels["train"]))
    if present < 2:
        raise UserError(
            f"data set {source.name}: all rows of train have the same label: classification needs two"
        )
    if len(raw.splits) == 1:
        hold_out(raw)
    return raw


def load_splits(source: DataSource) -> DatasetDict:
    """Read a data set with `datasets`, or make a built-in one.

    Raises:
        UserError: naming the data set, the damaged file if one is found, and what to do.
    """
    import datasets
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

    if source.location in BUILT_IN:
        from common import built_in

        return built_in.LOADERS[source.location]()
    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_dataset(source.location, source.configuration)
    except (DatasetGenerationError, DatasetNotFoundError, OSError, ValueError) as problem:
        damaged = damaged_parquet(Path(source.location))
        cause = problem.__cause__ or problem
        said = str(cause).strip().splitlines() or [type(cause).__name__]
        raise UserError(
            f"data set {source.location} can't be read"
            + (f", its file {damaged} is damaged: fetch it again" if damaged else f": {said[0]}")
        ) from None
    empty = [str(name) for name, split in loaded.items() if split.num_rows == 0]
    if empty:
        raise UserError(
            f"data set {source.location}: split {', '.join(empty)} is empty: remove or fill it"
        )
    return loaded


def damaged_parquet(folder: Path) -> Path | None:
    """Return the first parquet file under `folder` that can't be read through, if any."""
    import pyarrow
    import pyarrow.parquet

    for path in sorted(folder.rglob("*.parquet")) if folder.is_dir() else []:
        try:
            for _ in pyarrow.parquet.ParquetFile(path).iter_batches():
                pass
        except (pyarrow.ArrowException, OSError):
            return path
    return None


def find_label_column(split: Dataset, asked: str | None, name: str) -> str:
    """Return the column of the labels: named, of type ClassLabel, or called as one.

    Raises:
        UserError: when it is not there or can't be decided.
    """
    from datasets import ClassLabel

    if asked is not None:
        return existing_column(split, asked, "--label-column", name)
    by_type = [column for column, kind in split.features.items() if isinstance(kind, ClassLabel)]
    by_name = [column for column in split.column_names if column.lower() in LABEL_NAMES]
    for found in (by_type, by_name):
        if len(found) == 1:
            return found[0]
    raise UserError(
        f"data set {name}: can't tell which column is the label: "
        f"name one with --label-column: {', '.join(by_type or split.column_names)}"
    )


def existing_column(split: Dataset, column: str, flag: str, name: str) -> str:
    """Return `column` if the split has it, else raise a `UserError` that lists what there is."""
    if column not in split.column_names:
        raise UserError(
            f"{flag} {column}: data set {name} has no such column: {', '.join(split.column_names)}"
        )
    return column


def label_encoder(
    feature: Any,
    columns: dict[str, tuple[Dataset, list[Any]]],
    raw: RawData,
    name: str,
    label: str,
) -> dict[Any, int]:
    """Return the map from a label's value to its class, and set `raw.class_names`."""
    from datasets import ClassLabel

    if isinstance(feature, ClassLabel):
        raw.class_names = list(feature.names)
        return {index: index for index in range(feature.num_classes)}
    values = {value for _, split_values in columns.values() for value in split_values}
    if any(isinstance(value, float) and not value.is_integer() for value in values):
        raise UserError(
            f"data set {name}: column {label} holds real numbers, not classes: "
            "name another with --label-column"
        )
    if not all(isinstance(value, (str, int, float)) for value in values):
        raise UserError(f"data set {name}: column {label} holds neither text nor whole numbers")
    ordered = sorted(values, key=lambda value: (isinstance(value, str), value))
    raw.class_names = [str(int(v)) if isinstance(v, float) else str(v) for v in ordered]
    return {value: index for index, value in enumerate(ordered)}


def hold_out(raw: RawData, share: float = 0.1) -> None:
    """Move a deterministic, stratified `share` of train to validation.

    Raises:
        UserError: when there are too few rows to hold one out.
    """
    labels = raw.labels["train"]
    order = np.random.default_rng(0).permutation(len(labels))
    held = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        rows = order[labels[order] == label]
        held[rows[: round(share * len(rows))]] = True
    if not held.any():
        held[order[0]] = len(labels) > 1
    if not held.any() or held.all():
        raise UserError("the data set has too few rows to hold some out: add a validation split")
    train = raw.splits["train"]
    raw.splits = {
        "train": train.select(np.flatnonzero(~held)),
        "validation": train.select(np.flatnonzero(held)),
    }
    raw.labels = {"train": labels[~held], "validation": labels[held]}
    raw.notes.append(f"held out {held.sum():,} of {held.size:,} rows of train for validation")
