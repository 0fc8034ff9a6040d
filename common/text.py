"""Text: tokenised once, cached, grouped by length; batches made on the device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.cache import CachedData, prepare_once
from common.datasets import load_raw
from common.errors import UserError
from common.images import as_tensor
from common.loader import Batch
from common.packing import POSITIONS, token_positions
from common.sources import DataSource, cache_folder
from common.stopwatch import Work
from common.tokenization import tokenize, tokenizer_fingerprint

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
        self.padding_free = False  # whether batches say where their real tokens are

    def __len__(self) -> int:
        return len(self.lengths)

    def place(self, device: torch.device) -> None:
        """Copy all tokens to `device`; on a CPU they stay memory-mapped."""
        self.placed = {name: as_tensor(array).to(device) for name, array in self.arrays.items()}

    def gather(self, samples: torch.Tensor, epoch: int | None) -> Batch:
        """Make a padded batch from the device's memory; its length is known on the host."""
        length, device = self.padded_length(samples), self.placed["labels"].device
        batch = self.padded(self.placed, samples.to(device, non_blocking=True), length)
        positions = self.positions(samples, length).items()
        return batch | {name: values.to(device, non_blocking=True) for name, values in positions}

    def fetch(self, samples: torch.Tensor) -> Batch:
        """Make a padded batch on the host, in a worker."""
        arrays = {name: as_tensor(array) for name, array in self.arrays.items()}
        length = self.padded_length(samples)
        return self.padded(arrays, samples, length) | self.positions(samples, length)

    def positions(self, samples: torch.Tensor, length: int) -> Batch:
        """Return where the real tokens of a padded batch are, if the model is to know."""
        if not self.padding_free:
            return {}
        return {POSITIONS: token_positions(self.length_list[samples], length)}

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
    padding_free: bool = False,
) -> TextData:
    """Return a text data set, tokenising it first where no cache of it exists.

    Args:
        checkpoint: Hub id or folder whose tokenizer to use; "scratch" trains a WordPiece
            vocabulary on the training text.
        max_length: tokens after which a sample is cut, special tokens included.
        padding_free: whether batches say where their real tokens are.
    Raises:
        UserError: for data or a tokenizer that can't be read or used.
    """
    if source.location == "synthetic":
        raise UserError("--dataset synthetic makes images, not text: pass docstrings or a folder")
    folder = cache_folder(
        source,
        kind="text-4",
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
    for samples in splits.values():
        samples.padding_free = padding_free
    return TextData(
        source,
        facts["class_names"],
        folder / "tokenizer",
        facts["vocabulary_size"],
        splits,
        facts["notes"],
    )
