"""How a device applies optimizer updates under a loss scale: its operations and fused kernels."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch.optim import Optimizer

from common.system.devices.selection import indexed
from common.system.devices.trials import UNSUPPORTED_ERRORS, tried_once

# Options of an optimizer by name, such as ("lr", 0.1). They are hashable, so that they can be a key
# under which the result of a trial is remembered.
Options = tuple[tuple[str, object], ...]


class FusedOptimizer(Optimizer):
    """A type for annotations: it declares attributes of fused optimizers that `Optimizer` lacks."""

    grad_scale: torch.Tensor | None  # the step divides gradients by it
    found_inf: torch.Tensor | None  # 1 if the step must change nothing
    _step_supports_amp_scaling: bool  # whether the step obeys `grad_scale` and `found_inf`


class TrialStep(NamedTuple):
    """One optimizer step of a trial."""

    gradient: float
    grad_scale: float


@tried_once
def has_loss_scaling(device: torch.device) -> bool:
    """Whether `device` can unscale fp16 gradients and adapt the loss scale."""
    try:
        gradient = torch.full((2,), 8.0, device=device)
        overflow = torch.zeros((), device=device)
        scale = torch.full((), 4.0, device=device)
        tracker = torch.zeros((), dtype=torch.int32, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_([gradient], overflow, scale.reciprocal())
        torch._amp_update_scale_(scale, tracker, overflow, 2.0, 0.5, 1)
        # The gradient 8 was divided by the scale 4. Then the scale was doubled, because one step
        # had no overflow.
        return float(gradient[0]) == 2.0 and float(scale) == 8.0 and float(overflow) == 0.0
    except UNSUPPORTED_ERRORS:
        return False


def honours_scaling(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether a fused step of this optimizer on `device` obeys `grad_scale` and `found_inf`.

    A fused step that ignores them would apply updates that must be skipped. The trial uses a small
    parameter of its own, and runs once for each class of optimizer, device and set of options. An
    option that is a tensor keeps its default in the trial.
    """
    optimizer_class = cast("Callable[..., FusedOptimizer]", type(optimizer))
    accepted = inspect.signature(optimizer_class).parameters
    options = tuple(
        (name, value)
        for name, value in sorted(optimizer.param_groups[0].items())
        if name in accepted and isinstance(value, (bool, float, int, str, tuple))
    )
    return fused_step_honours_scaling(optimizer_class, indexed(device), options)


@tried_once
def fused_step_honours_scaling(
    optimizer_class: Callable[..., FusedOptimizer], device: torch.device, options: Options
) -> bool:
    """Whether fused steps with `found_inf` change nothing, and steps with `grad_scale` unscale.

    Scaled gradients must have the effect of the same gradients divided by their scales.
    """
    initial_value = 1.0
    fused_options = {**dict(options), "fused": True, "lr": 0.5}
    fused_options.pop("foreach", None)  # torch does not allow both
    unscaled_steps = [TrialStep(1.0, 1.0), TrialStep(0.5, 1.0)]
    # The scales differ, because Adam's steps stay the same if one scale multiplies all gradients.
    scaled_steps = [TrialStep(1.0, 1.0), TrialStep(4.0, 8.0)]
    try:
        after_skipped = after_fused_steps(
            optimizer_class, device, fused_options, unscaled_steps, found_inf=1.0
        )
        after_scaled = after_fused_steps(
            optimizer_class, device, fused_options, scaled_steps, found_inf=0.0
        )
        after_unscaled = after_fused_steps(
            optimizer_class, device, fused_options, unscaled_steps, found_inf=0.0
        )
    except UNSUPPORTED_ERRORS:
        return False
    obeys_found_inf = after_skipped == initial_value and after_unscaled != initial_value
    obeys_grad_scale = math.isclose(after_scaled, after_unscaled, rel_tol=1e-5)
    return obeys_found_inf and obeys_grad_scale


def after_fused_steps(
    optimizer_class: Callable[..., FusedOptimizer],
    device: torch.device,
    options: Mapping[str, object],
    steps: Sequence[TrialStep],
    found_inf: float,
) -> float:
    """Return the value that a parameter of 1 has after some steps.

    Args:
        options: the options of the optimizer, by name.
        found_inf: 1 if the steps must change nothing, else 0.
    """
    parameter = torch.nn.Parameter(torch.ones(2, device=device))
    optimizer = optimizer_class([parameter], **options)
    for trial_step in steps:
        parameter.grad = torch.full_like(parameter, trial_step.gradient)
        optimizer.grad_scale = torch.full((), trial_step.grad_scale, device=device)
        optimizer.found_inf = torch.full((), found_inf, device=device)
        optimizer.step()
    return float(parameter.detach()[0])
