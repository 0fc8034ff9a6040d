"""Updates that must not be applied, and runs that must not go on."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn

from common.errors import UserError

# A healthy fp16 run skips a few updates while its loss scale settles, never so many in a row.
MOST_SKIPS_IN_A_ROW = 25
COUNTS = ("grad_norm", "skipped", "skipped_in_a_row")


class TrainingError(UserError):
    """Training can't go on; says at which update, why, and what to try."""


class Preempted(SystemExit):
    """The run was asked to stop, and did, with everything saved; status 75 says: try again."""

    def __init__(self, message: str) -> None:
        super().__init__(75)
        self.message = message


class GradientGuard:
    """Clips gradients, and keeps an update with a non-finite gradient from being applied.

    All of it is decided on the device, without a synchronisation: fused optimizers skip an
    update while their ``found_inf`` is 1, as they do for ``GradScaler``. Averaged gradients are
    the same on all ranks, and so is the decision.
    """

    def __init__(self, accelerator: Accelerator, max_grad_norm: float) -> None:
        self.accelerator = accelerator
        self.max_grad_norm = max_grad_norm
        self.grad_norm = torch.zeros((), device=accelerator.device)
        self.skipped = torch.zeros((), device=accelerator.device)
        self.skipped_in_a_row = torch.zeros((), device=accelerator.device)

    def clip(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Clip the global norm of the gradients, and mark the update if they are not finite."""
        self.accelerator.unscale_gradients()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        self.grad_norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        if self.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(
                model.parameters(), self.max_grad_norm, self.grad_norm, foreach=True
            )
        found_inf = self.grad_norm.isfinite().logical_not().float()
        if self.accelerator.scaler is None:
            optimizer.optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        self.skipped += found_inf
        self.skipped_in_a_row = (self.skipped_in_a_row + found_inf) * found_inf

    def check(self, global_step: int, loss: float) -> int:
        """Return how many updates were skipped so far; called at the log interval.

        Raises:
            TrainingError: when an update was skipped that fp16's loss scale does not explain.
        """
        skipped = int(self.skipped)
        fp16 = self.accelerator.scaler is not None
        if (skipped and not fp16) or loss != loss:
            raise TrainingError(
                f"a gradient or the loss was not finite by update {global_step}; that update was "
                "not applied. Try a lower --learning-rate, a lower --max-grad-norm, or "
                "--mixed-precision no; and look for broken samples"
            )
        if int(self.skipped_in_a_row) >= MOST_SKIPS_IN_A_ROW:
            raise TrainingError(
                f"{int(self.skipped_in_a_row)} fp16 updates in a row overflowed by update "
                f"{global_step} and were not applied. Try --mixed-precision bf16, or a lower "
                "--learning-rate"
            )
        return skipped

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint needs to go on with these counts."""
        return {f"guard.{name}": getattr(self, name) for name in COUNTS}

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Go on with the counts of a checkpoint."""
        for name in COUNTS:
            setattr(self, name, tensors[f"guard.{name}"].to(self.accelerator.device))


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error says that another rank is gone: what a restart mends."""
    words = ("gloo", "NCCL", "peer", "Timed out", "timed out")
    return isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )
