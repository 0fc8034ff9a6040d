"""The samples that the final evaluation got wrong, to be looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from common.loader import Loader

MOST = 32  # wrong predictions to show


@dataclass(frozen=True)
class Mistake:
    """One sample whose class was not what the model said."""

    sample: int  # its number in the split
    content: Any  # a uint8 image [height, width, channels], or text
    label: int
    predicted: int


def find_mistakes(
    loader: Loader, predicted: torch.Tensor, labels: torch.Tensor, data: Any
) -> list[Mistake]:
    """Return the first mistakes among this rank's samples.

    Args:
        predicted: int64 [samples], in the order of the loader; perhaps not to its end.
        labels: int64 [samples].
        data: the data set, whose ``tokenizer_folder`` turns tokens back into text.
    """
    batches = loader.order.micro_batches()  # type: ignore[call-arg]
    if not len(batches):
        return []
    samples, read = torch.cat(list(batches)), content_reader(loader, data)
    wrong = (predicted != labels).nonzero()[:MOST, 0].tolist()
    return [
        Mistake(int(samples[i]), read(int(samples[i])), int(labels[i]), int(predicted[i]))
        for i in wrong
    ]


def content_reader(loader: Loader, data: Any) -> Any:
    """Return a function from a sample's number to its image or text."""
    samples: Any = loader.samples
    if hasattr(samples, "images"):
        return lambda number: samples.images[number]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(data.tokenizer_folder / "tokenizer.json"))
    tokens, offsets = samples.arrays["tokens"], samples.arrays["offsets"]

    def text(number: int) -> str:
        return tokenizer.decode(tokens[offsets[number] : offsets[number + 1]].tolist())

    return text
