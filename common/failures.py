"""Updates that must not be applied, and runs that must not go on."""

from __future__ import annotations

import math
import shlex
import sys
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import nn

from common.errors import LostProcessError, UserError

if TYPE_CHECKING:
    from common.config import TrainingConfig

# A healthy fp16 run skips a few updates while its loss scale settles, never so many in a row.
MOST_SKIPS_IN_A_ROW = 25
# Updates after which gradients are looked at, where the log interval is longer: 166 overflows in
# a row halve the loss scale to 0.
MOST_UNCHECKED = 100
LARGEST = torch.finfo(torch.float32).max  # a finite norm is no larger


class TrainingError(UserError):
    """Training can't go on; says at which update, why, and what to try."""


class Preempted(SystemExit):
    """The run was asked to stop, and did, with everything saved; status 75 says: try again."""

    def __init__(self, message: str) -> None:
        super().__init__(75)
        self.message = message


class GradientGuard:
    """Clips gradients, and keeps an update with a non-finite gradient from being applied.

    All of it is decided on the device, without a synchronisation, for fused optimizers; the
    recipes' are. Averaged gradients are the same on all ranks, and so is the decision.
    """

    def __init__(self, accelerator: Accelerator, max_grad_norm: float) -> None:
        self.accelerator = accelerator
        self.max_grad_norm = max_grad_norm
        self.grad_norm = torch.zeros((), device=accelerator.device)
        # On a CPU a look at the norm costs nothing, and mostly spares the rest.
        self.looks = accelerator.device.type == "cpu" and accelerator.scaler is None
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.unchecked: list[torch.Tensor] = []
        self.parameters: list[nn.Parameter] = []  # found once: looking costs as much as clipping

    def clip(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Clip the global norm of the gradients, and mark the update if they are not finite."""
        self.accelerator.unscale_gradients()
        self.parameters = self.parameters or [*model.parameters()]
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.grad_norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        self.unchecked.append(self.grad_norm)
        bare: Any = optimizer.optimizer  # type: ignore[attr-defined]
        if not getattr(bare, "_step_supports_amp_scaling", False):
            self.clip_by_hand()
        elif self.looks and float(self.grad_norm) <= (self.max_grad_norm or LARGEST):
            bare.found_inf = bare.grad_scale = None
        else:
            self.leave_to(bare)

    def leave_to(self, optimizer: Any) -> None:
        """Let a fused optimizer clip, and skip what is not finite, as it does for `GradScaler`.

        It divides by ``grad_scale`` as it reads the gradients: no pass of its own.
        """
        if self.accelerator.scaler is None:  # which finds out by itself
            # Of a norm, never negative, one comparison says what `isfinite` needs four for.
            optimizer.found_inf = self.grad_norm.lt(math.inf).logical_not_().float()
        if self.max_grad_norm:
            optimizer.grad_scale = (self.grad_norm / self.max_grad_norm).clamp_(min=1.0)

    def clip_by_hand(self) -> None:
        """Do the same for an optimizer that is not fused, at the price of a synchronisation."""
        if not self.grad_norm.isfinite():
            for parameter in self.parameters:
                parameter.grad = None  # which any optimizer passes over
        elif self.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(
                self.parameters, self.max_grad_norm, self.grad_norm, foreach=True
            )

    @property
    def is_due(self) -> bool:
        """Whether `check` must not wait for the log interval."""
        return len(self.unchecked) >= MOST_UNCHECKED

    def count_skipped(self) -> None:
        """Count the updates that were not applied since the last check."""
        if self.unchecked:
            finite = torch.stack(self.unchecked).isfinite().tolist()
            self.unchecked.clear()
            for is_finite in finite:
                self.skipped += not is_finite
                self.skipped_in_a_row = 0 if is_finite else self.skipped_in_a_row + 1

    def check(self, global_step: int, loss: float = 0.0) -> int:
        """Return how many updates were skipped so far; called at the log interval.

        A cap on skips in a row keeps fp16's loss scale from reaching 0, after which the next
        healthy update would write NaN into the weights.

        Raises:
            TrainingError: when an update was skipped that fp16's loss scale does not explain.
        """
        self.count_skipped()
        fp16 = self.accelerator.scaler is not None
        if not fp16 and (self.skipped or loss != loss):
            raise TrainingError(
                f"a gradient or the loss was not finite by update {global_step}; that update was "
                "not applied. Try a lower --learning-rate, a lower --max-grad-norm, or "
                "--mixed-precision no; and look for broken samples"
            )
        if self.skipped_in_a_row >= MOST_SKIPS_IN_A_ROW:
            raise TrainingError(
                f"{self.skipped_in_a_row} fp16 updates in a row overflowed by update "
                f"{global_step} and were not applied. Try --mixed-precision bf16, or a lower "
                "--learning-rate"
            )
        return self.skipped

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint needs to go on with these counts."""
        self.count_skipped()
        counts = [float(self.grad_norm), self.skipped, self.skipped_in_a_row]
        return {"guard": torch.tensor(counts, dtype=torch.float64)}

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Go on with the counts of a checkpoint."""
        grad_norm, skipped, in_a_row = tensors["guard"].tolist()
        self.grad_norm = torch.tensor(grad_norm, device=self.accelerator.device)
        self.skipped, self.skipped_in_a_row = int(skipped), int(in_a_row)


def is_lost_process(error: BaseException) -> bool:
    """Whether an error says that a rank or a loader's worker is gone: what a restart mends."""
    of_ranks = ("gloo", "NCCL", "peer", "Timed out", "timed out")
    of_workers = ("is killed by signal", "exited unexpectedly")  # as DataLoader says it
    return isinstance(error, (LostProcessError, torch.distributed.DistError)) or (
        isinstance(error, RuntimeError)
        and any(word in str(error) for word in (*of_ranks, *of_workers))
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, in any of the wordings of torch and Python."""
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def out_of_memory_advice(config: TrainingConfig, resume: str | None, peak: float) -> str:
    """Return the command that makes the same updates from half the batch.

    Args:
        resume: the run's directory, where it has a checkpoint to go on from.
        peak: memory taken, in MiB.
    """
    said = f"out of memory at batch {config.batch_size}, with a peak of {peak:,.0f} MiB."
    if config.batch_size == 1:
        return f"{said} Try --gradient-checkpointing, or a smaller model or sample"
    words = [sys.argv[0], *(["--resume", resume] if resume else sys.argv[1:])]
    half, twice = config.batch_size // 2, config.gradient_accumulation_steps * 2
    flags = f"--batch-size {half} --gradient-accumulation-steps {twice}"
    same = "The same updates" if config.batch_size % 2 == 0 else "Almost the same updates"
    return f"{said} {same} from half the batch: accelerate launch {shlex.join(words)} {flags}"
