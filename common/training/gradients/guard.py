"""Gradient clipping, and protection against updates whose gradients are not finite."""

import math
from dataclasses import dataclass
from typing import TypedDict, cast
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from common.checkpoints.adapters import bare_optimizer
from common.checkpoints.shards import is_sharded, local
from common.errors import TrainingError
from common.metric_names import GRADIENT_NORM, LOSS_SCALE, SKIPPED_UPDATES
from common.ranks.agreement import gather_from_ranks
from common.system.devices import FusedOptimizer
from common.training.gradients.logged_norms import LoggedNorms, norm_over_ranks
from common.training.gradients.non_finite import (
    first_update_error,
    non_finite_loss_error,
    non_finite_update_error,
    overflow_error,
)
from common.training.gradients.skipped_steps import (
    drop_gradients_at_next_step,
    parameters_of,
    remove_mark,
    skips_on_device,
)
from common.training.gradients.skipped_updates import SkippedUpdates
from common.training.gradients.unfreezing import UnfreezingWatch

# A healthy fp16 run skips a few updates while its loss scale settles, never so many in a row.
MAX_SKIPS_IN_A_ROW = 25


class GuardState(TypedDict):
    """The guard's part of a checkpoint."""

    grad_norm: float
    skipped: int
    skipped_in_a_row: list[int]


@dataclass
class ClippedNetwork:
    """A network that the guard clips. Making these lists would cost as much as clipping."""

    number: int  # from 0, in the order in which the networks were first clipped
    parameters: list[nn.Parameter]
    # The lists that `optimizers_of` returned, by the `id` of the optimizer that the recipe passed.
    optimizers: dict[int, list[Optimizer]]


