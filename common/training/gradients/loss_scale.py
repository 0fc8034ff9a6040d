"""The loss scale of fp16, for any number of optimizers and any device."""

import torch
from torch.amp.grad_scaler import OptState

from common.system.devices import has_float64


class SharedScaler(torch.amp.GradScaler):
    """fp16's loss scale for several optimizers: it changes once all of them have stepped.

    Accelerate calls `update` after each optimizer's step. That would reset the state of the others:
    their gradients, which clipping has unscaled, would be divided by the scale again.
    """

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Change the scale, but only in the call that follows the last optimizer's step.

        Accelerate never passes `new_scale`, which is only here because torch's method has it.
        """
        stages = [state["stage"] for state in self._per_optimizer_states.values()]
        if all(stage is OptState.STEPPED for stage in stages):
            super().update(new_scale)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, also on a device without float64.

        Torch inverts the scale in float64. Without float64, the scale is inverted in fp32. The
        result is the same, because the scale is a power of two.

        Raises:
            RuntimeError: the gradients of this update were unscaled already.
        """
        scale = self._scale
        # If the scale is not a tensor, no loss was scaled yet. Torch's method handles this case.
        if not isinstance(scale, torch.Tensor) or has_float64(scale.device):
            super().unscale_(optimizer)
            return
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            raise RuntimeError("gradients are unscaled once for each update, and before the step")
        overflow = torch.zeros((), dtype=torch.float32, device=scale.device)
        state["found_inf_per_device"] = self._unscale_grads_(
            optimizer, scale.reciprocal(), overflow, False
        )
        state["stage"] = OptState.UNSCALED
