"""Models larger than a device: FSDP2 where the launcher asks for FSDP, on GPUs and on CPUs alike.

Accelerate 1.15 shards on GPUs alone, and says nothing of it on a CPU. Here it is asked for DDP,
and what it prepares is sharded by torch's `fully_shard` instead: layer by layer, so that a device
holds the whole weights of one layer at a time, and else its own rows. Not tried on a GPU yet.
"""

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from common.checkpoints.shards import is_sharded
from common.errors import UserError

# All that a launcher may ask for, as it does by default and recipes do it; and names of layers.
DONE = {
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_SHARDING_STRATEGY": "full_shard",
    "FSDP_AUTO_WRAP_POLICY": "transformer_based_wrap",
    "FSDP_STATE_DICT_TYPE": "sharded_state_dict",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_BACKWARD_PREFETCH": "",
    "FSDP_IGNORED_MODULES": "",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "false",
}
INSTEAD = {
    "FSDP_VERSION": "set fsdp_version: 2",
    "FSDP_ACTIVATION_CHECKPOINTING": "leave it out, and pass --gradient-checkpointing",
}
NAMED = "FSDP_TRANSFORMER_CLS_TO_WRAP"


def takes_fsdp() -> bool:
    """Whether the launcher asks for FSDP, which Accelerate is then not to hear of."""
    asked = os.environ.pop("ACCELERATE_USE_FSDP", "false").lower() == "true"
    for name, done in DONE.items() if asked else ():
        if (value := os.environ.get(name, done).lower()) != done:
            said = f"{name.lower().removeprefix('accelerate_')}: {value}"
            advice = INSTEAD.get(name, "leave it out")
            raise UserError(f"the launcher asks for {said}, which recipes don't do: {advice}")
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
        if self.mesh is None:
            return super().prepare_model(model, device_placement, evaluation_mode)
        model = super().prepare_model(model, False, True)
        if model not in self.skeletons:
            for tensor in tensors_of(model):  # no shards of channels-last ones yet
                tensor.data = tensor.data.contiguous()
                torch.distributed.broadcast(tensor.data, 0)  # as DDP does
            self.shard(model)
        return model

    def shard(self, model: nn.Module) -> None:
        """Shard each layer by itself, then the rest; of parameters that are rows, nothing moves."""
        from torch.distributed.fsdp import fully_shard

        before: dict[str, Any] = dict(model.named_parameters())
        if not before:
            return
        meta: Any = {
            id(t): torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors_of(model)
        }
        meta |= {id(p): nn.Parameter(meta[id(p)], p.requires_grad) for p in before.values()}
        self.skeletons[model] = copy.deepcopy(model, {**meta})
        rows = [(m._parameters, name, p) for m, name, p in registered(model) if is_sharded(p)]
        for parameters, name, parameter in rows:
            parameters[name] = meta[id(parameter)]
        for layer in layers_of(model):
            fully_shard(layer, **self.how)
        fully_shard(model, **self.how)
        for parameters, name, parameter in rows:
            parameters[name] = parameter
        for name, parameter in model.named_parameters():
            self.replaced[before[name]] = parameter
        kind: Any = type(model)
        kind.__deepcopy__ = lambda module, memo: self.twin(module)
        refuse_other_weights(model)

    def twin(self, model: nn.Module) -> nn.Module:
        """Return a copy of a sharded network, with rows of its own, that is sharded once called.

        Until then it can be changed as any network: an average begins with it, and LoRA merges it.
        """
        if model not in self.skeletons:
            raise UserError("a part of a network in shards can't be copied: copy the whole")

        def first(module: Any, *args: Any, **named: Any) -> Any:
            del module.forward
            self.shard(module)
            return module(*args, **named)

        skeleton = self.skeletons[model]
        pairs = zip(tensors_of(skeleton), tensors_of(model), strict=True)
        own: Any = {id(one): t.detach().clone() for one, t in pairs}
        own |= {id(p): nn.Parameter(own[id(p)], p.requires_grad) for p in skeleton.parameters()}
        copied: Any = copy.deepcopy(skeleton, own)
        copied.forward = MethodType(first, copied)
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


def layers_of(model: nn.Module) -> Sequence[nn.Module]:
    """Return the layers that the launcher names by class, else the outermost of `ModuleList`s.

    These are transformers' blocks and a ResNet's stages. Inner ones come first.
    """
    names = os.environ.get(NAMED)
    if not names:
        return [*outermost(model)]
    inner = [*model.modules()][:0:-1]
    if named := [layer for layer in inner if type(layer).__name__ in names.split(",")]:
        return named
    raise UserError(
        f"fsdp_transformer_layer_cls_to_wrap: {names} is no layer of {type(model).__name__}: "
        "leave it out"
    )


def outermost(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from (layer for layer in child if any(True for _ in layer.parameters()))
        else:
            yield from outermost(child)


def refuse_other_weights(model: nn.Module) -> None:
    """Have a call with other weights raise: the shards' own would take their place, unsaid."""
    held = [(m._parameters, name, p) for m, name, p in registered(model)]
    where, names, own = map(list, zip(*held, strict=True))

    def look(*unused: Any) -> None:  # in C: it is for each forward pass
        if not all(map(is_, map(dict.get, where, names), own)):
            raise UserError(
                "a network in shards can't be called with other weights than its own, as by "
                "functional_call: turn their gradients off by requires_grad_(False) instead, or "
                "change a copy.deepcopy of it"
            )

    model.register_forward_pre_hook(look, prepend=True)


def registered(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield each parameter where it is, tied ones as often as they are there."""
    for module in model.modules():
        yield from ((module, name, p) for name, p in module._parameters.items() if p is not None)


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]
