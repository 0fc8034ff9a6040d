"""What this machine can do at most: matrix products, convolutions, memory.

A model's own roof is the time of its matrix products or convolutions alone, forward and backward,
at their own shapes and in the precision of the arithmetic, on tensors that are ready; a training
step does the same products and everything else besides.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from benchmarks.harness.isolation import default_device, synchronize
from common.training.accelerator import cpu_has_bf16

MATRIX_SIZE = 2048
COPY_BYTES = 256 * 2**20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def seconds_of(work: Callable[[], object], calls: int) -> float:
    """Return the time of `calls` calls, in seconds."""
    synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize()
    return time.perf_counter() - began


def seconds_per_call(work: Callable[[], object], least_seconds: float = 0.5) -> float:
    """Return the mean time of a call, after warming up, over `least_seconds` or more."""
    seconds_of(work, 2)
    calls = 1
    while (seconds := seconds_of(work, calls)) < least_seconds:
        calls = max(calls + 1, int(1.2 * calls * least_seconds / max(seconds, 1e-9)))
    return seconds / calls


def matrix_rate(dtype: torch.dtype) -> float:
    """Return the rate of a large matrix product, in FLOP/s."""
    shape = (MATRIX_SIZE, MATRIX_SIZE)
    left, right = (torch.randn(shape, device=default_device()).to(dtype) for _ in range(2))
    return 2 * MATRIX_SIZE**3 / seconds_per_call(lambda: left @ right)


def copy_rate() -> float:
    """Return the memory bandwidth of a large copy, in bytes/s read and written."""
    source = torch.ones(COPY_BYTES // 4, device=default_device())
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds_per_call(lambda: target.copy_(source))


def linear_products(
    sizes: Sequence[int], batch_size: int, dtype: torch.dtype
) -> Callable[[], None]:
    """Return a function that does one step's matrix products of a multilayer perceptron.

    Args:
        sizes: the features of the input and of each layer's output.
    """

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=default_device()).to(dtype)

    layers = [
        (random(batch_size, width_in), random(width_out, width_in), random(batch_size, width_out))
        for width_in, width_out in itertools.pairwise(sizes)
    ]

    def step() -> None:
        for features, weight, _ in layers:
            nn.functional.linear(features, weight)
        for index, (features, weight, gradient) in enumerate(layers):
            gradient.t() @ features
            if index > 0:  # nobody asks for the gradient of the data
                gradient @ weight

    return step


def convolution_products(
    model: nn.Module,
    input_shape: Sequence[int],
    dtype: torch.dtype,
    memory_format: torch.memory_format,
) -> Callable[[], None]:
    """Return a function that does one step's convolutions of `model`, forward and backward.

    Args:
        input_shape: of the model: [batch, channels, height, width].
    """
    device = default_device()
    layers: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, nn.Conv2d]] = []

    def note(layer: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        assert isinstance(layer, nn.Conv2d)
        tensors = (
            torch.randn(tensor.shape, device=device).to(dtype, memory_format=memory_format)
            for tensor in (inputs[0], layer.weight, output)
        )
        layers.append((*tensors, layer))  # type: ignore[arg-type]

    model = model.to(device)
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    hooks = [layer.register_forward_hook(note) for layer in convolutions]
    with torch.no_grad():
        model(torch.randn(tuple(input_shape), device=device))
    for hook in hooks:
        hook.remove()

    def step() -> None:
        for features, weight, _, layer in layers:
            nn.functional.conv2d(features, weight, None, layer.stride, layer.padding)
        for index, (features, weight, gradient, layer) in enumerate(layers):
            torch.ops.aten.convolution_backward(
                gradient,
                features,
                weight,
                None,
                layer.stride,
                layer.padding,
                layer.dilation,
                False,
                [0, 0],
                layer.groups,
                [index > 0, True, False],  # gradients of input, weight and bias
            )

    return step


def measure_machine() -> dict[str, float]:
    """Return the machine's rates, by name with unit; none of what it emulates."""
    offered = {"bf16": torch.cuda.is_available() or cpu_has_bf16()}
    offered["fp16"] = torch.cuda.is_available()
    precisions = ["fp32", *(name for name, is_offered in offered.items() if is_offered)]
    rates = {
        f"matrix product {name}, GFLOP/s": matrix_rate(DTYPES[name]) / 1e9 for name in precisions
    }
    return rates | {"memory copy, GB/s": copy_rate() / 1e9}
