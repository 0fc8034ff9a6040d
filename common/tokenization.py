"""Tokenise a data set once, with a checkpoint's tokenizer or a vocabulary of its own."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.cache import CachedData
from common.console import say
from common.datasets import RawData, existing_column
from common.errors import UserError
from common.sources import DataSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCRATCH_VOCABULARY = 8192  # tokens, where no checkpoint brings a vocabulary


def tokenizer_fingerprint(checkpoint: str) -> str:
    """Return a name of the tokenizer that changes when its local files do."""
    if not Path(checkpoint).is_dir():
        return f"{checkpoint}-{SCRATCH_VOCABULARY}"
    files = sorted(p for p in Path(checkpoint).glob("*") if p.name.startswith(("token", "vocab")))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def tokenize(
    target: CachedData,
    raw: RawData,
    source: DataSource,
    checkpoint: str,
    max_length: int,
    text_columns: tuple[str, ...],
) -> None:
    """Tokenise all splits of `raw` into flat arrays, and write them to the cache."""
    columns = find_text_columns(raw, text_columns, source.name)
    texts: dict[str, list[list[str]]] = {}
    for name, split in raw.splits.items():
        rows = [split[column][:] for column in columns]
        kept = [row for row, values in enumerate(zip(*rows, strict=True)) if all(values)]
        if len(kept) < len(split):
            raw.notes.append(f"{name}: {len(split) - len(kept):,} rows without text are left out")
            raw.labels[name] = raw.labels[name][kept]
        if not kept:
            raise UserError(f"data set {source.name}: no row of {name} has text in {columns}")
        texts[name] = [[values[row] for row in kept] for values in rows]
    if checkpoint == "scratch":
        encoder = train_wordpiece([text for column in texts["train"] for text in column])
    else:
        encoder = load_tokenizer(checkpoint)
    say(
        f"tokenising {sum(len(t[0]) for t in texts.values()):,} texts once, for this and later runs"
    )
    for name, split_texts in texts.items():
        encoded = encoder(*split_texts, truncation=True, max_length=max_length)
        rows = encoded["input_ids"]
        lengths = np.array([len(row) for row in rows])
        types = encoded.get("token_type_ids") or [[0] * len(row) for row in rows]
        seconds = [row.index(1) if 1 in row else len(row) for row in types]
        target.save(f"{name}_tokens", np.concatenate(rows).astype(np.int32))
        target.save(f"{name}_offsets", np.concatenate([[0], lengths.cumsum()]).astype(np.int64))
        target.save(f"{name}_seconds", np.array(seconds, dtype=np.int64))
        target.save(f"{name}_labels", raw.labels[name])
    encoder.save_pretrained(target.folder / "tokenizer")
    target.facts = {
        "splits": list(texts),
        "class_names": raw.class_names,
        "vocabulary_size": len(encoder),
        "notes": [*raw.notes, f"text from {' and '.join(columns)}"],
    }


def find_text_columns(raw: RawData, asked: tuple[str, ...], name: str) -> list[str]:
    """Return the one or two columns of text: named, or all that hold strings.

    Raises:
        UserError: when that gives no column, or more than a pair.
    """
    from datasets import Value

    split = raw.splits["train"]
    if asked:
        found = [existing_column(split, column, "--text-columns", name) for column in asked]
    else:
        strings = [
            column
            for column, kind in split.features.items()
            if isinstance(kind, Value) and kind.dtype in ("string", "large_string")
        ]
        found = [column for column in strings if column not in (raw.label_column, "id", "idx")]
    if not 1 <= len(found) <= 2:
        raise UserError(
            f"data set {name}: BERT takes one sentence or a pair, and there are {len(found)} "
            f"columns of text: name one or two of {', '.join(split.column_names)} with "
            "--text-columns"
        )
    return found


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """Load a pretrained tokenizer from the Hub or a folder.

    Raises:
        UserError: when it can't be had.
    """
    from transformers import AutoTokenizer

    folder, files = Path(name), ("tokenizer.json", "vocab.txt")
    if folder.is_dir() and not any((folder / file).is_file() for file in files):
        raise UserError(f"--model {name}: no tokenizer can be loaded: it has no {files[0]}")
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as problem:
        raise UserError(
            f"--model {name}: no tokenizer can be loaded from there "
            f"({str(problem).splitlines()[0]}): pass a Hub id in reach, or a local folder"
        ) from None


def train_wordpiece(texts: list[str]) -> PreTrainedTokenizerBase:
    """Train BERT's tokenizer, lower-cased WordPiece, on `texts`."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizer

    trained: Any = BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(texts, vocab_size=SCRATCH_VOCABULARY, show_progress=False)
    return BertTokenizer(vocab=trained.get_vocab(), do_lower_case=True)
