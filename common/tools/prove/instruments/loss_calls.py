"""Calls of torch's loss functions, and what follows from their arguments.

A loss function gets the model's outputs and the targets. From these follows the outcome of each
sample: how well the model did on it.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from common.tools.prove.recomputation.figure_functions import FIGURE_FUNCTIONS
from common.tools.prove.recomputation.sample_outcomes import outcomes_of_columns
from common.tools.prove.records.instrument_records import DivisorType, OutcomeColumns

CLASS_LOSSES = ("cross_entropy", "nll_loss")
BINARY_LOSSES = ("binary_cross_entropy_with_logits", "binary_cross_entropy")
DISTANCES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
METRICS = ("accuracy", "error", "mse", "mae")  # those that are computed again in training
# Options with which the loss of a batch is not the plain mean over its elements.
OPTIONS_WITHOUT_PLAIN_MEAN = ("weight", "pos_weight", "size_average", "reduce")
IGNORED = -100  # the label of elements that a loss leaves out, if ignore_index names no other
LARGEST_MEAN = 1e150  # the largest recorded mean of a sample; sums of its square do not overflow


@dataclass(frozen=True)
class Divisor:
    """The number by which a loss function has divided the sum of its elements."""

    divisor_type: DivisorType
    value: float


@dataclass(frozen=True)
class LossCall:
    """A call of one of torch's loss functions."""

    function: Callable[..., torch.Tensor]
    outputs: torch.Tensor  # of the model: [samples, classes, ...], or of the target's shape
    target: torch.Tensor  # [samples, ...]
    arguments: tuple[object, ...] = ()  # the options that were passed by position
    # The options that were passed by name.
    named: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the loss function."""
        return self.function.__name__

    @property
    def ignored_label(self) -> int:
        """The label of elements that the loss leaves out; see `ignored_label`."""
        return ignored_label(self.named)

    @property
    def has_ignored_elements(self) -> bool:
        """Whether the target has labels of classes, and some of them are the ignored label."""
        is_label = not self.target.is_floating_point()
        return is_label and bool((self.target == self.ignored_label).any())

    @property
    def options(self) -> Mapping[str, object]:
        """All arguments that were passed, by name."""
        signature = inspect.signature(self.function)
        return signature.bind(self.outputs, self.target, *self.arguments, **self.named).arguments

    @property
    def is_sum(self) -> bool:
        """Whether the function has computed the sum over all elements."""
        return self.options.get("reduction") == "sum"

    def divisor(self) -> Divisor | None:
        """Return what the function has divided by; None if it has not computed a mean."""
        return divisor_of(self.name, self.target.detach(), self.options)

    def losses_of_samples(self) -> list[float] | None:
        """Return the mean loss of each sample, computed in float64.

        The result is None if the batch's loss is not the plain mean of its elements: with class
        weights, with `size_average` or `reduce`, or if elements are ignored. Options that were
        passed by position are not recognised, so the result is None if there are any.
        """
        if self.arguments or self.has_ignored_elements:
            return None
        if any(self.named.get(name) is not None for name in OPTIONS_WITHOUT_PLAIN_MEAN):
            return None
        target = self.target.detach()
        exact_target = target.double() if target.is_floating_point() else target
        options = {**self.named, "reduction": "none"}
        elements = self.function(self.outputs.detach().double(), exact_target, **options)
        return means_of_samples(elements, len(target))

    def outcomes(self) -> OutcomeColumns:
        """Return the outcome of each sample; empty if outputs and target do not tell it."""
        outputs = self.outputs.detach()
        target = self.target.detach()
        if self.name in CLASS_LOSSES and not target.is_floating_point() and outputs.ndim > 1:
            return OutcomeColumns() if self.has_ignored_elements else class_hits(outputs, target)
        if outputs.shape != target.shape:
            return OutcomeColumns()
        if self.name in BINARY_LOSSES:
            threshold = 0.0 if self.name == "binary_cross_entropy_with_logits" else 0.5
            return binary_hits(outputs, target, threshold)
        if self.name in DISTANCES:
            return distances(outputs, target)
        return OutcomeColumns()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the micro-batch: accuracy and error, or mse and mae.

        The result is empty if the target is a scalar or empty, or if the loss function gives none.
        """
        if not self.target.ndim or not len(self.target):
            return {}
        outcomes = outcomes_of_columns(range(len(self.target)), None, self.outcomes())
        metrics = {}
        for name in METRICS:
            value = FIGURE_FUNCTIONS[name](outcomes)
            if value is not None:
                metrics[name] = value
        return metrics


