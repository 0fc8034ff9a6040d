"""Records the outcome of each sample of an evaluation, and each loss that training computes.

From the outcomes, which `loss_calls.py` computes, a check computes the figures of an evaluation
again.

The instrument writes an `EvaluationLoss` for each call of a loss function in an evaluation, and a
`TrainingLoss` for each call in training. It writes a `LayerInTrainingMode` for a layer that is in
training mode in an evaluation.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_pre_hook

from common.data.loader import Loader
from common.data.samples import BatchesWithWork
from common.tools.prove.instruments.loss_calls import (
    BINARY_LOSSES,
    CLASS_LOSSES,
    DISTANCES,
    LossCall,
)
from common.tools.prove.observation.session import Session
from common.tools.prove.records.instrument_records import (
    EvaluationLoss,
    LayerInTrainingMode,
    OutcomeColumns,
    TrainingLoss,
)


def install(session: Session) -> None:
    """Install the instrument. The probe calls this before the recipe runs."""
    observer = LossObserver(session)
    session.wrap(Loader, "evaluation_batches", observer.around_evaluation_batches)
    for name in (*CLASS_LOSSES, *BINARY_LOSSES, *DISTANCES):
        session.wrap(functional, name, observer.around_loss)
    register_module_forward_pre_hook(observer.before_forward)


@dataclass(frozen=True)
class CurrentBatch:
    """The batch that an evaluation is using."""

    split: str
    pass_number: int  # an evaluation may make several passes over its split
    sample_indices: list[int]


class LossObserver:
    """Writes the losses and outcomes of one launch."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.batch: CurrentBatch | None = None  # None outside of an evaluation
        self.pass_numbers = itertools.count()
        self.reported_layers: set[tuple[int, str]] = set()  # pass numbers and class names

    def around_evaluation_batches(
        self,
        original: Callable[[Loader, list[torch.Tensor]], BatchesWithWork],
        loader: Loader,
        micro_batches: list[torch.Tensor],
    ) -> BatchesWithWork:
        """Yield the batches of an evaluation, and remember the current one."""
        batches = original(loader, micro_batches)
        if not self.session.has_started:
            yield from batches
            return
        pass_number = next(self.pass_numbers)
        split = self.session.split_of(loader)
        try:
            for indices, batch_with_work in zip(micro_batches, batches, strict=True):
                self.batch = CurrentBatch(split, pass_number, indices.tolist())
                yield batch_with_work
        finally:
            self.batch = None

    def before_forward(self, module: nn.Module, inputs: object) -> None:
        """Write a `LayerInTrainingMode` for a layer that is in training mode in an evaluation.

        Each class of layers is written once for each pass over a split.
        """
        if self.batch is None or not module.training or not behaves_differently_in_training(module):
            return
        layer = type(module).__name__
        if (self.batch.pass_number, layer) not in self.reported_layers:
            self.reported_layers.add((self.batch.pass_number, layer))
            self.session.write(
                LayerInTrainingMode(
                    step=self.session.step,
                    phase=self.session.evaluation_phase,
                    split=self.batch.split,
                    layer_class=layer,
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
        call = LossCall(original, input, target, arguments, named)
        loss = float(result.detach().double().mean())
        if self.batch is not None:
            self.write_evaluation_loss(call, loss, self.batch)
        elif result.requires_grad:  # other losses do not train
            self.write_training_loss(call, loss)
        return result

    def write_evaluation_loss(self, call: LossCall, loss: float, batch: CurrentBatch) -> None:
        """Write a loss that an evaluation computes for a batch.

        Args:
            loss: the mean over the elements of the call's result.
        """
        sample_losses = None
        outcomes = OutcomeColumns()
        if call.target.ndim and len(call.target) == len(batch.sample_indices):
            sample_losses = call.losses_of_samples()
            outcomes = call.outcomes()
        self.session.write(
            EvaluationLoss(
                step=self.session.step,
                phase=self.session.evaluation_phase,
                split=batch.split,
                pass_number=batch.pass_number,
                sample_indices=batch.sample_indices,
                function=call.name,
                loss=loss,
                sample_losses=sample_losses,
                outcomes=outcomes,
            )
        )

    def write_training_loss(self, call: LossCall, loss: float) -> None:
        """Write a loss that training computes.

        A sum is divided by the number of samples, because a recipe that asks for the sum divides
        it, too. Otherwise, the ratio to the recorded loss would depend on the micro-batch's size.

        Args:
            loss: the mean over the elements of the call's result.
        """
        divisor = call.divisor()
        if call.is_sum:
            loss /= max(1, len(self.session.sample_indices))
        self.session.write(
            TrainingLoss(
                step=self.session.step,
                function=call.name,
                loss=loss,
                micro_batch=self.session.micro_batch,
                metrics=call.metrics(),
                divisor_type=None if divisor is None else divisor.divisor_type,
                divisor=None if divisor is None else divisor.value,
            )
        )


def behaves_differently_in_training(module: nn.Module) -> bool:
    """Whether a layer is a dropout with p > 0 or a batch norm, which differ in training mode."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return isinstance(module, _BatchNorm)
