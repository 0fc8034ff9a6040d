"""Models larger than one device: FSDP2 on GPUs and on CPUs, if the launcher asks for FSDP.

Accelerate 1.15 shards on GPUs only, and silently ignores the request on a CPU. So recipes hide the
request from Accelerate, and torch's `fully_shard` shards the networks that Accelerate prepares,
layer by layer: a device holds the whole weights of one layer at a time, and otherwise only its own
rows of each weight.
"""

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from operator import is_
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from common.checkpoints.shards import is_sharded
from common.errors import UserError
from common.system.devices import FusedOptimizer
from common.system.launch_variables import TRUE_WORDS
from common.training.averaging import FreezableDDP, average_gradients
from common.training.precision import SIXTEEN_BIT_DTYPES

if TYPE_CHECKING:  # these imports take a second, and only runs with shards need them
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

# The only supported value of each FSDP setting of a launcher. Recipes also use it if the launcher
# leaves the setting out: without a version they use FSDP2, while Accelerate would use FSDP1.
SUPPORTED_SETTINGS = {
    **dict.fromkeys(("RESHARD_AFTER_FORWARD", "SYNC_MODULE_STATES", "USE_ORIG_PARAMS"), "true"),
    **dict.fromkeys(("FORWARD_PREFETCH", "OFFLOAD_PARAMS", "ACTIVATION_CHECKPOINTING"), "false"),
    **dict.fromkeys(("BACKWARD_PREFETCH", "IGNORED_MODULES", "TRANSFORMER_CLS_TO_WRAP"), ""),
    "VERSION": "2",
    "SHARDING_STRATEGY": "full_shard",
    "STATE_DICT_TYPE": "sharded_state_dict",
    "AUTO_WRAP_POLICY": "transformer_based_wrap",
}


def take_fsdp_request() -> bool:
    """Return whether the launcher asks for FSDP, and hide the request from Accelerate.

    Raises:
        UserError: the launcher asks for a kind of FSDP that recipes do not support.
    """
    is_requested = os.environ.pop("ACCELERATE_USE_FSDP", "false").lower() in TRUE_WORDS
    if not is_requested:
        return False
    for name, supported in SUPPORTED_SETTINGS.items():
        value = os.environ.get(f"FSDP_{name}", supported).lower()
        if value == supported:
            continue
        launcher = "the launcher's configuration"
        advice = (
            f"set it to {supported} in {launcher}" if supported else f"remove it from {launcher}"
        )
        if name == "ACTIVATION_CHECKPOINTING":
            advice += ", and pass --gradient-checkpointing when you start a new run"
        setting = f"fsdp_{name.lower()}={value}"
        raise UserError(
            f"the launcher's setting {setting} is not supported by recipes", advice=advice
        )
    return True


