"""Small data sets in local folders, as users have them: parquet, CSV, folders of images."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image

# Neither two ranks nor the tests' batches can divide these sizes evenly.
IMAGE_SIZES = {"train": 203, "validation": 67, "test": 41}
TEXT_SIZES = {"train": 107, "validation": 33, "test": 21}
WORDS = {
    "animals": ["cat", "dog", "horse", "mouse", "sheep", "cow", "goat", "fox", "wolf", "bear"],
    "colours": ["red", "green", "blue", "yellow", "white", "black", "grey", "pink", "teal"],
    "numbers": ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"],
}


def png(pixels: np.ndarray) -> bytes:
    """Return an image as an encoded file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def grey_images(count: int, seed: int, classes: int = 3, size: int = 8) -> dict[str, list[Any]]:
    """Return columns of grey images whose class is a bright row, and their labels."""
    random = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    pixels = random.integers(0, 160, (count, size, size), dtype=np.uint8)
    for image, label in zip(pixels, labels, strict=True):
        image[2 * label : 2 * label + 2] += 95
    return {
        "image": [{"bytes": png(image), "path": None} for image in pixels],
        "label": labels.tolist(),
    }


def write_parquet(path: Path, columns: dict[str, Any], features: Any = None) -> None:
    """Write columns as a parquet file, with the types of `features` (of `datasets`) if passed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if features is None:
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        return
    from datasets import Dataset

    Dataset.from_dict(columns, features=features).to_parquet(path)


def write_image_parquet(
    folder: Path, splits: dict[str, dict[str, list[Any]]], names: Sequence[str] = ("a", "b", "c")
) -> Path:
    """Write splits of images and class labels, one parquet file each."""
    from datasets import ClassLabel, Features, Image

    features = Features({"image": Image(), "label": ClassLabel(names=list(names))})
    for split, columns in splits.items():
        write_parquet(folder / f"{split}-00000-of-00001.parquet", columns, features)
    return folder


def write_image_folder(
    folder: Path, classes: Sequence[str], per_class: int, split: str = "train"
) -> Path:
    """Write colour images of different sizes in a folder for each class."""
    random = np.random.default_rng(0)
    for number, name in enumerate(classes):
        for index in range(per_class):
            size = (12 + index % 5, 16 + number)
            pixels = random.integers(0, 256, (*size, 3), dtype=np.uint8)
            path = folder / split / name / f"{index:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    return folder


def sentences(count: int, seed: int) -> dict[str, list[str]]:
    """Return columns of short sentences of different lengths, and the names of their classes."""
    random = np.random.default_rng(seed)
    names = list(WORDS)
    labels = [names[index % len(names)] for index in range(count)]
    texts = [" ".join(random.choice(WORDS[label], random.integers(3, 40))) for label in labels]
    return {"sentence": texts, "label": labels}


def write_csv(path: Path, columns: dict[str, list[Any]]) -> None:
    """Write columns as a CSV file."""
    import csv

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def write_odd_images(folder: Path) -> Path:
    """Write three splits of grey images; two ranks can't divide their sizes evenly."""
    splits = {
        name: grey_images(count, seed)
        for seed, (name, count) in enumerate(IMAGE_SIZES.items(), start=1)
    }
    return write_image_parquet(folder, splits)


def write_odd_text(folder: Path) -> Path:
    """Write three CSV splits of sentences; two ranks can't divide their sizes evenly."""
    for seed, (name, count) in enumerate(TEXT_SIZES.items(), start=1):
        write_csv(folder / f"{name}.csv", sentences(count, seed))
    return folder


def cache_glue(hub_home: Path) -> None:
    """Fill a Hub cache with two configurations of `nyu-mll/glue`, as if downloaded."""
    import json
    import shutil

    import datasets
    from datasets import ClassLabel, Features, Value

    reference = hub_home / "hub" / "datasets--nyu-mll--glue" / "refs" / "main"
    reference.parent.mkdir(parents=True)
    reference.write_text("0123abcd")
    labels = ClassLabel(names=["negative", "positive"])
    for name, columns in {"sst2": ["sentence"], "mrpc": ["sentence1", "sentence2"]}.items():
        folder = hub_home / "source" / name
        features = Features(dict.fromkeys(columns, Value("string")) | {"label": labels})
        for seed, (split, count) in enumerate({"train": 60, "validation": 17}.items()):
            values: dict[str, Any] = {
                column: sentences(count, seed)["sentence"] for column in columns
            }
            values["label"] = [index % 2 for index in range(count)]
            write_parquet(folder / f"{split}.parquet", values, features)
        datasets.load_dataset(str(folder), cache_dir=str(hub_home / "built"))
        (info,) = (hub_home / "built" / name).rglob("dataset_info.json")
        target = hub_home / "datasets" / "nyu-mll___glue" / name / "0.0.0" / "0123abcd"
        shutil.copytree(info.parent, target)
        for path in target.glob("*.arrow"):
            path.rename(path.with_name(path.name.replace(f"{name}-", "glue-", 1)))
        facts = json.loads((target / "dataset_info.json").read_text())
        facts |= {"dataset_name": "glue", "config_name": name}
        (target / "dataset_info.json").write_text(json.dumps(facts))


def write_tiny_bert(folder: Path) -> Path:
    """Write a tiny BERT without a head, and its tokenizer, by `save_pretrained`."""
    import torch
    from transformers import BertConfig, BertModel

    from common.data.tokens import train_wordpiece

    tokenizer = train_wordpiece(sentences(200, 0)["sentence"])
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
