"""Notes the outcome of each sample of an evaluation, and each loss that training computes.

The functions of torch that compute losses see what a model gave for which samples. From these
outcomes, a check computes the figures of an evaluation again.

It writes an `EvaluationLoss` for each call of a loss function in an evaluation, a `TrainingLoss` for each
call in training, and `TrainingMode` for a layer that is in the wrong mode.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_pre_hook

from common.data.batch import Batch, Work
from common.data.loader import Loader
from common.data.workers import MicroBatches
from common.tools.prove.notes import EvaluationLoss, SampleOutcomes, TrainingLoss, TrainingMode
from common.tools.prove.session import Session

CLASS_LOSSES = ("cross_entropy", "nll_loss")
BINARY_LOSSES = ("binary_cross_entropy_with_logits", "binary_cross_entropy")
DISTANCES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
IGNORED = -100  # the default label of elements that a loss of classes leaves out


def install(session: Session) -> None:
    outcomes = LossObserver(session)
    session.wrap(Loader, "make_batches", outcomes.make_batches)
    for name in (*CLASS_LOSSES, *BINARY_LOSSES, *DISTANCES):
        session.wrap(functional, name, outcomes.computing_loss)
    register_module_forward_pre_hook(outcomes.entering)


@dataclass(frozen=True)
class CurrentBatch:
    """The batch that an evaluation uses now."""

    split: str
    reading: int  # an evaluation may read its split several times; they are numbered
    samples: list[int]


class LossObserver:
    """Writes the notes of one launch."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.batch: CurrentBatch | None = None
        self.readings = itertools.count()
        self.told: set[tuple[int, str]] = set()  # readings and layers in training mode

    def make_batches(
        self,
        original: Callable[..., Iterator[tuple[Batch, Work]]],
        loader: Loader,
        micro_batches: MicroBatches,
        epoch: int | None,
        first: int = 0,
    ) -> Iterator[tuple[Batch, Work]]:
        """Yield the batches of a loader; remember the one that an evaluation uses."""
        batches = original(loader, micro_batches, epoch, first)
        if epoch is not None or not self.session.has_started:
            self.batch = None
            yield from batches
            return
        reading = next(self.readings)
        split = self.session.split_of(loader)
        try:
            for samples, made_batch in zip(micro_batches, batches, strict=False):
                self.batch = CurrentBatch(split, reading, samples.tolist())
                yield made_batch
        finally:
            self.batch = None

    def entering(self, module: nn.Module, inputs: object) -> None:
        """Note a layer that is in training mode in an evaluation."""
        if self.batch is None or not module.training or not acts_differently(module):
            return
        layer = type(module).__name__
        if (self.batch.reading, layer) not in self.told:
            self.told.add((self.batch.reading, layer))
            self.session.write(
                TrainingMode(
                    step=self.session.step,
                    phase=self.session.evaluation_phase,
                    split=self.batch.split,
                    layer=layer,
                )
            )

    def computing_loss(
        self,
        original: Callable[..., torch.Tensor],
        input: torch.Tensor,
        target: torch.Tensor,
        *rest: Any,
        **named: Any,
    ) -> torch.Tensor:
        """Compute a loss, and note its value and what it says of each sample."""
        result = original(input, target, *rest, **named)
        if not self.session.has_started or result.device.type == "meta":
            return result
        function = original.__name__
        value = float(result.detach().double().mean())
        if self.batch is None:
            if result.requires_grad:
                self.write_training_loss(function, value, input, target)
            return result
        losses = None
        of_samples = SampleOutcomes()
        if target.ndim and len(target) == len(self.batch.samples):
            losses = self.losses_of_samples(original, input, target, rest, named)
            of_samples = outcomes_of_samples(function, input.detach(), target.detach())
        self.session.write(
            EvaluationLoss(
                step=self.session.step,
                phase=self.session.evaluation_phase,
                split=self.batch.split,
                reading=self.batch.reading,
                samples=self.batch.samples,
                function=function,
                value=value,
                losses=losses,
                of_samples=of_samples,
            )
        )
        return result

    def write_training_loss(
        self, function: str, value: float, input: torch.Tensor, target: torch.Tensor
    ) -> None:
        """Note a loss that training computes.

        Args:
            function: the name of the loss function.
            value: the mean of its result.
            input: the model's outputs.
            target: their targets.
        """
        self.session.write(
            TrainingLoss(
                step=self.session.step,
                function=function,
                value=value,
                micro_batch=self.session.micro_batch,
                means=means_of_outputs(function, input.detach(), target.detach()),
            )
        )

    def losses_of_samples(
        self,
        original: Callable[..., torch.Tensor],
        input: torch.Tensor,
        target: torch.Tensor,
        rest: Sequence[Any],
        named: dict[str, Any],
    ) -> list[float] | None:
        """Return the mean loss of each sample, in float64; None if samples have weights."""
        weights = {"weight", "pos_weight", "size_average", "reduce"}
        if rest or any(named.get(name) is not None for name in weights):
            return None
        if not target.is_floating_point() and bool((target == IGNORED).any()):
            return None
        exact_target = target.double() if target.is_floating_point() else target
        options = {**named, "reduction": "none"}
        elements = original(input.detach().double(), exact_target.detach(), **options)
        return means_of_samples(elements, len(target))


