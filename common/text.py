"""Text: tokenised once, cached, grouped by length; batches made on the device."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from common.cache import CachedData, prepare_once
from common.console import say
from common.datasets import RawData, existing_column, load_raw
from common.errors import UserError
from common.images import as_tensor
from common.loader import Batch
from common.sources import DataSource, cache_folder
from common.stopwatch import Work

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCRATCH_VOCABULARY = 8192  # tokens, where no checkpoint brings a vocabulary
PAD_MULTIPLE = 8  # lengths that tensor cores and vector units like


@dataclass
class TextData:
    """A text classification data set, tokenised, ready to train on."""

    source: DataSource
    class_names: list[str]
    tokenizer_folder: Path  # `AutoTokenizer.from_pretrained` loads it
    vocabulary_size: int
    splits: dict[str, TextSamples]
    notes: list[str]


class TextSamples:
    """One split: all tokens in a row (int32), offsets, starts of second sentences, labels."""

    def __init__(
        self, tokens: np.ndarray, offsets: np.ndarray, seconds: np.ndarray, labels: np.ndarray
    ) -> None:
        self.arrays = {"tokens": tokens, "offsets": offsets, "seconds": seconds, "labels": labels}
        self.lengths = np.diff(offsets)
        self.length_list = torch.from_numpy(self.lengths)
        self.num_bytes = sum(array.nbytes for array in self.arrays.values())
        self.bytes_per_sample: int | None = None  # each batch has a length of its own
        self.lengths_vary = True

    def __len__(self) -> int:
        return len(self.lengths)

    def place(self, device: torch.device) -> None:
        """Copy all tokens to `device`; on a CPU they stay memory-mapped."""
        self.placed = {name: as_tensor(array).to(device) for name, array in self.arrays.items()}

    def gather(self, samples: torch.Tensor, epoch: int | None) -> Batch:
        """Make a padded batch from the device's memory; its length is known on the host."""
        length = self.padded_length(samples)
        samples = samples.to(self.placed["labels"].device, non_blocking=True)
        return self.padded(self.placed, samples, length)

    def fetch(self, samples: torch.Tensor) -> Batch:
        """Make a padded batch on the host, in a worker."""
        arrays = {name: as_tensor(array) for name, array in self.arrays.items()}
        return self.padded(arrays, samples, self.padded_length(samples))

    def finish(self, raw: Batch, samples: torch.Tensor, epoch: int | None) -> Batch:
        """Nothing is left to do on the device."""
        return raw

    def count(self, samples: torch.Tensor) -> Work:
        """Return how many samples and tokens these are, without padding."""
        lengths = self.length_list[samples]
        return Work(len(lengths), int(lengths.sum()), int(lengths.square().sum()))

    def example(self, size: int, length: int) -> Batch:
        """Return a batch that has shapes only; without a mask, whose values BERT would look at."""
        tokens = torch.zeros(size, length, device="meta", dtype=torch.long)
        batch: dict[str, Any] = {"input_ids": tokens, "token_type_ids": tokens}
        return batch | {"attention_mask": None, "labels": tokens[:, 0]}

    def padded_length(self, samples: torch.Tensor) -> int:
        """Return the longest of `samples`, rounded up to a multiple of `PAD_MULTIPLE`."""
        longest = int(self.length_list[samples].max())
        return -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE

    @staticmethod
    def padded(arrays: Batch, samples: torch.Tensor, length: int) -> Batch:
        """Cut `samples` out of the row of tokens and pad them with 0, BERT's padding token.

        Returns:
            input_ids, token_type_ids: int64 [batch, length]; labels [batch]; attention_mask:
            bool [batch, 1, 1, length].
        """
        start = arrays["offsets"][samples][:, None]
        end = arrays["offsets"][samples + 1][:, None]
        position = start + torch.arange(length, device=samples.device)
        real = position < end
        tokens = arrays["tokens"][position.clamp(max=len(arrays["tokens"]) - 1)]
        second = position - start >= arrays["seconds"][samples][:, None]
        return {
            "input_ids": tokens.long().masked_fill(~real, 0),
            # As SDPA takes it: of a mask with two dimensions Transformers reads values back from
            # the device at each step, to see whether there is any padding.
            "attention_mask": real[:, None, None, :],
            "token_type_ids": (second & real).long(),
            "labels": arrays["labels"][samples],
        }


def load_text(
    source: DataSource,
    *,
    checkpoint: str,
    max_length: int,
    text_columns: tuple[str, ...],
    label_column: str | None,
) -> TextData:
    """Return a text data set, tokenising it first where no cache of it exists.

    Args:
        checkpoint: Hub id or folder whose tokenizer to use; "scratch" trains a WordPiece
            vocabulary on the training text.
        max_length: tokens after which a sample is cut, special tokens included.
    Raises:
        UserError: for data or a tokenizer that can't be read or used.
    """
    if source.location == "synthetic":
        raise UserError("--dataset synthetic makes images, not text: pass docstrings or a folder")
    folder = cache_folder(
        source,
        kind="text-3",
        tokenizer=tokenizer_fingerprint(checkpoint),
        max_length=max_length,
        columns=[*text_columns, label_column],
    )

    def prepare(target: CachedData) -> None:
        raw = load_raw(source, label_column)
        tokenize(target, raw, source, checkpoint, max_length, text_columns)

    cached = prepare_once(folder, prepare)
    facts = cached.facts
    names = ("tokens", "offsets", "seconds", "labels")
    splits = {
        split: TextSamples(*(cached.array(f"{split}_{name}") for name in names))
        for split in facts["splits"]
    }
    return TextData(
        source,
        facts["class_names"],
        folder / "tokenizer",
        facts["vocabulary_size"],
        splits,
        facts["notes"],
    )


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
