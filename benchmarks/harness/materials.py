"""Makes data sets and checkpoints for the contestants, and keeps them in a temporary folder."""

from __future__ import annotations

import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# Decoded and tokenised data of the recipes, extracts, and checkpoints of random weights.
CACHE = Path(tempfile.gettempdir(), "accelerate-recipes-benchmark")
VALIDATION_ROWS = 1024  # of an extract


def use_own_cache() -> None:
    """Keep the benchmark's data out of the user's cache, for this process and its children.

    Call it before the first import of a Hugging Face library.
    """
    CACHE.mkdir(exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(CACHE)
    os.environ["HF_HOME"] = str(CACHE / "huggingface")
    os.environ["WANDB_DIR"] = str(CACHE)
    os.environ["WANDB_MODE"] = "offline"


def image_dataset(data: Path | None, name: str) -> str:
    """Return the value of an image recipe's `--dataset`: the folder `data`/`name`, or "digits"."""
    if data is not None and (data / name).is_dir():
        return str(data / name)
    return "digits"


def text_extract(data: Path | None, rows: int) -> Path:
    """Return a folder with `train.parquet` of `rows` random samples, and `validation.parquet`.

    The texts are those of SST-2 if `data` has it, else docstrings of the standard library. All
    contestants train on the same samples once: if each drew its own, one could be faster because it
    drew shorter sentences.

    Raises:
        SystemExit: when the data set has fewer samples.
    """
    from common.data.reading.tables import Tables
    from common.data.sources import find_named

    dataset = str(data / "sst2") if data is not None and (data / "sst2").is_dir() else "docstrings"
    source = find_named(dataset, None)
    folder = CACHE / f"{source.name}-{rows}"
    if folder.is_dir():
        return folder
    import datasets

    datasets.disable_progress_bars()
    splits = Tables(source, None).splits
    if len(splits["train"]) < rows:
        raise SystemExit(f"{source.name} has fewer than {rows:,} training samples: lower --scale")
    with making(folder) as unfinished:
        for split, count in (("train", rows), ("validation", VALIDATION_ROWS)):
            shuffled = splits[split].shuffle(seed=0)
            extract = shuffled.select(range(min(count, len(shuffled))))
            extract.to_parquet(unfinished / f"{split}.parquet")
    return folder


@contextmanager
def making(folder: Path) -> Iterator[Path]:
    """Make a folder whole or not at all: fill the yielded one, which gets its name at the end."""
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    yield unfinished
    unfinished.rename(folder)


@dataclass(frozen=True)
class BertSize:
    """The shape of a BERT."""

    width: int
    layers: int
    heads: int


BERT_SIZES = {
    "tiny": BertSize(width=64, layers=2, heads=1),
    "small": BertSize(width=384, layers=6, heads=12),  # MiniLM-L6-H384
    "base": BertSize(width=768, layers=12, heads=12),
    "large": BertSize(width=1024, layers=24, heads=16),
}


def bert_checkpoint(folder: Path | None, large: bool) -> Path:
    """Return the folder of a BERT checkpoint: `folder`, or one of random weights if it is None.

    Args:
        large: whether random weights have the shape of BERT-base, and not of MiniLM-L6-H384.
    """
    if folder is not None:
        return folder.resolve()
    return random_bert("base" if large else "small")


def random_bert(size: str, tokenizer: Path | None = None) -> Path:
    """Return a folder with a BERT of random weights: its speed is real, its accuracy is not.

    Args:
        size: a name in `BERT_SIZES`.
        tokenizer: folder with a tokenizer's files; None: train a vocabulary on docstrings.
    """
    folder = CACHE / f"random-bert-{size}{'' if tokenizer is None else '-' + tokenizer.name}"
    if folder.is_dir():
        return folder
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    shape = BERT_SIZES[size]
    config = BertConfig(
        vocab_size=30522,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.width,
    )
    with making(folder) as unfinished:
        BertForSequenceClassification(config).save_pretrained(unfinished)
        if tokenizer is not None:
            BertTokenizer.from_pretrained(tokenizer).save_pretrained(unfinished)
        else:
            train_vocabulary(unfinished)
    return folder


def train_vocabulary(folder: Path) -> None:
    """Train a WordPiece vocabulary on docstrings of the standard library, and save it."""
    from common.data.reading.built_in import TOPICS, docstrings_of, module_files
    from common.data.tokens import train_wordpiece

    library = Path(sysconfig.get_path("stdlib"))
    texts: list[str] = []
    for module in " ".join(TOPICS.values()).split():
        for file in module_files(library, module):
            texts += docstrings_of(file)
    train_wordpiece(texts).save_pretrained(folder)


def long_texts(rows: int) -> Path:
    """Return a folder with texts of random numbers, each longer than 128 tokens."""
    folder = CACHE / f"long-texts-{rows}"
    if folder.is_dir():
        return folder
    import numpy as np
    import pyarrow
    import pyarrow.parquet

    random = np.random.default_rng(0)
    with making(folder) as unfinished:
        for split, count in (("train", rows), ("validation", 64)):
            numbers = random.integers(10, 100, (count, 200)).astype(str)
            columns = {"text": [" ".join(row) for row in numbers], "label": np.arange(count) % 2}
            pyarrow.parquet.write_table(pyarrow.table(columns), unfinished / f"{split}.parquet")
    return folder


def describe_checkpoint(folder: Path) -> str:
    """Return a checkpoint's size in words, for the results."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return f"BERT, {config['num_hidden_layers']} layers, {config['hidden_size']} wide"
