"""Updates that must not be applied: gradients that are clipped, or not finite."""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from torch import nn

from common.checkpoints.shards import is_sharded, local
from common.errors import TrainingError, UserError

# A healthy fp16 run skips a few updates while its loss scale settles, never so many in a row.
MOST_SKIPS_IN_A_ROW = 25
# Updates after which gradients are looked at, where the log interval is longer: 166 overflows in
# a row halve the loss scale to 0.
MOST_UNCHECKED = 100


class GradientGuard:
    """Clips gradients, and keeps an update with a non-finite gradient from being applied.

    Gradients are scaled in place. For fused optimizers, as the recipes' are, all of it is decided
    on the device, without a synchronisation. Averaged gradients are the same on all ranks, and so
    is the decision.
    """

    def __init__(self, accelerator: Accelerator, max_grad_norm: float, by_layer: bool = False):
        """Clip to a norm, unless it is 0; `by_layer` reads gradients once more, for their norms."""
        self.accelerator = accelerator
        self.max_grad_norm = max_grad_norm
        self.is_fp16 = accelerator.scaler is not None
        self.grad_norm = torch.zeros((), device=accelerator.device)  # of the network clipped first
        self.by_layer, self.layers = by_layer, dict[str, Any]()
        # On a CPU a look at the norm costs nothing, and mostly spares the rest.
        self.looks = accelerator.device.type == "cpu" and not self.is_fp16
        self.skipped = self.skipped_in_a_row = 0
        self.unchecked: list[torch.Tensor] = []
        # Found once for each network: looking costs as much as clipping.
        self.parameters: WeakKeyDictionary[nn.Module, list[nn.Parameter]] = WeakKeyDictionary()
        # By network: which parameters had gradients last, and which were frozen at first.
        self.trained: WeakKeyDictionary[nn.Module, list[int]] = WeakKeyDictionary()
        self.frozen_at_first: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()
        # By optimizer: the hook that removes its mark once it has stepped.
        self.unmarking: WeakKeyDictionary[torch.optim.Optimizer, Any] = WeakKeyDictionary()

    def clip(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Clip the global norm of a network's gradients, and mark an update that is not finite.

        When this returns, the gradients are clipped. Whatever a recipe does to them next is
        applied as it is. Only the decision to skip a non-finite update waits for the optimizer.
        """
        self.accelerator.unscale_gradients(optimizer)
        parameters = self.parameters.get(model)
        if parameters is None:
            parameters = self.parameters[model] = [*model.parameters()]
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        gradients: list[Any] = [parameter.grad for parameter in trained]
        self.watch_unfreezing(model, optimizer, trained)
        norm: Any = nn.utils.get_total_norm(gradients, foreach=True)
        if is_sharded(norm):  # so far, the ranks have parts of it
            norm = norm.full_tensor()
        self.unchecked.append(norm)
        if model is next(iter(self.parameters)):
            self.remember_norms(model, gradients, norm)
        bare: Any = getattr(optimizer, "optimizer", optimizer)
        if not getattr(bare, "_step_supports_amp_scaling", False):
            self.clip_unfused(bare, gradients, norm)
        elif self.looks:
            self.clip_by_looking(bare, gradients, norm)
        else:
            self.clip_on_device(bare, gradients, norm)

    def watch_unfreezing(
        self, model: nn.Module, optimizer: Any, trained: list[nn.Parameter]
    ) -> None:
        """Raise a `UserError` where a parameter was unfrozen that no optimizer updates."""
        identities = [*map(id, trained)]
        if model not in self.trained:
            every = self.parameters[model]
            self.frozen_at_first[model] = {id(p) for p in every if not p.requires_grad}
        elif identities != self.trained[model]:
            wrappers = [*getattr(self.accelerator, "_optimizers", []), optimizer]
            groups = (group for wrapper in wrappers for group in groups_of(wrapper))
            updated = {id(parameter) for group in groups for parameter in group["params"]}
            unfrozen = self.frozen_at_first[model] & {*identities}
            for name, parameter in model.named_parameters():
                if id(parameter) in unfrozen - updated:
                    raise UserError(
                        f"{name.removeprefix('module.')} was unfrozen, but no optimizer that was "
                        "prepared has it: freeze layers only once the optimizer is made (as by "
                        "decay_groups), or add them by optimizer.add_param_group(...) before "
                        "accelerator.prepare"
                    )
        self.trained[model] = identities

    def remember_norms(
        self, model: nn.Module, gradients: list[torch.Tensor], norm: torch.Tensor
    ) -> None:
        """Keep the norm before clipping for the log, and each layer's if it is asked for."""
        self.grad_norm = norm
        if self.by_layer:
            named = self.accelerator.unwrap_model(model).named_parameters()
            names = [name for name, parameter in named if parameter.grad is not None]
            norms: Any = torch._foreach_norm(gradients)
            self.layers = dict(zip(names, norms, strict=True))

    def clip_on_device(self, optimizer: Any, gradients: list[Any], norm: torch.Tensor) -> None:
        """Clip without waiting for the device; a fused optimizer reads there whether to skip."""
        if not self.is_fp16:  # there, `GradScaler` finds out by itself what is not finite
            # Of a norm, never negative, one comparison says what `isfinite` needs four for.
            self.mark(optimizer, norm.lt(math.inf).logical_not_().float())
        if self.max_grad_norm:
            # Exactly 1 where the norm is small enough: such gradients keep their bits.
            multiply(gradients, norm.div(self.max_grad_norm).clamp_(min=1.0).reciprocal_())

    def clip_by_looking(self, optimizer: Any, gradients: list[Any], norm: torch.Tensor) -> None:
        """Clip only where the norm is too large: a look at it costs nothing on a CPU."""
        value = float(norm)
        if not math.isfinite(value):
            self.mark(optimizer, torch.ones_like(norm))
        elif self.max_grad_norm and value > self.max_grad_norm:
            multiply(gradients, self.max_grad_norm / value)

    def clip_unfused(self, optimizer: Any, gradients: list[Any], norm: torch.Tensor) -> None:
        """Clip for an optimizer that can't skip by itself, at the price of a wait."""
        value = float(norm)
        if math.isfinite(value):
            if self.max_grad_norm and value > self.max_grad_norm:
                multiply(gradients, self.max_grad_norm / value)
        elif not self.is_fp16:  # there, `GradScaler` does not call `step`
            drop_gradients_at_next_step(optimizer)

    def mark(self, optimizer: Any, found_inf: torch.Tensor) -> None:
        """Have a fused optimizer skip its next step where `found_inf` is 1.

        A mark that another network of the same optimizer left in this update is kept.
        """
        earlier = getattr(optimizer, "found_inf", None)
        optimizer.found_inf = found_inf if earlier is None else torch.maximum(earlier, found_inf)
        if optimizer not in self.unmarking:
            self.unmarking[optimizer] = optimizer.register_step_post_hook(remove_mark)

    @property
    def is_due(self) -> bool:
        return len(self.unchecked) >= MOST_UNCHECKED

    def count_skipped(self) -> None:
        norms = torch.stack(self.unchecked).tolist() if self.unchecked else []
        self.unchecked.clear()
        for norm in norms:
            skips = not math.isfinite(norm)
            self.skipped += skips
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if skips else 0

    def check(self, global_step: int, loss: float = 0.0) -> None:
        """See that no update was skipped, or in fp16 not so many that its loss scale becomes 0."""
        self.count_skipped()
        if not self.is_fp16 and (self.skipped or math.isnan(loss)):
            what = f"a gradient or the loss was not finite by update {global_step}, not applied"
            advice = "lower --learning-rate or --max-grad-norm, or pass --mixed-precision no"
            raise TrainingError(f"{what}: {advice}; and look for broken samples")
        if (skips := self.skipped_in_a_row) >= MOST_SKIPS_IN_A_ROW:
            what = f"{skips} fp16 updates in a row overflowed by update {global_step}"
            advice = "try --mixed-precision bf16, or a lower --learning-rate"
            raise TrainingError(f"{what} and were not applied: {advice}")

    def figures(self) -> dict[str, float]:
        """Return ``train/`` metrics; after `check`."""
        found = {"train/grad_norm": float(self.grad_norm), "train/skipped_updates": self.skipped}
        if self.is_fp16:
            found["train/loss_scale"] = self.accelerator.scaler.get_scale()
        norms = [norm.full_tensor() if is_sharded(norm) else norm for norm in self.layers.values()]
        squares = defaultdict[str, float](float)
        values = torch.stack(norms).tolist() if norms else []
        for name, norm in zip(self.layers, values, strict=True):
            squares[f"gradients/{name.rpartition('.')[0]}"] += norm**2
        return found | {layer: math.sqrt(square) for layer, square in squares.items()}

    def state_dict(self) -> dict[str, Any]:
        self.count_skipped()
        counts = {"skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row}
        return {"grad_norm": float(self.grad_norm), **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.grad_norm = torch.tensor(state["grad_norm"], device=self.accelerator.device)
        self.skipped, self.skipped_in_a_row = state["skipped"], state["skipped_in_a_row"]


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    return getattr(optimizer, "optimizer", optimizer).param_groups


def multiply(gradients: list[Any], factor: float | torch.Tensor) -> None:
    """Scale gradients in place; of sharded ones, the rows that are here."""
    if any(map(is_sharded, gradients)):
        gradients = [local(gradient) for gradient in gradients]
    torch._foreach_mul_(gradients, factor)


def remove_mark(optimizer: Any, *unused: Any) -> None:
    optimizer.found_inf = None


def drop_gradients_at_next_step(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer's next step find no gradients, which any optimizer passes over."""

    def drop(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        handle.remove()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    handle = optimizer.register_step_pre_hook(drop)
