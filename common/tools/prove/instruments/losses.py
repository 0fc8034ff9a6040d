"""Records the outcome of each sample of an evaluation, and each loss that training computes.

The loss functions of torch get the model's outputs and the targets. From these follows the outcome
of each sample: how well the model did on it. From the outcomes, a check computes the figures of an
evaluation again.

The instrument writes an `EvaluationLoss` for each call of a loss function in an evaluation, and a
`TrainingLoss` for each call in training. It writes a `TrainingMode` for a layer that is in training
mode in an evaluation.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_pre_hook

from common.data.loader import Loader
from common.data.samples import BatchesWithWork
from common.data.workers import MicroBatches
from common.tools.prove.outcome_figures import FIGURE_FUNCTIONS
from common.tools.prove.outcomes import outcomes_of_columns
from common.tools.prove.records.instrument_records import (
    DivisorKind,
    EvaluationLoss,
    OutcomeColumns,
    TrainingLoss,
    TrainingMode,
)
from common.tools.prove.session import Session

CLASS_LOSSES = ("cross_entropy", "nll_loss")
BINARY_LOSSES = ("binary_cross_entropy_with_logits", "binary_cross_entropy")
DISTANCES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
METRICS = ("accuracy", "error", "mse", "mae")  # those that are computed again in training
# Options with which the loss of a batch is not the plain mean over its elements.
OPTIONS_WITHOUT_PLAIN_MEAN = ("weight", "pos_weight", "size_average", "reduce")
IGNORED = -100  # the label of elements that a loss leaves out, if ignore_index names no other
LARGEST_MEAN = 1e150  # the largest recorded mean of a sample; sums of its square do not overflow


def install(session: Session) -> None:
    """Install the instrument. The probe calls this before the recipe runs."""
    observer = LossObserver(session)
    session.wrap(Loader, "make_batches", observer.around_make_batches)
    for name in (*CLASS_LOSSES, *BINARY_LOSSES, *DISTANCES):
        session.wrap(functional, name, observer.around_loss)
    register_module_forward_pre_hook(observer.before_forward)


@dataclass(frozen=True)
class CurrentBatch:
    """The batch that an evaluation is using."""

    split: str
    pass_number: int  # an evaluation may make several passes over its split
    samples: list[int]


@dataclass(frozen=True)
class Divisor:
    """The number by which a loss function has divided the sum of its elements."""

    divided_by: DivisorKind
    value: float


class LossObserver:
    """Writes the losses and outcomes of one launch."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.batch: CurrentBatch | None = None  # None outside of an evaluation
        self.pass_numbers = itertools.count()
        self.reported_layers: set[tuple[int, str]] = set()  # pass numbers and class names

    def around_make_batches(
        self,
        original: Callable[..., BatchesWithWork],
        loader: Loader,
        micro_batches: MicroBatches,
        epoch: int | None,
        first_micro_batch: int = 0,
    ) -> BatchesWithWork:
        """Yield the batches of a loader, and remember the current batch of an evaluation."""
        batches = original(loader, micro_batches, epoch, first_micro_batch)
        is_evaluation = epoch is None
        if not is_evaluation or not self.session.has_started:
            self.batch = None
            yield from batches
            return
        pass_number = next(self.pass_numbers)
        split = self.session.split_of(loader)
        try:
            # `first_micro_batch` is 0 in an evaluation, so both begin with the same batch.
            for samples, batch_and_work in zip(micro_batches, batches, strict=False):
                self.batch = CurrentBatch(split, pass_number, samples.tolist())
                yield batch_and_work
        finally:
            self.batch = None

    def before_forward(self, module: nn.Module, inputs: object) -> None:
        """Write a `TrainingMode` for a layer that is in training mode in an evaluation.

        Each class of layers is written once for each pass over a split.
        """
        if self.batch is None or not module.training or not behaves_differently_in_training(module):
            return
        layer = type(module).__name__
        if (self.batch.pass_number, layer) not in self.reported_layers:
            self.reported_layers.add((self.batch.pass_number, layer))
            self.session.write(
                TrainingMode(
                    step=self.session.step,
                    phase=self.session.evaluation_phase,
                    split=self.batch.split,
                    layer=layer,
                )
            )

    def around_loss(
        self,
        original: Callable[..., torch.Tensor],
        input: torch.Tensor,
        target: torch.Tensor,
        *arguments: object,
        **named: object,
    ) -> torch.Tensor:
        """Compute a loss, and write its value and the outcome of each sample."""
        result = original(input, target, *arguments, **named)
        if not self.session.has_started or result.device.type == "meta":
            return result
        function = original.__name__
        value = float(result.detach().double().mean())
        ignored = ignored_label(named)
        if self.batch is None:
            if result.requires_grad:  # other losses do not train
                options = inspect.signature(original).bind(input, target, *arguments, **named)
                divisor = divisor_of(function, target.detach(), options.arguments)
                self.write_training_loss(function, value, input, target, ignored, divisor)
            return result
        losses = None
        of_samples = OutcomeColumns()
        if target.ndim and len(target) == len(self.batch.samples):
            losses = self.losses_of_samples(original, input, target, ignored, arguments, named)
            of_samples = outcomes_of_samples(function, input.detach(), target.detach(), ignored)
        self.session.write(
            EvaluationLoss(
                step=self.session.step,
                phase=self.session.evaluation_phase,
                split=self.batch.split,
                pass_number=self.batch.pass_number,
                samples=self.batch.samples,
                function=function,
                value=value,
                losses=losses,
                of_samples=of_samples,
            )
        )
        return result

    def write_training_loss(
        self,
        function: str,
        value: float,
        input: torch.Tensor,
        target: torch.Tensor,
        ignored: int,
        divisor: Divisor | None,
    ) -> None:
        """Write a loss that training computes.

        Args:
            function: the name of the loss function.
            value: the mean of its result.
            input: the model's outputs.
            target: their targets.
            ignored: the label of elements that the loss leaves out.
            divisor: what the function has divided by; see `divisor_of`.
        """
        self.session.write(
            TrainingLoss(
                step=self.session.step,
                function=function,
                value=value,
                micro_batch=self.session.micro_batch,
                means=means_of_outputs(function, input.detach(), target.detach(), ignored),
                divided_by=None if divisor is None else divisor.divided_by,
                divisor=None if divisor is None else divisor.value,
            )
        )

    def losses_of_samples(
        self,
        original: Callable[..., torch.Tensor],
        input: torch.Tensor,
        target: torch.Tensor,
        ignored: int,
        arguments: Sequence[object],
        named: dict[str, object],
    ) -> list[float] | None:
        """Return the mean loss of each sample, computed in float64.

        The result is None if the batch's loss is not the plain mean of its elements: with class
        weights, with `size_average` or `reduce`, or if elements are ignored.

        Args:
            ignored: the label of elements that the loss leaves out.
            arguments: options that were passed by position. They are not recognised, so the result
                is None if there are any.
            named: options that were passed by name.
        """
        if arguments:
            return None
        if any(named.get(name) is not None for name in OPTIONS_WITHOUT_PLAIN_MEAN):
            return None
        if has_ignored_elements(target, ignored):
            return None
        exact_target = target.double() if target.is_floating_point() else target
        options = {**named, "reduction": "none"}
        elements = original(input.detach().double(), exact_target.detach(), **options)
        return means_of_samples(elements, len(target))


def ignored_label(named: Mapping[str, object]) -> int:
    """Return the label of elements that a loss leaves out, from the options by name."""
    label = named.get("ignore_index")
    return label if isinstance(label, int) else IGNORED


def has_ignored_elements(target: torch.Tensor, ignored: int) -> bool:
    """Whether a target has labels of classes, and some of them are the ignored label."""
    return not target.is_floating_point() and bool((target == ignored).any())


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


def behaves_differently_in_training(module: nn.Module) -> bool:
    """Whether a layer is a dropout with p > 0 or a batch norm, which differ in training mode."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return isinstance(module, _BatchNorm)


def outcomes_of_samples(
    function: str, input: torch.Tensor, target: torch.Tensor, ignored: int
) -> OutcomeColumns:
    """Return the outcome of each sample; empty if the outputs and targets do not tell it.

    Args:
        function: the name of the loss function.
        input: the model's outputs, [samples, classes, ...] or of the target's shape.
        target: [samples, ...].
        ignored: the label of elements that the loss leaves out.
    """
    rows = len(target)
    if function in CLASS_LOSSES and not target.is_floating_point() and input.ndim > 1:
        if has_ignored_elements(target, ignored):
            return OutcomeColumns()
        predicted = input.argmax(1)
        hits = means_of_samples((predicted == target).double(), rows)
        if target.ndim != 1:
            return OutcomeColumns(hits=hits)
        return OutcomeColumns(
            hits=hits,
            predicted=predicted.tolist(),
            labels=target.tolist(),
            classes=input.shape[1],
        )
    if input.shape != target.shape:
        return OutcomeColumns()
    if function in BINARY_LOSSES:
        if input.numel() != rows:  # "accuracy" may be the share of right outputs or right samples
            return OutcomeColumns()
        threshold = 0.0 if function == "binary_cross_entropy_with_logits" else 0.5
        is_hit = (input > threshold) == (target > 0.5)
        return OutcomeColumns(hits=means_of_samples(is_hit.double(), rows))
    if function in DISTANCES:
        errors = input.double() - target.double()
        return OutcomeColumns(
            squared_errors=means_of_samples(errors.square(), rows),
            absolute_errors=means_of_samples(errors.abs(), rows),
        )
    return OutcomeColumns()


def means_of_outputs(
    function: str, input: torch.Tensor, target: torch.Tensor, ignored: int
) -> dict[str, float]:
    """Return the metrics of a micro-batch: accuracy and error, or mse and mae.

    The result is empty if the target is a scalar or empty, or if the loss function gives none.

    Args:
        function: the name of the loss function.
        input: the model's outputs, [samples, classes, ...] or of the target's shape.
        target: [samples, ...].
        ignored: the label of elements that the loss leaves out.
    """
    if not target.ndim or not len(target):
        return {}
    columns = outcomes_of_samples(function, input, target, ignored)
    outcomes = outcomes_of_columns(range(len(target)), None, columns)
    means = {}
    for name in METRICS:
        mean = FIGURE_FUNCTIONS[name](outcomes)
        if mean is not None:
            means[name] = mean
    return means


def means_of_samples(elements: torch.Tensor, rows: int) -> list[float]:
    """Return the mean of each row; NaN, infinities and larger values become ±`LARGEST_MEAN`.

    Args:
        elements: [rows, ...].
    """
    means = elements.reshape(rows, -1).mean(1).tolist()
    limited = []
    for mean in means:
        is_usual = abs(mean) <= LARGEST_MEAN  # False for NaN
        limited.append(mean if is_usual else math.copysign(LARGEST_MEAN, mean))
    return limited
