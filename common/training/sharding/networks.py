"""Models larger than one device: networks whose weights are shared out over ranks, by FSDP2.

Torch's `fully_shard` shards a network layer by layer, on GPUs and on CPUs: a device holds the whole
weights of one layer at a time, and otherwise only its own rows of each weight.
`common.training.sharding.accelerator` shards the networks that a recipe prepares.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from operator import is_
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.weak import WeakIdKeyDictionary

from common.checkpoints.shards import is_sharded
from common.errors import UserError
from common.system.devices import FusedOptimizer


class Sharder:
    """Shards networks over all ranks, and copies networks that it has sharded."""

    def __init__(self, mesh: DeviceMesh, device: torch.device, precision: MixedPrecisionPolicy):
        """Note how networks will be sharded.

        Args:
            mesh: the mesh of all ranks.
            device: the device of this rank.
            precision: the dtypes of sharded networks in computation and in communication.
        """
        self.mesh = mesh
        self.device = device
        self.precision = precision
        # The sharded parameter that replaced each original parameter, which is found by identity.
        self.sharded_parameters: MutableMapping[nn.Parameter, nn.Parameter] = WeakIdKeyDictionary()
        # A copy of each network on the meta device: its structure, without weights and shards.
        self.skeletons: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()

    def distribute(self, model: nn.Module) -> None:
        """Shard a network with the weights of rank 0, in place; do nothing if it is sharded."""
        if model not in self.skeletons:
            self.broadcast_from_rank_zero(model)
            self.shard(model)

    def broadcast_from_rank_zero(self, model: nn.Module) -> None:
        """Give all ranks rank 0's weights and buffers, as DDP does, in the default layout.

        NCCL takes only tensors that are on the device. The model may still be on the host, so one
        tensor at a time is copied to the device and back.
        """
        for tensor in tensors_of(model):
            if is_sharded(tensor):  # an earlier `prepare` gave its values to all ranks
                continue
            on_device = tensor.data.to(self.device).contiguous()
            torch.distributed.broadcast(on_device, 0)
            # FSDP2 can't shard channels-last tensors yet, so each tensor gets the default layout.
            tensor.data = tensor.data.contiguous()
            tensor.data.copy_(on_device)

    def shard(self, model: nn.Module) -> None:
        """Shard each layer separately, then the rest of the network, in place.

        Parameters of a copied network may be sharded already (see `copy_sharded`). `fully_shard`
        must not see them. So parameters on the meta device take their places while it works.
        """
        original_parameters = dict(model.named_parameters())
        if not original_parameters:
            model.to(self.device)  # moves the buffers, which `fully_shard` would also do
            return
        empty_tensors = (
            torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for tensor in tensors_of(model)
        )
        meta_tensors = deepcopy_memo(model, empty_tensors)
        # `copy.deepcopy` adds entries to its memo, so it gets a copy of this one.
        self.skeletons[model] = copy.deepcopy(model, dict(meta_tensors))
        with sharded_parameters_replaced(model, meta_tensors):
            for module in (*layers_of(model), model):
                fully_shard(
                    module,
                    mesh=self.mesh,
                    mp_policy=self.precision,
                    reshard_after_forward=True,
                )
        # `give_shards_to` gives these parameters to the optimizers.
        for name, parameter in model.named_parameters():
            self.sharded_parameters[original_parameters[name]] = parameter
        # `fully_shard` gave the network a class whose instances refuse to be copied.
        # `copy.deepcopy` calls the method below.
        model_class: Any = type(model)
        model_class.__deepcopy__ = lambda module, memo: self.copy_sharded(module)
        refuse_other_weights(model)

    def copy_sharded(self, model: nn.Module) -> nn.Module:
        """Return a copy of a sharded network; `copy.deepcopy` of such a network calls this.

        The copy's layers may be changed, for example for LoRA, until the copy is first called. That
        call shards the copy.

        Raises:
            UserError: `model` is only a part of a network.
        """
        if model not in self.skeletons:
            raise UserError(
                "a part of a sharded network can't be copied",
                advice="copy the whole network, as copy.deepcopy(model) does",
            )

        def first_forward(module: nn.Module, *args: object, **kwargs: object) -> object:
            """Shard the copy, then call it; this method serves the copy's first call only."""
            del module.forward  # the method of its class is used from now on
            self.shard(module)
            return module(*args, **kwargs)

        skeleton = self.skeletons[model]
        own_tensors = (tensor.detach().clone() for tensor in tensors_of(model))
        copied: nn.Module = copy.deepcopy(skeleton, deepcopy_memo(skeleton, own_tensors))
        copied.forward = MethodType(first_forward, copied)
        # The skeleton has the modes of the time when the model was sharded.
        for name, module in copied.named_modules():
            module.training = model.get_submodule(name).training
        return copied

    def give_shards_to(self, optimizer: FusedOptimizer) -> None:
        """Give an optimizer the sharded parameters instead of those that it was made with."""
        for group in optimizer.param_groups:
            group["params"] = [self.sharded_parameters.get(p, p) for p in group["params"]]
            if group.get("fused") and not isinstance(optimizer, torch.optim.Adam):
                # torch 2.13 has fused kernels for shards only for Adam and AdamW, a subclass.
                # Without such a kernel, the host decides whether an update is skipped.
                group |= {"fused": False, "foreach": True}
                optimizer._step_supports_amp_scaling = False


