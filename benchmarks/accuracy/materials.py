"""The data of both sides: what a recipe's `--dataset` names, and the files that a peer reads."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy.workloads import Workload
from benchmarks.harness.contestants import cached_split
from benchmarks.harness.materials import CACHE, making

BUILT_IN = ("digits",)


@dataclass(frozen=True)
class Materials:
    """The data of a workload."""

    dataset: str  # the value of a recipe's --dataset
    arrays: str = ""  # folder with a peer's images
    train_files: tuple[str, ...] = ()  # parquet files of a peer's texts
    evaluated_files: tuple[str, ...] = ()


def make_materials(workload: Workload, data: Path | None) -> Materials:
    """Return a workload's data; the first call makes the files that the peers need.

    Args:
        data: holds a folder for each data set, as the Hub lays them out.

    Raises:
        SystemExit: the data set's folder is missing, or one of its splits.
    """
    if workload.name in BUILT_IN:
        return Materials(workload.name, arrays=str(peer_arrays(workload, workload.name)))
    folder = dataset_folder(workload, data)
    if workload.data_type == "images":
        return Materials(str(folder), arrays=str(peer_arrays(workload, str(folder))))
    return Materials(
        str(folder),
        train_files=tuple(map(str, split_files(folder, "train"))),
        evaluated_files=tuple(map(str, split_files(folder, workload.evaluated))),
    )


def dataset_folder(workload: Workload, data: Path | None) -> Path:
    """Return the folder of a data set, in which the recipe evaluates the workload's split."""
    if data is None:
        raise SystemExit(f"error: {workload.name} is not built in: pass --data FOLDER")
    folder = (data / workload.name).resolve()
    if not folder.is_dir():
        raise SystemExit(
            f"error: {data} has no folder {workload.name}: put the data set there, or leave it out "
            "of --datasets"
        )
    if workload.evaluated == "test" and split_files(folder, "validation", is_needed=False):
        return without_validation(folder)
    return folder


def split_files(folder: Path, split: str, is_needed: bool = True) -> list[Path]:
    """Return the parquet files of a split, as the Hub names them.

    Raises:
        SystemExit: there are none, and the split is needed.
    """
    files = sorted(folder.rglob(f"{split}*.parquet"))
    if is_needed and not files:
        raise SystemExit(f"error: {folder} has no {split}*.parquet: put the split there")
    return files


def without_validation(folder: Path) -> Path:
    """Return a copy of a data set without its validation split.

    A recipe evaluates the validation split after each epoch, and test at the end only. Here both
    sides evaluate the same split after each epoch.
    """
    copy = CACHE / "accuracy" / "without-validation" / folder.name
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    for split in ("train", "test"):
        for file in split_files(folder, split):
            shutil.copyfile(file, copy / file.name)
    return copy


def peer_arrays(workload: Workload, dataset: str) -> Path:
    """Return a folder with the images of both splits as raw arrays; see `ImageArrays.read`.

    The files that torchvision downloads hold raw pixels. So a peer's time has no decoding in it,
    and a recipe's has.
    """
    import numpy as np
    import torch

    from common.data.images import load_images
    from common.data.sources import find_named

    source = find_named(dataset, None)
    folder = CACHE / "accuracy" / f"{workload.name}-{source.fingerprint}"
    if folder.is_dir():
        return folder
    images = load_images(
        source, image_size=None, image_column=None, label_column=None, dtype=torch.float32
    )
    image_format = images.image_format
    mean, std = workload.scaling or (image_format.mean, image_format.std)
    with making(folder) as unfinished:
        for name, split in (("train", "train"), ("evaluated", workload.evaluated)):
            samples = cached_split(images, split)
            np.save(unfinished / f"{name}_images.npy", samples.images)
            np.save(unfinished / f"{name}_labels.npy", samples.labels)
        facts = json.dumps({"mean": mean, "std": std})
        (unfinished / "facts.json").write_text(facts, encoding="utf-8")
    return folder
