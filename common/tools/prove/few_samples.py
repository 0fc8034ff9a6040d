"""Limits the samples of a recipe's splits, so that a few updates make an epoch.

The samples are spread over the whole split, because a split may be sorted by class. Their order,
the incomplete batch that is dropped, and the shares of the ranks follow from the same code as ever.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from common.data import loader
from common.data.order import BlockBatches, Blocks, EvaluationOrder, TrainingOrder

LEAST_BLOCKS = 8  # of which samples are taken, if there are so many; each is slow to read


@dataclass(frozen=True)
class FewTrainingSamples(TrainingOrder):
    """The order of some of the training samples."""

    chosen: torch.Tensor | None = None  # int64 [num_samples], indices of the split

    def micro_batches(self, epoch: int, first_update: int = 0) -> torch.Tensor | BlockBatches:
        assert self.chosen is not None
        if self.blocks is not None:
            return ChosenBatches(self, self.blocks, epoch, first_update, self.chosen)
        places = super().micro_batches(epoch, first_update)
        assert isinstance(places, torch.Tensor)
        return self.chosen[places]


class ChosenBatches(BlockBatches):
    """The micro-batches of one rank in an epoch, of some samples of some blocks."""

    def __init__(
        self,
        order: TrainingOrder,
        blocks: Blocks,
        epoch: int,
        first_update: int,
        chosen: torch.Tensor,
    ) -> None:
        """Prepare the micro-batches.

        Args:
            blocks: with the number of chosen samples of each as its size.
            chosen: int64 [num_samples], indices of the split.
        """
        super().__init__(order, blocks, epoch, first_update)
        self.chosen = chosen

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        return self.chosen[super().__getitem__(index)]


@dataclass(frozen=True)
class FewEvaluationSamples(EvaluationOrder):
    """The order of some samples of an evaluation."""

    chosen: torch.Tensor | None = None  # int64 [num_samples], indices of the split

    def micro_batches(self) -> list[torch.Tensor]:
        assert self.chosen is not None
        return [self.chosen[places] for places in super().micro_batches()]


def limit_samples(training: int, evaluation: int) -> None:
    """Have all loaders of this process use at most so many samples of a split."""
    limit_order("training_order", FewTrainingSamples, training)
    limit_order("evaluation_order", FewEvaluationSamples, evaluation)


def limit_order(function: str, few_class: type, most: int) -> None:
    """Have a function of `common.data.loader` return an order of at most `most` samples."""
    make_order: Callable[..., Any] = getattr(loader, function)
    setattr(loader, function, lambda *arguments: few_of(make_order(*arguments), few_class, most))


def few_of(order: Any, few_class: type, most: int) -> Any:
    """Cut an order to `most` samples. A shorter order stays as it is."""
    if order.num_samples <= most:
        return order
    # Neighbours are equally far apart, from the first sample on.
    chosen = torch.arange(most) * order.num_samples // most
    few_blocks = None
    if order.blocks is not None:
        chosen, few_blocks = few_of_blocks(order.blocks, most)
    values = {field.name: getattr(order, field.name) for field in fields(order)}
    values["num_samples"] = most
    values["blocks"] = few_blocks
    if order.lengths is not None:
        values["lengths"] = order.lengths[chosen.numpy()]
    return few_class(**values, chosen=chosen)


def few_of_blocks(blocks: Blocks, most: int) -> tuple[torch.Tensor, Blocks]:
    """Choose `most` samples of few blocks, which are spread over the split.

    Returns:
        int64 [most], indices of the split in rising order; and the blocks, with the number of
        chosen samples as the size of each.
    """
    sizes = np.asarray(blocks.sizes)
    starts = sizes.cumsum() - sizes
    count = min(LEAST_BLOCKS, len(sizes))
    numbers = np.arange(count) * len(sizes) // count
    while sizes[numbers].sum() < most:
        count = min(2 * count, len(sizes))
        numbers = np.arange(count) * len(sizes) // count
    shares = equal_shares(sizes[numbers], most)
    chosen = [
        torch.arange(start, start + share)
        for start, share in zip(starts[numbers].tolist(), shares.tolist(), strict=True)
    ]
    return torch.cat(chosen), Blocks(shares[shares > 0], blocks.at_once)


def equal_shares(sizes: np.ndarray, total: int) -> np.ndarray:
    """Divide a total into shares as equal as possible, none larger than its size: int64 [sizes]."""
    shares = np.zeros(len(sizes), dtype=np.int64)
    remaining = total
    # The smallest first, so that larger ones take what these can't.
    for number, place in enumerate(np.argsort(sizes, kind="stable")):
        share = min(int(sizes[place]), remaining // (len(sizes) - number))
        shares[place] = share
        remaining -= share
    return shares