class GradientGuard:
    """Clips gradients, and skips updates whose gradients are not finite.

    Gradients are scaled in place. Fused optimizers, which the recipes use, decide on the device
    whether to skip, without a synchronisation. All ranks make the same decision, because their
    averaged gradients are the same.
    """

    def __init__(self, accelerator: Accelerator, max_grad_norm: float, by_layer: bool):
        """Prepare to clip.

        Args:
            max_grad_norm: the largest global norm; 0 turns clipping off.
            by_layer: whether to log the gradient norm of each layer as well: see `LoggedNorms`.
        """
        self.accelerator = accelerator
        self.max_grad_norm = max_grad_norm
        self.is_fp16 = accelerator.scaler is not None
        self.logged_norms = LoggedNorms(accelerator, by_layer)
        # On a CPU, reading the norm costs nothing and mostly saves the multiplication.
        self.reads_norm = accelerator.device.type == "cpu" and not self.is_fp16
        self.skipped_updates = SkippedUpdates()
        self.networks: WeakKeyDictionary[nn.Module, ClippedNetwork] = WeakKeyDictionary()
        self.has_seen_gradients = False  # whether any network had gradients at a call of `clip`
        # This rank's losses of the micro-batches of update 1, read only for an error message.
        self.first_losses: list[torch.Tensor | float] = []
        self.unfreezing = UnfreezingWatch(accelerator)
        # For each optimizer that `mark` has marked, the hook that removes marks after its steps.
        self.unmarking_hooks: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()

    def clip(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Clip the global norm of a network's gradients, and mark an update that is not finite.

        The gradients are clipped when this method returns. A recipe may change them afterwards. The
        next step of each optimizer that updates the network skips a marked update. So one call is
        enough for a network with several optimizers, and a further call does no harm.

        Raises:
            UserError: a parameter was unfrozen, and no optimizer updates it; or in fp16, an
                optimizer of the network has made its step since the backward pass.
        """
        network = self.networks.get(model) or self.add_network(model)
        optimizers = self.optimizers_of(network, optimizer)
        self.unscale(optimizers)
        trained: list[nn.Parameter] = []
        gradients: list[torch.Tensor] = []
        for parameter in network.parameters:
            gradient = parameter.grad
            if gradient is not None:
                trained.append(parameter)
                gradients.append(gradient)
        self.has_seen_gradients |= bool(gradients)
        self.unfreezing.check(model, optimizer, network.parameters, trained)
        # If gradients are sharded, each rank knows only the norm of its own shards.
        norm = norm_over_ranks(nn.utils.get_total_norm(gradients, foreach=True))
        is_first_call = self.skipped_updates.note_norm(network.number, norm)
        # The log has the norm of the network that was clipped first, which stands first here.
        if is_first_call and model is next(iter(self.networks)):
            self.logged_norms.remember(model, gradients, norm)
        if self.reads_norm or not all(map(skips_on_device, optimizers)):
            self.clip_after_reading(optimizers, gradients, norm)
        else:
            self.clip_on_device(optimizers, gradients, norm)

    def add_network(self, model: nn.Module) -> ClippedNetwork:
        """Number a network that is clipped for the first time, and list its parameters."""
        network = ClippedNetwork(len(self.networks), [*model.parameters()], optimizers={})
        self.networks[model] = network
        self.skipped_updates.add_network(network.number)
        return network

    def optimizers_of(self, network: ClippedNetwork, optimizer: Optimizer) -> list[Optimizer]:
        """Return `optimizer` and the others that update a network with it, all without wrappers.

        An optimizer that shares parameters with an earlier one in the list is left out: it makes
        its steps with gradients of another loss, and in fp16, none may be unscaled twice.

        Args:
            optimizer: the one that the recipe names. The Accelerator may not have prepared it.
        """
        bare = bare_optimizer(optimizer)
        if id(bare) in network.optimizers:
            return network.optimizers[id(bare)]
        optimizers = [bare]
        taken_ids = set(map(id, parameters_of(bare)))
        network_ids = set(map(id, network.parameters))
        for prepared_optimizer in map(bare_optimizer, self.accelerator._optimizers):
            ids = set(map(id, parameters_of(prepared_optimizer)))
            if ids & network_ids and not ids & taken_ids:
                optimizers.append(prepared_optimizer)
                taken_ids |= ids
        network.optimizers[id(bare)] = optimizers
        return optimizers

    def unscale(self, optimizers: list[Optimizer]) -> None:
        """Undo fp16's loss scale in the gradients of a network's optimizers.

        If the gradients of one of them overflow, all of them skip the update.
        """
        for optimizer in optimizers:
            self.accelerator.unscale_gradients(optimizer)
        if self.is_fp16 and len(optimizers) > 1:
            self.accelerator.scaler.skip_together(optimizers)

    def end_update(self) -> None:
        """End an update: the next norm of a network belongs to the next update.

        In fp16, gradients that were unscaled but not used by a step are scaled again.
        """
        self.skipped_updates.end_update()
        if self.is_fp16:
            self.accelerator.scaler.scale_waiting_gradients()

    def clip_on_device(
        self, optimizers: list[Optimizer], gradients: list[torch.Tensor], norm: torch.Tensor
    ) -> None:
        """Clip the gradients, and mark a non-finite update, without waiting for the device.

        The mark is a tensor on the device. A fused optimizer reads it there, and skips its step.
        """
        if not self.is_fp16:  # in fp16, `GradScaler` finds non-finite gradients itself
            # A norm is never negative, so one comparison replaces the four in `isfinite`. NaN is
            # not less than infinity, so it is marked as well.
            found_inf = norm.lt(math.inf).logical_not_().float()
            for optimizer in optimizers:
                self.mark(cast("FusedOptimizer", optimizer), found_inf)
        if self.max_grad_norm:
            # The factor is exactly 1 for a small norm, so such gradients keep their bits.
            multiply(gradients, norm.div(self.max_grad_norm).clamp_(min=1.0).reciprocal_())

    def clip_after_reading(
        self, optimizers: list[Optimizer], gradients: list[torch.Tensor], norm: torch.Tensor
    ) -> None:
        """Read the norm, then clip only if it is too large; mark the update if it is not finite.

        Reading costs nothing on a CPU, and mostly saves the multiplication. It is also for
        optimizers whose step can't skip an update, and then waits for the device.
        """
        is_finite = self.clip_if_finite(gradients, norm)
        if is_finite or self.is_fp16:  # in fp16, `GradScaler` leaves such a step out
            return
        for optimizer in optimizers:
            if skips_on_device(optimizer):
                self.mark(cast("FusedOptimizer", optimizer), torch.ones_like(norm))
            else:
                drop_gradients_at_next_step(optimizer)

    def clip_if_finite(self, gradients: list[torch.Tensor], norm: torch.Tensor) -> bool:
        """Read the norm; clip gradients that are too large. Return whether the norm is finite."""
        value = float(norm)
        if not math.isfinite(value):
            return False
        if self.max_grad_norm and value > self.max_grad_norm:
            multiply(gradients, self.max_grad_norm / value)
        return True

    def mark(self, optimizer: FusedOptimizer, found_inf: torch.Tensor) -> None:
        """Have a fused optimizer skip its next step if `found_inf` is 1; 0 lets it step.

        If several networks share an optimizer, the step is skipped if any of them asks for it.
        """
        # torch's optimizers lack this attribute until something sets it.
        earlier = getattr(optimizer, "found_inf", None)
        optimizer.found_inf = found_inf if earlier is None else torch.maximum(earlier, found_inf)
        if optimizer not in self.unmarking_hooks:
            self.unmarking_hooks[optimizer] = optimizer.register_step_post_hook(remove_mark)

    @property
    def has_clipped(self) -> bool:
        """Whether the loop calls `clip`, or did so before a resume; only then are norms known."""
        return bool(self.skipped_updates.in_a_row)

    @property
    def is_due(self) -> bool:
        """Whether `check` should be called even though no log line is due."""
        return self.skipped_updates.is_count_due

    def note_first_loss(self, loss: torch.Tensor | float) -> None:
        """Keep the loss of a micro-batch of update 1."""
        self.first_losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def error_of_first_update(self, global_step: int, loss: float) -> TrainingError | None:
        """Return the error for a loss or gradients that were not finite before any step.

        No learning rate can be the cause then. The result is None if both were finite in update 1,
        or if a resumed run has made update 1 earlier. All ranks call this method.

        Args:
            loss: the mean training loss since the last log line.
        """
        is_first = global_step == 1
        if self.is_a_first_loss_bad() or (is_first and math.isnan(loss)):
            culprit = "the loss"
        elif is_first and self.skipped_updates.total:
            culprit = "a gradient"
        else:
            return None
        return first_update_error(culprit, self.accelerator.mixed_precision)

    def is_a_first_loss_bad(self) -> bool:
        """Whether a loss of update 1 was not finite on any rank; called on all ranks."""
        is_bad_here = any(
            not torch.as_tensor(first_loss).isfinite().all() for first_loss in self.first_losses
        )
        return any(gather_from_ranks(self.accelerator, is_bad_here))

    def error_of_update(self, global_step: int) -> TrainingError:
        """Return the error for a loss or gradients of a later update that are not finite."""
        if not self.has_clipped:  # nothing has looked at the gradients
            return non_finite_loss_error(global_step)
        return non_finite_update_error(
            global_step, self.max_grad_norm, self.accelerator.mixed_precision
        )

    def check(self, global_step: int, loss: float = 0.0) -> None:
        """Read the norms since the last check, and end the run if an update was skipped.

        Args:
            global_step: the number of updates made.
            loss: the mean training loss since the last log line. The default passes the check, for
                a call without a log line, where the loss is not known.

        Raises:
            TrainingError: an update was skipped, or the loss is NaN. In fp16, whose loss scale has
                to settle, only many skipped updates in a row are an error.
        """
        self.skipped_updates.count()
        if not self.is_fp16 and (self.skipped_updates.total or math.isnan(loss)):
            error_of_first_update = self.error_of_first_update(global_step, loss)
            raise error_of_first_update or self.error_of_update(global_step)
        most_in_a_row = max(self.skipped_updates.in_a_row, default=0)
        if most_in_a_row >= MAX_SKIPS_IN_A_ROW:
            raise overflow_error(global_step, most_in_a_row)

    def figures(self) -> dict[str, float]:
        """Return the ``train/`` and ``gradients/`` metrics; called on all ranks.

        Call `check` first, which counts the skipped updates up to now.
        """
        metrics: dict[str, float] = {}
        if self.has_clipped:
            metrics = {
                GRADIENT_NORM: float(self.logged_norms.grad_norm),
                SKIPPED_UPDATES: self.skipped_updates.total,
            }
        if self.is_fp16:
            metrics[LOSS_SCALE] = self.accelerator.scaler.get_scale()
        return metrics | self.logged_norms.layer_figures()

    def state_dict(self) -> GuardState:
        self.skipped_updates.count()
        return {
            "grad_norm": float(self.logged_norms.grad_norm),
            "skipped": self.skipped_updates.total,
            "skipped_in_a_row": [*self.skipped_updates.in_a_row],
        }

    def load_state_dict(self, state: GuardState) -> None:
        grad_norm = torch.tensor(state["grad_norm"], device=self.accelerator.device)
        self.logged_norms.grad_norm = grad_norm
        self.skipped_updates.total = state["skipped"]
        self.skipped_updates.in_a_row = [*state["skipped_in_a_row"]]


def multiply(gradients: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Scale gradients in place; of sharded gradients, each rank scales its own rows."""
    if any(map(is_sharded, gradients)):
        gradients = [local(gradient) for gradient in gradients]
    torch._foreach_mul_(gradients, factor)