def layers_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost layers that have parameters: a transformer's blocks, a ResNet's stages.

    Layers are the members of an `nn.ModuleList`.
    """
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from filter(has_parameters, child)
        else:
            yield from layers_of(child)


def has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def refuse_other_weights(model: nn.Module) -> None:
    """Make a sharded network raise a `UserError` if it is called with weights that are not its own.

    `functional_call` swaps weights, but FSDP2 would silently compute with the network's own
    weights.
    """
    places = parameter_places(model)
    dictionaries = [place.dictionary for place in places]
    names = [place.name for place in places]
    own_parameters = [place.parameter for place in places]

    def require_own_weights(*unused: object) -> None:
        # Every forward pass makes this comparison, so `map` runs it in C.
        current_parameters = map(dict.get, dictionaries, names)
        if not all(map(is_, current_parameters, own_parameters)):
            raise UserError(
                "the network is sharded, and its parameters were replaced, for example by "
                "functional_call",
                advice=(
                    "to stop gradients, call network.requires_grad_(False); to compute with other "
                    "weights, write them into a copy made by copy.deepcopy(network), before you "
                    "call the copy"
                ),
            )

    model.register_forward_pre_hook(require_own_weights, prepend=True)


class ParameterPlace(NamedTuple):
    """A place in a model that holds a parameter; a tied parameter has several places."""

    dictionary: dict[str, nn.Parameter | None]  # the parameters of one module, by name
    name: str
    parameter: nn.Parameter


@contextmanager
def sharded_parameters_replaced(
    model: nn.Module, replacements: Mapping[int, torch.Tensor]
) -> Iterator[None]:
    """Replace the parameters that are sharded already while the block runs.

    Args:
        replacements: the parameters to put in their places, by the `id` of the replaced ones.
    """
    sharded_places = [place for place in parameter_places(model) if is_sharded(place.parameter)]
    for place in sharded_places:
        replacement = replacements[id(place.parameter)]
        assert isinstance(replacement, nn.Parameter)
        place.dictionary[place.name] = replacement
    try:
        yield
    finally:
        put_parameters_back(sharded_places)


def put_parameters_back(places: Iterable[ParameterPlace]) -> None:
    """Put parameters back into their places in a model."""
    for place in places:
        place.dictionary[place.name] = place.parameter


def parameter_places(model: nn.Module) -> list[ParameterPlace]:
    """Return all places in a model that hold a parameter, in the order of its modules."""
    return [
        ParameterPlace(module._parameters, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """Return a model's parameters and then its buffers, each tensor once."""
    return [*model.parameters(), *model.buffers()]


def deepcopy_memo(model: nn.Module, values: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return a memo with which `copy.deepcopy` of a model takes `values` for its tensors.

    Args:
        model: the model to copy.
        values: one tensor for each of `tensors_of(model)`, in the same order.
    """
    memo: dict[int, torch.Tensor] = {}
    for tensor, value in zip(tensors_of(model), values, strict=True):
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
    return memo
