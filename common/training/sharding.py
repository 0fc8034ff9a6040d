"""Models larger than a device: FSDP2 where the launcher asks for FSDP, on GPUs and on CPUs alike.

Accelerate 1.15 shards on GPUs alone, and says nothing of it on a CPU. Here it is asked for DDP,
and what it prepares is sharded by torch's `fully_shard` instead: layer by layer, so that a device
holds the whole weights of one layer at a time, and else its own rows. It has not run on a GPU yet.
"""

import copy
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from common.checkpoints.shards import is_sharded
from common.errors import UserError
from common.training.averaging import FreezableDDP, average_gradients

# What a launcher may ask for, as recipes do it: but for the version, as it is where it asks not.
DONE = {
    **dict.fromkeys(("RESHARD_AFTER_FORWARD", "SYNC_MODULE_STATES", "USE_ORIG_PARAMS"), "true"),
    **dict.fromkeys(("FORWARD_PREFETCH", "OFFLOAD_PARAMS", "ACTIVATION_CHECKPOINTING"), "false"),
    **dict.fromkeys(("BACKWARD_PREFETCH", "IGNORED_MODULES", "TRANSFORMER_CLS_TO_WRAP"), ""),
    "VERSION": "2",
    "SHARDING_STRATEGY": "full_shard",
    "STATE_DICT_TYPE": "sharded_state_dict",
    "AUTO_WRAP_POLICY": "transformer_based_wrap",
}


def takes_fsdp() -> bool:
    """Whether the launcher asks for FSDP, which Accelerate is then not to hear of."""
    asked = os.environ.pop("ACCELERATE_USE_FSDP", "false").lower() == "true"
    for name, done in DONE.items() if asked else ():
        if (value := os.environ.get(f"FSDP_{name}", done).lower()) != done:
            advice = f"set it to {done}" if done else "leave it out"
            advice += ", and pass --gradient-checkpointing" if "CHECK" in name else ""
            said = f"fsdp_{name.lower()}: {value}"
            raise UserError(f"the launcher asks for {said}, which recipes don't do: {advice}")
    if asked and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true":
        raise UserError("recipes share a model out over all processes: drop parallelism_config")
    return asked


class ShardingAccelerator(Accelerator):
    """An Accelerator whose networks may be frozen and unfrozen, and shared out over the ranks.

    It shards the networks that it prepares where it has a mesh of ranks.
    """

    mesh: Any = None

    def __init__(self, *args: Any, **named: Any) -> None:
        # Those without a trainable parameter when they were prepared: Accelerate wraps them in
        # nothing, and a recipe may unfreeze them.
        self.frozen_networks: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()
        super().__init__(*args, **named)

    def backward(self, loss: Any, **named: Any) -> None:
        """Compute gradients as ever, and average those that no wrapper averages."""
        super().backward(loss, **named)
        if self.sync_gradients:
            for parameters in self.frozen_networks.values():
                average_gradients(parameters)

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
        if self.mesh is None:
            return self.prepare_whole(model, device_placement, evaluation_mode)
        # Without device placement: a whole model may be larger than the device.
        model = super().prepare_model(model, False, True)
        if model not in self.skeletons:
            self.broadcast_from_rank_zero(model)
            self.shard(model)
        return model

    def broadcast_from_rank_zero(self, model: nn.Module) -> None:
        """Give all ranks rank 0's weights and buffers, as DDP does.

        NCCL takes tensors of the device only. The model may still be on the host, where it stays:
        one tensor at a time goes to the device and back.
        """
        for tensor in tensors_of(model):
            if is_sharded(tensor):  # by an earlier `prepare`
                continue
            on_device = tensor.data.to(self.device).contiguous()
            torch.distributed.broadcast(on_device, 0)
            # FSDP2 has no shards of channels-last tensors yet.
            tensor.data = tensor.data.contiguous()
            tensor.data.copy_(on_device)

    def prepare_whole(
        self, model: nn.Module, device_placement: bool | None, evaluation_mode: bool
    ) -> Any:
        """Prepare a network that each rank has whole, so that its gradients are averaged."""
        is_frozen = not any(parameter.requires_grad for parameter in model.parameters())
        # On a CPU, Accelerate 1.15 wraps also where DDP refuses: without a trainable parameter.
        prepared = super().prepare_model(model, device_placement, evaluation_mode or is_frozen)
        if isinstance(prepared, DistributedDataParallel):
            FreezableDDP.adopt(prepared, self.ddp_handler)
        elif self.num_processes > 1 and not evaluation_mode:
            self.frozen_networks[prepared] = [*prepared.parameters()]
        return prepared

    def shard(self, model: nn.Module) -> None:
        """Shard each layer by itself, then the rest; of parameters that are rows, nothing moves."""
        from torch.distributed.fsdp import fully_shard

        before: dict[str, Any] = dict(model.named_parameters())
        if not before:
            model.to(self.device)  # its buffers, which `fully_shard` would move
            return
        bare = (torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors_of(model))
        meta = memo(model, bare)
        self.skeletons[model] = copy.deepcopy(model, {**meta})
        rows = [one for one in registered(model) if is_sharded(one[2])]
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
        """Return a copy of a sharded network, open to changes, as LoRA's, until it is called."""
        if model not in self.skeletons:
            raise UserError("a part of a network in shards can't be copied: copy the whole")

        def first(module: Any, *args: Any, **named: Any) -> Any:
            del module.forward
            self.shard(module)
            return module(*args, **named)

        skeleton, own = self.skeletons[model], (t.detach().clone() for t in tensors_of(model))
        copied: Any = copy.deepcopy(skeleton, memo(skeleton, own))
        copied.forward = MethodType(first, copied)
        return copied.train(model.training)

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Leave gradients where they are made, for the micro-batch that ends the update."""
        if self.mesh is not None:
            model.set_requires_gradient_sync(False)
        with super().no_sync(model):  # nothing, of shards
            yield
        if self.mesh is not None:
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
    where, names, own = map(list, zip(*registered(model), strict=True))

    def look(*unused: Any) -> None:  # in C: it is for each forward pass
        if not all(map(is_, map(dict.get, where, names), own)):
            raise UserError(
                "a network in shards can't be called with other weights than its own, as by "
                "functional_call: turn their gradients off by requires_grad_(False) instead, or "
                "change a copy.deepcopy of it"
            )

    model.register_forward_pre_hook(look, prepend=True)


def registered(model: nn.Module) -> list[tuple[Any, str, Any]]:
    """Return each parameter where it is, tied ones as often as they are there."""
    places: list[Any] = [module._parameters for module in model.modules()]
    return [(at, name, p) for at in places for name, p in at.items() if p is not None]


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def memo(model: nn.Module, values: Iterable[torch.Tensor]) -> dict[int, Any]:
    """Return for `copy.deepcopy` of a model what takes the places of its tensors."""
    return {
        id(t): nn.Parameter(value, t.requires_grad) if isinstance(t, nn.Parameter) else value
        for t, value in zip(tensors_of(model), values, strict=True)
    }
