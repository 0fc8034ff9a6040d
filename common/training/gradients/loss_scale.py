"""The loss scale of fp16, for any number of optimizers and any device."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from common.checkpoints.shards import local
from common.errors import UserError
from common.system.devices import has_float64


class SharedScaler(torch.amp.GradScaler):
    """fp16's loss scale for several optimizers: it changes once all of them have stepped.

    Accelerate calls `update` after each optimizer's step. That would reset the state of the others:
    their gradients, which clipping has unscaled, would be divided by the scale again.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # The optimizers whose gradients were unscaled since the scale last changed.
        self.unscaled_optimizers: list[torch.optim.Optimizer] = []

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Change the scale, but only in the call that follows the last optimizer's step.

        Accelerate never passes `new_scale`, which is only here because torch's method has it.
        """
        stages = [state["stage"] for state in self._per_optimizer_states.values()]
        if all(stage is OptState.STEPPED for stage in stages):
            super().update(new_scale)
            self.unscaled_optimizers.clear()

    def scale(self, outputs: Any) -> Any:
        """Scale a loss; all gradients that the backward pass adds to are scaled as well.

        A network may have optimizers that step in turn, each after a backward pass of its own. The
        one that steps later was unscaled with the first one.
        """
        self.scale_waiting_gradients()
        return super().scale(outputs)

    def skip_together(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Have optimizers skip their next steps if the gradients of any of them overflowed.

        Their gradients must be unscaled. Nothing waits for the device.
        """
        states = [self._per_optimizer_states[id(optimizer)] for optimizer in optimizers]
        overflows: list[torch.Tensor] = []
        for state in states:
            overflows += state["found_inf_per_device"].values()
        if overflows:  # there are none if no parameter has a gradient
            overflow = torch.stack(overflows).amax()
            for state in states:
                state["found_inf_per_device"] = {overflow.device: overflow}

    def scale_waiting_gradients(self) -> None:
        """Scale the gradients of optimizers again that were unscaled but made no step.

        The next backward pass may add scaled gradients to them. If other optimizers have stepped,
        the scale changes now, because `update` has waited for these.
        """
        if not self.unscaled_optimizers:
            return
        waiting_optimizers = [
            optimizer
            for optimizer in self.unscaled_optimizers
            if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED
        ]
        self.unscaled_optimizers.clear()
        for optimizer in waiting_optimizers:
            del self._per_optimizer_states[id(optimizer)]
        if self._per_optimizer_states:
            self.update()
        if self._scale is not None:
            scale_gradients(waiting_optimizers, self._scale)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, also on a device without float64.

        A second call for the same update does nothing. Torch inverts the scale in float64. Without
        float64, the scale is inverted in fp32. The result is the same, because the scale is a power
        of two.

        Raises:
            UserError: the optimizer has made its step since a loss was scaled, or none was yet.
        """
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise late_unscaling_error()
        if state["stage"] is OptState.UNSCALED:
            return
        scale = self._scale
        if not isinstance(scale, torch.Tensor):  # the first backward pass makes it a tensor
            raise no_backward_error()
        self.unscaled_optimizers.append(optimizer)
        if has_float64(scale.device):
            super().unscale_(optimizer)
            return
        overflow = torch.zeros((), dtype=torch.float32, device=scale.device)
        state["found_inf_per_device"] = self._unscale_grads_(
            optimizer, scale.reciprocal(), overflow, False
        )
        state["stage"] = OptState.UNSCALED


def scale_gradients(optimizers: Iterable[torch.optim.Optimizer], scale: torch.Tensor) -> None:
    """Multiply all gradients of some optimizers by the loss scale, in place."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    local(parameter.grad).mul_(scale)


def late_unscaling_error() -> UserError:
    """Return the error for gradients that are clipped after a step with them."""
    return UserError(
        "in fp16, the gradients of an optimizer are clipped after its step",
        advice=(
            "call run.clip_grad_norm_ once for each network, between accelerator.backward(loss) "
            "and the first optimizer.step()"
        ),
    )


def no_backward_error() -> UserError:
    """Return the error for gradients that are unscaled before any backward pass."""
    return UserError(
        "in fp16, gradients are clipped or a step is made before any backward pass",
        advice="call accelerator.backward(loss) first, and not loss.backward()",
    )