class ShardingAccelerator(Accelerator):
    """An Accelerator that can shard networks over ranks, and train networks that begin frozen.

    It shards the networks that it prepares after a call of `enable_sharding`. It also averages the
    gradients of networks that were wholly frozen when they were prepared, and unfrozen later.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.mesh: DeviceMesh | None = None  # the mesh of all ranks, if networks are sharded
        # The parameters of each network that had no trainable parameter when it was prepared. DDP
        # does not wrap such a network. A recipe may unfreeze it, so `backward` averages its
        # gradients.
        self.frozen_networks: WeakKeyDictionary[nn.Module, list[nn.Parameter]] = WeakKeyDictionary()
        # The dtypes of sharded networks in computation and in communication; None without sharding.
        self.shard_precision: MixedPrecisionPolicy | None = None
        # The sharded parameter that replaced each original parameter, which is found by identity.
        self.sharded_parameters: MutableMapping[nn.Parameter, nn.Parameter] = WeakIdKeyDictionary()
        # A copy of each network on the meta device: its structure, without weights and shards.
        self.skeletons: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
        super().__init__(*args, **kwargs)

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        """Compute gradients, and average those of `frozen_networks`, which DDP leaves out."""
        super().backward(loss, **kwargs)
        if self.sync_gradients:
            for parameters in self.frozen_networks.values():
                average_gradients(parameters)

    def enable_sharding(self, reduce_precision: str) -> None:
        """Make later calls of `prepare` shard their networks over all ranks.

        Nothing is sharded yet.

        Args:
            reduce_precision: the precision in which gradients are summed over ranks: "fp16",
                "bf16", or "no" for fp32.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy

        self.shard_precision = MixedPrecisionPolicy(
            param_dtype=SIXTEEN_BIT_DTYPES.get(self.mixed_precision),
            reduce_dtype=SIXTEEN_BIT_DTYPES.get(reduce_precision, torch.float32),
            cast_forward_inputs=False,  # autocast casts inputs, with or without shards
        )
        self.mesh = init_device_mesh(self.device.type, (self.num_processes,))

    def prepare(self, *args: object, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects as Accelerate does, and give optimizers the sharded parameters.

        Optimizers were made earlier, with the parameters that sharding replaces.

        Returns:
            What Accelerate returns: the one object, or a tuple of several.
        """
        prepared = super().prepare(*args, device_placement=device_placement)
        if self.mesh is None:
            return prepared
        for wrapper in self._optimizers:
            optimizer: FusedOptimizer = wrapper.optimizer
            for group in optimizer.param_groups:
                group["params"] = [self.sharded_parameters.get(p, p) for p in group["params"]]
                if group.get("fused") and not isinstance(optimizer, torch.optim.Adam):
                    # torch 2.13 has fused kernels for shards only for Adam and AdamW, a subclass.
                    # Without such a kernel, the host decides whether an update is skipped.
                    group |= {"fused": False, "foreach": True}
                    optimizer._step_supports_amp_scaling = False
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a network, and shard it if this Accelerator shards."""
        if self.mesh is None:
            return self.prepare_whole(model, device_placement, evaluation_mode)
        # Accelerate must not move the whole model, which may be larger than the device. In
        # evaluation mode, it does not wrap the model in DDP.
        model = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        if model not in self.skeletons:  # not sharded by an earlier call
            self.broadcast_from_rank_zero(model)
            self.shard(model)
        return model

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

    def prepare_whole(
        self, model: nn.Module, device_placement: bool | None, evaluation_mode: bool
    ) -> nn.Module:
        """Prepare a network of which each rank has a whole copy, so that gradients are averaged."""
        is_frozen = not any(parameter.requires_grad for parameter in model.parameters())
        # DDP refuses a network without a trainable parameter, but on a CPU Accelerate 1.15 would
        # wrap such a network all the same. In evaluation mode, Accelerate wraps nothing.
        prepared = super().prepare_model(model, device_placement, evaluation_mode or is_frozen)
        if isinstance(prepared, DistributedDataParallel):
            FreezableDDP.adopt(prepared, self.ddp_handler)  # changes its class in place
        elif self.num_processes > 1 and not evaluation_mode:
            # Accelerate left the network without DDP because it is frozen. `backward` averages its
            # gradients once it is unfrozen.
            self.frozen_networks[prepared] = [*prepared.parameters()]
        return prepared

    def shard(self, model: nn.Module) -> None:
        """Shard each layer separately, then the rest of the network, in place.

        Parameters of a copied network may be sharded already (see `copy_sharded`). `fully_shard`
        must not see them. So parameters on the meta device take their places while it works.
        """
        from torch.distributed.fsdp import fully_shard

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
        assert self.shard_precision is not None  # `enable_sharding` was called
        with sharded_parameters_replaced(model, meta_tensors):
            for module in (*layers_of(model), model):
                fully_shard(
                    module,
                    mesh=self.mesh,
                    mp_policy=self.shard_precision,
                    reshard_after_forward=True,
                )
        # `prepare` gives these parameters to the optimizers.
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

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Return a context in which gradients add up on each rank alone.

        The last micro-batch of an update runs outside of it, and averages the sums over ranks.
        """
        if self.mesh is not None:
            cast("FSDPModule", model).set_requires_gradient_sync(False)
        with super().no_sync(model):  # this does nothing for sharded networks
            yield
        if self.mesh is not None:
            cast("FSDPModule", model).set_requires_gradient_sync(True)

    def structure_of(self, model: nn.Module) -> nn.Module:
        """Return a network whose shapes and counts may be read, but not its values.

        For a sharded network, this is the copy on the meta device, and otherwise `model` itself.
        """
        return self.skeletons[model] if self.mesh is not None else model


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
