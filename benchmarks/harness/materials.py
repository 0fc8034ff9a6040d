"""Data sets and checkpoints that the contestants share, kept in a temporary folder between runs."""

from __future__ import annotations

import json
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path

# Decoded and tokenised data of the recipes, extracts, and made-up checkpoints.
CACHE = Path(tempfile.gettempdir(), "accelerate-recipes-benchmark")


def use_own_cache() -> None:
    """Keep the benchmark's data out of the user's cache, for this process and its children.

    Must be called before anything of Hugging Face is imported.
    """
    CACHE.mkdir(exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(CACHE)
    os.environ["HF_HOME"] = str(CACHE / "huggingface")
    os.environ["WANDB_DIR"] = str(CACHE)
    os.environ["WANDB_MODE"] = "offline"


def image_dataset(data: Path | None, name: str) -> str:
    """Return what `--dataset` of an image recipe should be: `data`/`name`, else the digits."""
    folder = data / name if data is not None else None
    return str(folder) if folder is not None and folder.is_dir() else "digits"


def text_extract(data: Path | None, rows: int) -> Path:
    """Return a folder with `train.parquet` of `rows` random samples and `validation.parquet`.

    All contestants see the same samples once: with a sample of the whole data set each, the
    luck of drawing short sentences would decide. SST-2 where `data` has it, else the standard
    library's docstrings.
    """
    from common.data.sources import find_named
    from common.data.tables import Tables

    source_folder = data / "sst2" if data is not None else None
    named = source_folder is not None and source_folder.is_dir()
    source = find_named(str(source_folder) if named else "docstrings", None)
    folder = CACHE / f"{source.name}-{rows}"
    if not folder.is_dir():
        import datasets

        datasets.disable_progress_bars()
        raw = Tables(source, None)
        if len(raw.splits["train"]) < rows:
            raise SystemExit(
                f"{source.name} has fewer than {rows:,} training samples: lower --steps"
            )
        unfinished = folder.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        for split, count in (("train", rows), ("validation", 1024)):
            shuffled = raw.splits[split].shuffle(seed=0)
            extract = shuffled.select(range(min(count, len(shuffled))))
            extract.to_parquet(unfinished / f"{split}.parquet")
        unfinished.rename(folder)
    return folder


# Width and layers.
BERT_SIZES = {"tiny": (64, 2), "small": (384, 6), "base": (768, 12), "large": (1024, 24)}


def bert_checkpoint(asked: Path | None, large: bool) -> Path:
    """Return a folder with a BERT checkpoint: `asked`, or one of random weights.

    The latter has the shape of MiniLM-L6-H384, or that of BERT-base where `large`.
    """
    return asked.resolve() if asked is not None else random_bert("base" if large else "small")


def random_bert(size: str, tokenizer: Path | None = None) -> Path:
    """Return a folder with a BERT of random weights: its speed is real, its accuracy is not.

    Args:
        size: a name in `BERT_SIZES`.
        tokenizer: folder with a tokenizer's files; else a vocabulary is trained on docstrings.
    """
    folder = CACHE / f"random-bert-{size}{'' if tokenizer is None else '-' + tokenizer.name}"
    if not folder.is_dir():
        from transformers import BertConfig, BertForSequenceClassification, BertTokenizer
        from transformers.utils import logging

        from common.data.built_in import TOPICS, docstrings_of, files_of
        from common.data.tokens import train_wordpiece

        logging.disable_progress_bar()
        width, layers = BERT_SIZES[size]
        config = BertConfig(
            vocab_size=30522,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=12 if width == 384 else width // 64,
            intermediate_size=4 * width,
        )
        unfinished = folder.with_suffix(".unfinished")
        BertForSequenceClassification(config).save_pretrained(unfinished)
        if tokenizer is not None:
            BertTokenizer.from_pretrained(tokenizer).save_pretrained(unfinished)
        else:
            library = Path(sysconfig.get_path("stdlib"))
            modules = " ".join(TOPICS.values()).split()
            files = [file for name in modules for file in files_of(library, name)]
            texts = [text for file in files for text in docstrings_of(file)]
            train_wordpiece(texts).save_pretrained(unfinished)
        unfinished.rename(folder)
    return folder


def long_texts(rows: int) -> Path:
    """Return a folder with texts of random numbers, each longer than 128 tokens."""
    folder = CACHE / f"long-texts-{rows}"
    if not folder.is_dir():
        import numpy as np
        import pyarrow
        import pyarrow.parquet

        random = np.random.default_rng(0)
        unfinished = folder.with_suffix(".unfinished")
        unfinished.mkdir(exist_ok=True)
        for split, count in (("train", rows), ("validation", 64)):
            numbers = random.integers(10, 100, (count, 200)).astype(str)
            columns = {"text": [" ".join(row) for row in numbers], "label": np.arange(count) % 2}
            pyarrow.parquet.write_table(pyarrow.table(columns), unfinished / f"{split}.parquet")
        unfinished.rename(folder)
    return folder


def describe_checkpoint(folder: Path) -> str:
    """Return a checkpoint's size, for the results: its folder's name may say nothing."""
    facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return f"BERT, {facts['num_hidden_layers']} layers, {facts['hidden_size']} wide"
