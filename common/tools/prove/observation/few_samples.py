"""Limits the samples of a recipe's splits, so that a few updates make an epoch.

The samples are spread over the whole split, because a split may be sorted by class. The library's
usual code orders them, drops the incomplete batch, and divides them among the ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
import torch

from common.data import run_loaders
from common.data.order import BlockBatches, Blocks, EvaluationOrder, TrainingOrder

Order = TypeVar("Order", TrainingOrder, EvaluationOrder)
MIN_BLOCKS = 8  # blocks to take samples from, or all blocks if there are fewer


@dataclass(frozen=True)
class FewTrainingSamples(TrainingOrder):
    """The order of the chosen training samples.

    The inherited code orders positions in `chosen`, which become indices in the split here.
    """

    chosen: torch.Tensor | None = None  # int64 [num_samples], indices in the split

    def micro_batches(self, epoch: int, first_update: int = 0) -> torch.Tensor | BlockBatches:
        assert self.chosen is not None
        if self.blocks is not None:
            return ChosenBatches(self, self.blocks, epoch, first_update, self.chosen)
        positions = super().micro_batches(epoch, first_update)
        assert isinstance(positions, torch.Tensor)
        return self.chosen[positions]


class ChosenBatches(BlockBatches):
    """The micro-batches of one rank in an epoch, with the chosen samples of some blocks."""

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
            blocks: the size of each block is its number of chosen samples.
            chosen: int64 [num_samples], indices in the split.
        """
        super().__init__(order, blocks, epoch, first_update)
        self.chosen = chosen

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        return self.chosen[super().__getitem__(index)]


@dataclass(frozen=True)
class FewEvaluationSamples(EvaluationOrder):
    """The order of the chosen samples of an evaluation; see `FewTrainingSamples`."""

    chosen: torch.Tensor | None = None  # int64 [num_samples], indices in the split

    def batches(self) -> list[torch.Tensor]:
        assert self.chosen is not None
        return [self.chosen[positions] for positions in super().batches()]


def limit_samples(training: int, evaluation: int) -> None:
    """Limit the samples of the loaders that this process makes from now on.

    Loaders of an `IterableDataset` are not limited.

    Args:
        training: the most samples of the training split that are used.
        evaluation: the most samples of each other split that are used.
    """
    patch_order("training_order", FewTrainingSamples, training)
    patch_order("evaluation_order", FewEvaluationSamples, evaluation)


def use_evaluation_batches_of(size: int) -> None:
    """Let the loaders that this process makes from now on evaluate in batches of `size` samples."""
    make_order: Callable[..., EvaluationOrder] = run_loaders.evaluation_order

    def make_order_of_small_batches(*arguments: object) -> EvaluationOrder:
        return replace(make_order(*arguments), batch_size=size)

    setattr(run_loaders, "evaluation_order", make_order_of_small_batches)  # noqa: B010


def patch_order(function_name: str, limited_class: type[Order], limit: int) -> None:
    """Replace a function of `run_loaders` by one that returns orders of at most `limit` samples.

    Args:
        function_name: the name of a function that returns an order.
        limited_class: the class of a limited order, `FewTrainingSamples` or `FewEvaluationSamples`.
        limit: the most samples of an order.
    """
    make_order: Callable[..., Order] = getattr(run_loaders, function_name)

    def make_limited_order(*arguments: object) -> Order:
        return limited_order(make_order(*arguments), limited_class, limit)

    setattr(run_loaders, function_name, make_limited_order)


def limited_order(order: Order, limited_class: type[Order], limit: int) -> Order:
    """Return an order of at most `limit` samples. A shorter order stays as it is.

    Args:
        limited_class: the class of the new order, `FewTrainingSamples` or `FewEvaluationSamples`.
    """
    if order.num_samples <= limit:
        return order
    # The chosen samples are evenly spaced, from the first sample on.
    chosen = torch.arange(limit) * order.num_samples // limit
    chosen_blocks = None
    if order.blocks is not None:
        chosen, chosen_blocks = limited_blocks(order.blocks, limit)
    values = {field.name: getattr(order, field.name) for field in fields(order)}
    values["num_samples"] = limit
    values["blocks"] = chosen_blocks
    if order.lengths is not None:
        values["lengths"] = order.lengths[chosen.numpy()]
    values["chosen"] = chosen
    return limited_class(**values)


def limited_blocks(blocks: Blocks, limit: int) -> tuple[torch.Tensor, Blocks]:
    """Choose `limit` samples of a few blocks that are spread over the split.

    Returns:
        The indices in the split, int64 [limit], in ascending order; and the blocks, whose sizes are
        their numbers of chosen samples.
    """
    sizes = np.asarray(blocks.sizes)
    starts = sizes.cumsum() - sizes
    count = min(MIN_BLOCKS, len(sizes))
    block_numbers = np.arange(count) * len(sizes) // count  # evenly spaced
    while sizes[block_numbers].sum() < limit:
        count = min(2 * count, len(sizes))
        block_numbers = np.arange(count) * len(sizes) // count
    shares = equal_shares(sizes[block_numbers], limit)
    chosen = [
        torch.arange(start, start + share)
        for start, share in zip(starts[block_numbers].tolist(), shares.tolist(), strict=True)
    ]
    return torch.cat(chosen), Blocks(shares[shares > 0], blocks.at_once)


def equal_shares(sizes: np.ndarray, total: int) -> np.ndarray:
    """Divide a total into one share of each block, as equal as possible.

    Args:
        sizes: the number of samples in each block, which its share can't exceed.
        total: at most the sum of `sizes`.

    Returns:
        int64 [len(sizes)]: the shares, whose sum is `total`.
    """
    shares = np.zeros(len(sizes), dtype=np.int64)
    remaining = total
    # The smallest block comes first, so that larger blocks can make up for it.
    for number, block in enumerate(np.argsort(sizes, kind="stable")):
        blocks_left = len(sizes) - number
        share = min(int(sizes[block]), remaining // blocks_left)
        shares[block] = share
        remaining -= share
    return shares
