"""Updates that must not be applied: gradients that are clipped, or not finite."""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from torch import nn

from common.checkpoints.shards import is_sharded
from common.errors import TrainingError

# A healthy fp16 run skips a few updates while its loss scale settles, never so many in a row.
MOST_SKIPS_IN_A_ROW = 25
# Updates after which gradients are looked at, where the log interval is longer: 166 overflows in
# a row halve the loss scale to 0.
MOST_UNCHECKED = 100
LARGEST = torch.finfo(torch.float32).max  # a finite norm is no larger


class GradientGuard:
    """Clips gradients, and keeps an update with a non-finite gradient from being applied.

    All of it is decided on the device, without a synchronisation, for fused optimizers; the
    recipes' are. Averaged gradients are the same on all ranks, and so is the decision.
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

    def clip(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Clip the global norm of a network's gradients, and mark an update that is not finite."""
        self.accelerator.unscale_gradients(optimizer)
        if (parameters := self.parameters.get(model)) is None:
            parameters = self.parameters[model] = [*model.parameters()]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm: Any = nn.utils.get_total_norm(gradients, foreach=True)
        if is_sharded(norm):  # so far, the ranks have parts of it
            norm = norm.full_tensor()
        self.unchecked.append(norm)
        if model is next(iter(self.parameters)):
            self.grad_norm = norm
            if self.by_layer:
                named = self.accelerator.unwrap_model(model).named_parameters()
                names = [name for name, parameter in named if parameter.grad is not None]
                norms: Any = torch._foreach_norm(gradients)
                self.layers = dict(zip(names, norms, strict=True))
        bare: Any = getattr(optimizer, "optimizer", optimizer)
        if not getattr(bare, "_step_supports_amp_scaling", False):  # at the price of a wait
            if not norm.isfinite():
                for parameter in parameters:
                    parameter.grad = None  # which any optimizer passes over
            elif self.max_grad_norm:
                nn.utils.clip_grads_with_norm_(parameters, self.max_grad_norm, norm, foreach=True)
        elif self.looks and float(norm) <= (self.max_grad_norm or LARGEST):
            bare.found_inf = bare.grad_scale = None
        else:
            # A fused optimizer skips what is not finite, and divides by `grad_scale` as it reads
            # the gradients: as it does for `GradScaler`, which finds by itself what is not finite.
            if not self.is_fp16:
                # Of a norm, never negative, one comparison says what `isfinite` needs four for.
                bare.found_inf = norm.lt(math.inf).logical_not_().float()
            if self.max_grad_norm:
                bare.grad_scale = (norm / self.max_grad_norm).clamp_(min=1.0)

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
