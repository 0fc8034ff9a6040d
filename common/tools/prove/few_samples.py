"""Limits the samples of a recipe's splits, so that a few updates make an epoch.

The samples are spread over the whole split, because a split may be sorted by class. Their order,
the incomplete batch that is dropped, and the shares of the ranks follow from the same code as ever.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from common.data import loader
from common.data.order import EvaluationOrder, TrainingOrder


@dataclass(frozen=True)
class FewTrainingSamples(TrainingOrder):
    """The order of some of the training samples."""

    chosen: torch.Tensor | None = None  # int64 [num_samples], indices of the split

    def micro_batches(self, epoch: int, first_update: int = 0) -> torch.Tensor:
        places = super().micro_batches(epoch, first_update)
        assert isinstance(places, torch.Tensor)
        assert self.chosen is not None
        return self.chosen[places]


@dataclass(frozen=True)
class FewEvaluationSamples(EvaluationOrder):
    """The order of some samples of an evaluation."""

    chosen: torch.Tensor | None = None  # int64 [num_samples], indices of the split

    def micro_batches(self) -> list[torch.Tensor]:
        assert self.chosen is not None
        return [self.chosen[places] for places in super().micro_batches()]


def limit_samples(training: int, evaluation: int) -> None:
    """Have all loaders of this process use at most so many samples of a split.

    Splits that are read in blocks keep all samples.
    """
    limit_order("training_order", FewTrainingSamples, training)
    limit_order("evaluation_order", FewEvaluationSamples, evaluation)


def limit_order(function: str, few_class: type, most: int) -> None:
    """Have a function of `common.data.loader` return an order of at most `most` samples."""
    make_order: Callable[..., Any] = getattr(loader, function)
    setattr(loader, function, lambda *arguments: few_of(make_order(*arguments), few_class, most))


def few_of(order: Any, few_class: type, most: int) -> Any:
    """Cut an order to `most` samples. A shorter order, or one with blocks, stays as it is."""
    if order.num_samples <= most or order.blocks is not None:
        return order
    # Neighbours are equally far apart, from the first sample on.
    chosen = torch.arange(most) * order.num_samples // most
    values = {field.name: getattr(order, field.name) for field in fields(order)}
    values["num_samples"] = most
    if order.lengths is not None:
        values["lengths"] = order.lengths[chosen.numpy()]
    return few_class(**values, chosen=chosen)
