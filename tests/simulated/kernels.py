"""Kernels of the simulated device: each one runs the CPU's kernel on the device's memory."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from tests.simulated import memory, streams

aten = torch.ops.aten
DEVICE = "simulated"
USED: Counter[str] = Counter()  # kernels that ran, by name
LIBRARIES: list[torch.library.Library] = []  # a kernel is registered while its library lives
# These may take tensors of the host together with those of the device.
TAKE_HOST_TENSORS = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
FUSED = ("aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_fused_adagrad_")


class OwnGenerator:
    """The device's random numbers, which do not come from the CPU's generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def call(self, operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call one of the CPU's random kernels, and let it draw from the device's generator."""
        of_host = torch.default_generator.get_state()
        torch.default_generator.set_state(self.generator.get_state())
        try:
            return operation(*arguments, **options)
        finally:
            self.generator.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(of_host)


GENERATOR = OwnGenerator()


@dataclass(frozen=True)
class Traits:
    """The facts of an operation's schema that a call needs."""

    name: str
    is_view: bool  # whether it only returns an alias of its first argument
    is_random: bool
    written: tuple[str | None, ...]  # for each returned value, the argument that it is
    outs: tuple[str, ...]  # keyword arguments that it writes its result to
    argument_names: tuple[str, ...]
    tensor_names: frozenset[str]  # arguments that are single tensors


@functools.cache
def traits_of(operation: torch._ops.OpOverload) -> Traits:
    """Read an operation's schema."""
    schema = operation._schema
    written_sets: dict[str, str] = {}
    is_view = False
    for argument in schema.arguments:
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            for name in alias.before_set:
                written_sets[name] = argument.name
        elif alias is not None:
            is_view = True
    written: list[str | None] = []
    for value in schema.returns:
        names = value.alias_info.before_set if value.alias_info is not None else ()
        written.append(next((written_sets[name] for name in names if name in written_sets), None))
    return Traits(
        name=schema.name,
        is_view=is_view and not written_sets,
        is_random=torch.Tag.nondeterministic_seeded in operation.tags,
        written=tuple(written),
        outs=tuple(argument.name for argument in schema.arguments if argument.is_out),
        argument_names=tuple(argument.name for argument in schema.arguments),
        tensor_names=frozenset(
            argument.name for argument in schema.arguments if str(argument.type) == "Tensor"
        ),
    )


def is_number(value: object) -> bool:
    """Whether a value is a number of Python's."""
    return isinstance(value, (bool, int, float))


def is_ours(value: object) -> bool:
    """Whether a value is a tensor of the device."""
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE


def run_on_host(operation: torch._ops.OpOverload, *arguments: Any, **options: Any) -> Any:
    """Run an operation by the CPU's kernel. All operations without a kernel below use this one.

    Raises:
        TypeError: the operation makes a tensor of a dtype that the device lacks.
        RuntimeError: tensors of the host are among the arguments.
    """
    traits = traits_of(operation)
    USED[traits.name] += 1
    if traits.is_view:
        return memory.view(operation, *arguments, **options)
    streams.current_stream().run()
    if traits.name == "aten::_local_scalar_dense":
        wait_for_stream("item")
    outs = {name: options[name] for name in traits.outs if name in options}
    lent_arguments = lend_arguments(traits, arguments, has_outs=bool(outs))
    lent_options = lend_options(traits, options, outs)
    call = functools.partial(GENERATOR.call, operation) if traits.is_random else operation
    returned = call(*lent_arguments, **lent_options)
    for name, out in outs.items():
        write_out(out, lent_options[name])
    return returned_values(traits, returned, arguments, options)


def lend(traits: Traits, values: Any) -> Any:
    """Replace the device's tensors by tensors of the host that have the same memory.

    Raises:
        RuntimeError: one of the tensors is already the host's.
    """
    takes_host_tensors = traits.name in TAKE_HOST_TENSORS

    def lend_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if is_ours(tensor):
            return memory.on_host(tensor)
        if tensor.dim() and not takes_host_tensors:
            raise RuntimeError(
                f"{traits.name} got tensors of the simulated device and of the {tensor.device}: "
                "expected all tensors to be on the same device"
            )
        return tensor

    return tree_map_only(torch.Tensor, lend_tensor, values)


def lend_arguments(traits: Traits, arguments: tuple[Any, ...], *, has_outs: bool) -> Any:
    """Return the positional arguments for the CPU's kernel."""
    lent_arguments = lend(traits, arguments)
    if not has_outs:
        return lent_arguments
    # Torch gives numbers instead of tensors, and its variants with `out` take tensors.
    return tuple(
        torch.tensor(value) if name in traits.tensor_names and is_number(value) else value
        for name, value in zip(traits.argument_names, lent_arguments, strict=False)
    )


def lend_options(
    traits: Traits, options: dict[str, Any], outs: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Return the named arguments for the CPU's kernel.

    Raises:
        RuntimeError: one of them is a generator of the CPU.
    """
    lent_options = lend(traits, options)
    for name, out in outs.items():  # whose memory may have another size
        lent_options[name] = torch.empty(0, dtype=out.dtype)
    if "device" in lent_options:
        lent_options["device"] = torch.device("cpu")
        lent_options.pop("pin_memory", None)
    if lent_options.get("generator") is not None:
        raise RuntimeError("Expected a 'simulated' generator but found a 'cpu' one")
    return lent_options


def returned_values(
    traits: Traits, returned: Any, arguments: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Return what the operation returns on the device: new tensors, or arguments it wrote to."""
    if not traits.written:
        return None
    named = {**dict(zip(traits.argument_names, arguments, strict=False)), **options}
    single = len(traits.written) == 1
    values = [
        tree_map_only(torch.Tensor, memory.on_device, value) if name is None else named[name]
        for name, value in zip(traits.written, [returned] if single else returned, strict=True)
    ]
    return values[0] if single else tuple(values)


def write_out(out: torch.Tensor, values: torch.Tensor) -> None:
    """Put the result of the CPU's kernel into a tensor of the device, which takes its shape."""
    if out.shape == values.shape:
        memory.on_host(out).copy_(values)
    else:
        memory.resize(out, memory.on_device(values))


def wait_for_stream(reason: str) -> None:
    """Let the host wait for the current stream."""
    streams.WAITS[reason] += 1
    streams.current_stream().finish()


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> Any:
    """Copy between the host and the device, or on the device."""
    USED["aten::_copy_from"] += 1
    memory.refuse(source.dtype if is_ours(source) else target.dtype)
    if is_ours(source) and is_ours(target):
        streams.current_stream().run()
        memory.on_host(target).copy_(memory.on_host(source))
    elif is_ours(target):
        upload(source, target, non_blocking)
    else:
        streams.current_stream().run()
        if non_blocking:
            streams.add(streams.Download(source, target))
        else:
            wait_for_stream("download")
            target.copy_(memory.on_host(source))
    return target


def upload(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
    """Copy from the host to the device."""
    if non_blocking:
        streams.add(streams.Upload(source, target))
    else:
        wait_for_stream("upload")
        memory.on_host(target).copy_(source)


def to_copy(
    tensor: torch.Tensor,
    *,
    dtype: Any = None,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
    **_: Any,
) -> torch.Tensor:
    """Return a copy of another dtype, or on another device.

    torch's own kernel copies to the host through pinned memory, which this device does not have.
    """
    layout = memory_format or torch.preserve_format
    strides = torch.empty_like(memory.on_host(tensor), memory_format=layout).stride()
    copy = torch.empty_strided(
        tensor.size(), strides, dtype=dtype or tensor.dtype, device=device or tensor.device
    )
    return copy.copy_(tensor, non_blocking)


def copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Copy between devices, and let the target take the source's shape."""
    if not is_ours(target):
        return target.resize_(source.shape).copy_(memory.on_host(source))
    write_out(target, source if not is_ours(source) else memory.on_host(source))
    return target


def empty(size: list[int], *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Any:
    """Make a tensor with uninitialised values."""
    dtype = dtype or torch.get_default_dtype()
    memory.refuse(dtype)
    format_ = memory_format or torch.contiguous_format
    return memory.on_device(torch.empty(size, dtype=dtype, memory_format=format_))


def empty_strided(size: list[int], stride: list[int], *, dtype: Any = None, **_: Any) -> Any:
    """Make a tensor with given strides and uninitialised values."""
    dtype = dtype or torch.get_default_dtype()
    memory.refuse(dtype)
    return memory.on_device(torch.empty_strided(size, stride, dtype=dtype))


def record_stream(tensor: torch.Tensor, stream: Any) -> None:
    """Do nothing: a late copy keeps its memory, so nothing else can use it meanwhile."""


def resize_(tensor: torch.Tensor, size: list[int], *, memory_format: Any = None) -> torch.Tensor:
    """Change a tensor's shape and keep the values that fit."""
    if tensor.shape != torch.Size(size):
        values = memory.on_host(tensor).clone().resize_(size)
        memory.resize(tensor, memory.on_device(values))
    return tensor


def set_storage(tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Let a tensor show another storage."""
    names = "source_Storage_storage_offset" if len(arguments) > 1 else "source_Storage"
    getattr(aten.set_, names).redispatch(memory.CPU_KERNELS, tensor, *arguments)
    return tensor


def convolution(*arguments: Any) -> torch.Tensor:
    """Convolve. For a device like this one, torch calls an operation of another name."""
    return run_on_host(aten.convolution.default, *arguments)


def convolution_backward(
    gradient: torch.Tensor,
    values: torch.Tensor,
    weight: torch.Tensor,
    *options: Any,
) -> Any:
    """Return the gradients of a convolution."""
    *geometry, mask = options
    no_bias = None
    arguments = (gradient, values, weight, no_bias, *geometry, mask)
    operation = aten.convolution_backward.default
    if mask[2]:
        arguments = (gradient, values, weight, [weight.shape[0]], *geometry, mask)
    return run_on_host(operation, *arguments)


def may_share_data(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether ``tensor.data = other`` may move a parameter between this device and the host."""
    return {tensor.device.type, other.device.type} <= {DEVICE, "cpu"}


def register(fused: str) -> None:
    """Register the kernels.

    Args:
        fused: whether fused optimizers honour ``grad_scale`` and ``found_inf`` ("honoured"),
            take them and do nothing with them ("ignored"), or do not exist ("none").
    """
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(run_on_host, "PrivateUse1")
    of_aten = torch.library.Library("aten", "IMPL")
    kernels: dict[str, Callable[..., Any]] = {
        "empty.memory_format": empty,
        "empty_strided": empty_strided,
        "_to_copy": to_copy,
        "_copy_from": copy_from,
        "_copy_from_and_resize": copy_from_and_resize,
        "_has_compatible_shallow_copy_type": may_share_data,
        "record_stream": record_stream,
        "resize_": resize_,
        "set_.source_Storage": set_storage,
        "set_.source_Storage_storage_offset": set_storage,
        "convolution_overrideable": convolution,
        "convolution_backward_overrideable": convolution_backward,
    }
    for name, kernel in kernels.items():
        of_aten.impl(name, kernel, "PrivateUse1")
    for operation in fused_operations():
        if fused != "honoured":
            kernel = functools.partial(without_scaling, operation, fused)
            name = operation._schema.name.removeprefix("aten::")
            overload = operation._overloadname
            name = name if overload == "default" else f"{name}.{overload}"
            of_aten.impl(name, kernel, "PrivateUse1")
    LIBRARIES.extend([everything, of_aten])


def fused_operations() -> Iterable[torch._ops.OpOverload]:
    """Yield torch's fused optimizers."""
    for name in FUSED:
        packet = getattr(aten, name.removeprefix("aten::"), None)
        for overload in packet.overloads() if packet is not None else ():
            if "out" not in overload:
                yield getattr(packet, overload)


def without_scaling(
    operation: torch._ops.OpOverload, fused: str, *arguments: Any, **options: Any
) -> Any:
    """Run a fused optimizer that knows nothing of fp16's scaling, as those of Apple's MPS did."""
    if fused == "none":
        raise NotImplementedError(
            f"The operator '{operation._schema.name}' is not currently implemented for the "
            "simulated device"
        )
    options.update(grad_scale=None, found_inf=None)
    return run_on_host(operation, *arguments, **options)