def ignored_label(options: Mapping[str, object]) -> int:
    """Return the label of elements that a loss leaves out, from the options by name."""
    label = options.get("ignore_index")
    return label if isinstance(label, int) else IGNORED


def divisor_of(
    function: str, target: torch.Tensor, options: Mapping[str, object]
) -> Divisor | None:
    """Return what a loss function has divided by; None if it has not computed a mean.

    Args:
        function: the name of the loss function.
        target: [samples, ...].
        options: the function's arguments by name. Those with default values may be missing.
    """
    has_old_options = options.get("size_average") is not None or options.get("reduce") is not None
    if has_old_options or options.get("reduction", "mean") != "mean":
        return None
    if function not in CLASS_LOSSES or target.is_floating_point():
        return Divisor("elements", target.numel())
    # Torch takes labels of uint8, too, but as an index, they would be a mask.
    labels = target[target != ignored_label(options)].long()
    weight = options.get("weight")
    if isinstance(weight, torch.Tensor):
        return Divisor("weights", float(weight.detach().double()[labels].sum()))
    return Divisor("labels", labels.numel())


def class_hits(outputs: torch.Tensor, target: torch.Tensor) -> OutcomeColumns:
    """Return the hits of a loss of classes.

    Args:
        outputs: [samples, classes, ...].
        target: the labels, [samples, ...], none of which is ignored.
    """
    predicted = outputs.argmax(1)
    hits = means_of_samples((predicted == target).double(), len(target))
    if target.ndim != 1:
        return OutcomeColumns(hits=hits)
    return OutcomeColumns(
        hits=hits,
        predicted=predicted.tolist(),
        labels=target.tolist(),
        class_count=outputs.shape[1],
    )


def binary_hits(outputs: torch.Tensor, target: torch.Tensor, threshold: float) -> OutcomeColumns:
    """Return the hits of a binary loss; empty if a sample has several outputs.

    "Accuracy" may then be the share of right outputs, or of samples whose outputs are all right.

    Args:
        outputs: of the target's shape.
        target: [samples, ...].
        threshold: an output above it says yes.
    """
    if outputs.numel() != len(target):
        return OutcomeColumns()
    is_hit = (outputs > threshold) == (target > 0.5)
    return OutcomeColumns(hits=means_of_samples(is_hit.double(), len(target)))


def distances(outputs: torch.Tensor, target: torch.Tensor) -> OutcomeColumns:
    """Return the squared and the absolute errors.

    Args:
        outputs: of the target's shape.
        target: [samples, ...].
    """
    errors = outputs.double() - target.double()
    return OutcomeColumns(
        squared_errors=means_of_samples(errors.square(), len(target)),
        absolute_errors=means_of_samples(errors.abs(), len(target)),
    )


def means_of_samples(elements: torch.Tensor, sample_count: int) -> list[float]:
    """Return the mean of each sample; NaN, infinities and larger values become ±`LARGEST_MEAN`.

    Args:
        elements: [sample_count, ...].
    """
    means = elements.reshape(sample_count, -1).mean(1).tolist()
    limited = []
    for mean in means:
        is_usual = abs(mean) <= LARGEST_MEAN  # False for NaN
        limited.append(mean if is_usual else math.copysign(LARGEST_MEAN, mean))
    return limited
