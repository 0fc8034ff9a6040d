"""Notices a loop that trains nothing, leaves gradients, or never changes its learning rate.

A loop may rightly begin without training: in reinforcement learning, the first updates may only
fill a buffer. So after the first update there is mostly a warning, and the error comes at the end.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from common.checkpoints.adapters import bare_optimizer
from common.checkpoints.checksums import local_sums_of_bits
from common.console import warn
from common.errors import UserError
from common.lifecycle.added_gradients import AddedGradients
from common.lifecycle.stages import StartedRun
from common.system.wording import counted
from common.training.gradients.guard import GradientGuard
from common.training.gradients.skipped_steps import parameters_of

TRAINING_ADVICE = (
    "call accelerator.backward(loss), then optimizer.step(), and only then optimizer.zero_grad()"
)


class TrainingWatch:
    """Watches the steps of all optimizers of torch while the loop runs."""

    def __init__(self, guard: GradientGuard) -> None:
        self.guard = guard
        self.step_before_loop: int | None = None  # the update that this process began after
        self.sums_before_loop: list[int] = []  # checksums of the weights before the loop
        self.has_trained = False  # whether an optimizer has made a step that had gradients
        # How many steps each scheduler of `run.plan.schedule` had made before the loop.
        self.scheduler_steps_before_loop: dict[LambdaLR, int] = {}
        self.updates = 0  # of this process
        self.added_gradients = AddedGradients()
        self.updates_with_training = 0  # counted up to 2

    @contextmanager
    def watching(self, started: StartedRun) -> Iterator[None]:
        """Watch the steps of optimizers within the block, which is the loop."""
        self.step_before_loop = started.context.progress.global_step
        self.sums_before_loop = sums_of_weights(started)
        self.scheduler_steps_before_loop = {
            scheduler: scheduler.last_epoch for scheduler in started.plan.schedulers
        }
        handle = register_optimizer_step_post_hook(self.note_step)
        try:
            yield
        finally:
            handle.remove()

    def note_step(self, optimizer: Optimizer, *unused: object) -> None:
        """Note whether a step had gradients; torch calls this after each step of any optimizer.

        A step that skips a non-finite update may have removed them, but the guard has seen them.
        """
        if not self.has_trained:
            has_gradients = any(value.grad is not None for value in parameters_of(optimizer))
            self.has_trained = has_gradients or self.guard.has_seen_gradients

    def check_update(self, started: StartedRun) -> None:
        """Look for mistakes of the loop in its first updates.

        Raises:
            UserError: the loop clips gradients before there are any.
        """
        self.updates += 1
        if self.updates == 1:
            self.check_first_update(started)
        elif self.updates == 2:
            self.check_second_update()
        self.check_schedule()

    def check_first_update(self, started: StartedRun) -> None:
        """Warn if the first update has trained nothing; watch the gradients that it has left."""
        if not self.may_have_trained(started):
            warn(
                "the first update has trained nothing, because no optimizer made a step with "
                f"gradients: unless later updates do, {TRAINING_ADVICE}"
            )
        self.added_gradients.watch(started.context.parts.parameters)

    def check_second_update(self) -> None:
        """Look for gradients that the loop clips too early, or does not remove.

        It is the second update, because a loop may begin with the step of the update before, or
        call `zero_grad` before the backward pass.

        Raises:
            UserError: each call that clips gradients has come before there were any.
        """
        clipped_networks = [*self.guard.networks]
        if clipped_networks and not self.guard.has_seen_gradients:
            raise no_gradient_error(clipped_networks)
        warn_of_added_gradients(self.added_gradients.end())

    def check_schedule(self) -> None:
        """Warn if no scheduler of `run.plan.schedule` has moved by the second trained update.

        It is the second one, because the loop may step schedulers after `run.record`.
        """
        if not self.has_trained or self.updates_with_training == 2:
            return
        self.updates_with_training += 1
        if self.updates_with_training < 2 or not self.scheduler_steps_before_loop:
            return
        if all(
            scheduler.last_epoch == first
            for scheduler, first in self.scheduler_steps_before_loop.items()
        ):
            warn(
                "the scheduler that run.plan.schedule(...) returned makes no steps, so the "
                "learning rate stays as it is: call scheduler.step() after optimizer.step()"
            )

    def require_training(self, started: StartedRun) -> None:
        """Raise a `UserError` if no update of the whole run has trained anything.

        What an earlier process did is not known, so a resumed run always passes.
        """
        has_updates = started.context.progress.global_step > 0
        if self.step_before_loop == 0 and has_updates and not self.may_have_trained(started):
            raise UserError(
                "the run has trained nothing, because no optimizer made a step with gradients",
                advice=f"in the loop, {TRAINING_ADVICE}",
            )

    def may_have_trained(self, started: StartedRun) -> bool:
        """Whether the run has trained something, or may have done so without being noticed.

        The answer is yes in these cases:

        - An optimizer made a step with gradients.
        - The loss scale of fp16 left a step out.
        - Torch does not report the steps of an optimizer, because its class has no step hooks.
        - The weights have changed. A recipe may change them without an optimizer.
        """
        optimizers = started.kept.optimizers.values()
        was_skipped = any(getattr(optimizer, "step_was_skipped", False) for optimizer in optimizers)
        if self.has_trained or was_skipped or not all(map(has_step_hooks, optimizers)):
            return True
        return sums_of_weights(started) != self.sums_before_loop


def sums_of_weights(started: StartedRun) -> list[int]:
    """Return a checksum of each parameter that checkpoints have, or of this rank's part of it."""
    parameters = started.context.parts.parameters.values()
    return local_sums_of_bits(parameters).tolist() if parameters else []


def warn_of_added_gradients(names: Sequence[str]) -> None:
    """Warn of a missing `zero_grad`, if an update has added to the gradients of the one before.

    Args:
        names: the parameters that have these gradients.
    """
    if names:
        warn(
            "the second update has added its gradients to those of the first one, in "
            f"{counted(len(names), 'parameter')} such as {names[0]}: call optimizer.zero_grad() "
            "after optimizer.step(), unless the loop adds gradients up on purpose"
        )


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether torch calls hooks after the optimizer's steps; it may be of any class."""
    step = getattr(type(bare_optimizer(optimizer)), "step", None)
    return getattr(step, "hooked", False)


def no_gradient_error(clipped_networks: Iterable[nn.Module]) -> UserError:
    """Return the error for two updates that have clipped networks without gradients."""
    names = ", ".join(
        dict.fromkeys(type(getattr(net, "module", net)).__name__ for net in clipped_networks)
    )
    return UserError(
        f"in the first two updates, no parameter of {names} had a gradient when it was clipped",
        advice="in the loop, call accelerator.backward(loss), then run.clip_grad_norm_(model, "
        "optimizer), then optimizer.step(), and only then optimizer.zero_grad()",
    )