def acts_differently(module: nn.Module) -> bool:
    """Whether a layer computes something else in training mode."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return isinstance(module, _BatchNorm)


def outcomes_of_samples(function: str, input: torch.Tensor, target: torch.Tensor) -> SampleOutcomes:
    """Return what a model's outputs say of each sample; nothing for targets of another kind.

    Args:
        function: the name of the loss function.
        input: the model's outputs, [samples, classes, ...] or of the target's shape.
        target: [samples, ...].
    """
    rows = len(target)
    if function in CLASS_LOSSES and not target.is_floating_point() and input.ndim > 1:
        if bool((target == IGNORED).any()):
            return SampleOutcomes()
        predicted = input.argmax(1)
        hits = means_of_samples((predicted == target).double(), rows)
        if target.ndim != 1:
            return SampleOutcomes(hits=hits)
        return SampleOutcomes(
            hits=hits,
            predicted=predicted.tolist(),
            labels=target.tolist(),
            classes=input.shape[1],
        )
    if input.shape != target.shape:
        return SampleOutcomes()
    if function in BINARY_LOSSES:
        threshold = 0.0 if function == "binary_cross_entropy_with_logits" else 0.5
        is_hit = (input > threshold) == (target > 0.5)
        return SampleOutcomes(hits=means_of_samples(is_hit.double(), rows))
    if function in DISTANCES:
        errors = input.double() - target.double()
        return SampleOutcomes(
            squares=means_of_samples(errors.square(), rows),
            distances=means_of_samples(errors.abs(), rows),
        )
    return SampleOutcomes()


def means_of_outputs(function: str, input: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
    """Return what the outputs of a micro-batch say, as means by name; see `TrainingLoss`."""
    if not target.ndim or not len(target):
        return {}
    of_samples = outcomes_of_samples(function, input, target)
    means = {}
    if of_samples.hits is not None:
        means["accuracy"] = fmean(of_samples.hits)
        means["error"] = 1 - means["accuracy"]
    if of_samples.squares is not None and of_samples.distances is not None:
        means["mse"] = fmean(of_samples.squares)
        means["mae"] = fmean(of_samples.distances)
    return means


def means_of_samples(elements: torch.Tensor, rows: int) -> list[float]:
    """Return the mean of each row; a value that is not finite becomes the largest float."""
    means = elements.reshape(rows, -1).mean(1).tolist()
    return [value if math.isfinite(value) else math.copysign(1e308, value) for value in means]
