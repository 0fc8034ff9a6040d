"""Models larger than a device: FSDP2 where the launcher asks for FSDP, on GPUs and on CPUs alike.

Accelerate 1.15 shards on GPUs alone, and says nothing of it on a CPU. Here it is asked for DDP,
and what it prepares is sharded by torch's `fully_shard` instead: layer by layer, so that a device
holds the whole weights of one layer at a time, and else its own rows. Not tried on a GPU yet.
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from common.errors import UserError

PLAIN = ("fsdp_offload_params", "fsdp_activation_checkpointing")  # not offered: must be false


def takes_fsdp() -> bool:
    """Whether the launcher asks for FSDP, which Accelerate is then not to hear of."""
    asked = os.environ.pop("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if asked and os.environ.get("FSDP_VERSION") != "2":
        raise UserError("the launcher asks for FSDP's first version: set fsdp_version: 2")
    for name in PLAIN if asked else ():
        if os.environ.get(name.upper(), "false").lower() == "true":
            advice = "use --gradient-checkpointing" if "activation" in name else "leave it out"
            raise UserError(f"the launcher asks for {name}, which recipes don't have: {advice}")
    return asked


class ShardingAccelerator(Accelerator):
    """An Accelerator that shards the networks which it prepares, where it has a mesh of ranks."""

    mesh: Any = None

    def shard_over_ranks(self, reduced: str) -> None:
        """Shard what is prepared from now on; gradients travel as `reduced`, "no" for fp32."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy

        types = {"fp16": torch.float16, "bf16": torch.bfloat16}
        policy = MixedPrecisionPolicy(
            param_dtype=types.get(self.mixed_precision),
            reduce_dtype=types.get(reduced, torch.float32),
            cast_forward_inputs=False,  # autocast sees to it, as without shards
        )
        self.mesh = init_device_mesh(self.device.type, (self.num_processes,))
        self.how = {"mesh": self.mesh, "mp_policy": policy, "reshard_after_forward": True}
        # By parameter as it was: what became of it. By network: itself without weights or shards.
        self.replaced: Any = WeakIdKeyDictionary()
        self.skeletons: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()

    def prepare(self, *args: Any, **named: Any) -> Any:
        """Prepare as ever; an optimizer gets the shards of the parameters that it was made for."""
        prepared = super().prepare(*args, **named)
        for wrapper in self._optimizers if self.mesh is not None else ():
            optimizer: Any = wrapper.optimizer
            for group in optimizer.param_groups:
                group["params"] = [self.replaced.get(p, p) for p in group["params"]]
                if group.get("fused") and not isinstance(optimizer, torch.optim.Adam):
                    # torch 2.13 has no fused kernel for shards but Adam's and AdamW's.
                    group |= {"fused": False, "foreach": True}
                    optimizer._step_supports_amp_scaling = False
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Shard instead of wrapping with DDP."""
        if self.mesh is None or model in self.skeletons:
            return super().prepare_model(model, device_placement, evaluation_mode)
        self.shard(super().prepare_model(model, False, True))
        refuse_other_weights(model)
        return model

    def shard(self, model: nn.Module) -> None:
        """Shard each layer, a child of a `ModuleList`, by itself, then the rest."""
        from torch.distributed.fsdp import fully_shard

        before: dict[str, Any] = dict(model.named_parameters())
        if not before:
            return
        meta: Any = {
            id(t): torch.empty_like(t, device="meta") for t in [*before.values(), *model.buffers()]
        }
        meta |= {id(p): nn.Parameter(meta[id(p)], p.requires_grad) for p in before.values()}
        self.skeletons[model] = copy.deepcopy(model, meta)
        for parameter in before.values():
            parameter.data = parameter.data.contiguous()  # no shards of channels-last ones yet
        for layer in layers_of(model):
            fully_shard(layer, **self.how)
        fully_shard(model, **self.how)
        for name, parameter in model.named_parameters():
            self.replaced[before[name]] = parameter
        kind: Any = type(model)
        kind.__deepcopy__ = lambda module, memo: self.twin(module)

    def twin(self, model: nn.Module) -> nn.Module:
        """Return a copy in shards of a sharded network, such as an average of it begins with."""
        if model not in self.skeletons:
            raise UserError("a part of a network in shards can't be copied: copy the whole")
        copied = copy.deepcopy(self.skeletons[model])
        self.shard(copied)
        copied.to_empty(device=self.device)
        with torch.no_grad():
            for one, other in zip(tensors_of(copied), tensors_of(model), strict=True):
                one.copy_(other)
        refuse_other_weights(copied)
        return copied.train(model.training)

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Leave gradients where they are made, for the micro-batch that ends the update."""
        if self.mesh is None:
            with super().no_sync(model):
                yield
            return
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    def bare(self, model: nn.Module) -> nn.Module:
        """Return a network for what computes no values: on the meta device, where it is sharded."""
        return self.skeletons[model] if self.mesh is not None else model


def layers_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost layers: transformers' blocks, a ResNet's stages."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from (layer for layer in child if any(True for _ in layer.parameters()))
        else:
            yield from layers_of(child)


def refuse_other_weights(model: nn.Module) -> None:
    """Have a call with other weights raise: the shards' own would take their place, unsaid."""

    def registered() -> list[nn.Parameter | None]:
        return [p for module in model.modules() for p in module._parameters.values()]

    own = registered()

    def look(*unused: Any) -> None:
        if any(one is not other for one, other in zip_longest(registered(), own)):
            raise UserError(
                "a network in shards can't be called with other weights than its own, as by "
                "functional_call (turn their gradients off by requires_grad_(False) instead) or "
                "once parametrizations are removed: launch with DDP"
            )

    model.register_forward_pre_hook(look, prepend=True)


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]
