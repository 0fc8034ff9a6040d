"""Data sets and checkpoints that the contestants share, kept in a temporary folder between runs."""

from __future__ import annotations

import json
import os
import shutil
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
    from common.data.tables import load_raw

    source_folder = data / "sst2" if data is not None else None
    named = source_folder is not None and source_folder.is_dir()
    source = find_named(str(source_folder) if named else "docstrings", None)
    folder = CACHE / f"{source.name}-{rows}"
    if not folder.is_dir():
        import datasets

        datasets.disable_progress_bars()
        raw = load_raw(source, None)
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


def bert_checkpoint(asked: Path | None, large: bool) -> Path:
    """Return a folder with a BERT checkpoint: `asked`, or one of random weights.

    The latter has the shape of MiniLM-L6-H384, or that of BERT-base where `large`, and a
    vocabulary trained on docstrings: its speed is real, its accuracy is not.
    """
    if asked is not None:
        return asked.resolve()
    folder = CACHE / ("random-bert-base" if large else "random-bert-6x384")
    if not folder.is_dir():
        from transformers import BertConfig, BertForSequenceClassification
        from transformers.utils import logging

        from common.data.built_in import docstrings
        from common.data.text import train_wordpiece

        logging.disable_progress_bar()
        width, layers = (768, 12) if large else (384, 6)
        config = BertConfig(
            vocab_size=30522,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=12,
            intermediate_size=4 * width,
        )
        unfinished = folder.with_suffix(".unfinished")
        BertForSequenceClassification(config).save_pretrained(unfinished)
        train_wordpiece(docstrings()["train"]["text"][:]).save_pretrained(unfinished)
        unfinished.rename(folder)
    return folder


def describe_checkpoint(folder: Path) -> str:
    """Return a checkpoint's size, for the results: its folder's name may say nothing."""
    facts = json.loads((folder / "config.json").read_text())
    return f"BERT, {facts['num_hidden_layers']} layers, {facts['hidden_size']} wide"
