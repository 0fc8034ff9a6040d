"""Measures this machine's limits: matrix products, convolutions, memory.

A model's roof is the speed of its matrix products or convolutions alone, forward and backward, at
their own shapes and in the precision of the training, on tensors that are ready. A training step
does the same products and much besides.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.harness.isolation import default_device, synchronize
from benchmarks.harness.precisions import DTYPES
from common.training.precision import cpu_has_bf16

MATRIX_SIZE = 2048
COPY_BYTES = 256 * 2**20


def seconds_of(work: Callable[[], object], calls: int) -> float:
    """Return the seconds of `calls` calls together."""
    synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize()
    return time.perf_counter() - began


def seconds_per_call(work: Callable[[], object], least_seconds: float = 0.5) -> float:
    """Return the mean seconds of a call, over `least_seconds` or more after warming up."""
    seconds_of(work, 2)
    calls = 1
    seconds = seconds_of(work, calls)
    while seconds < least_seconds:
        # Aim a fifth above the calls that should be enough.
        calls = max(calls + 1, int(1.2 * calls * least_seconds / max(seconds, 1e-9)))
        seconds = seconds_of(work, calls)
    return seconds / calls


def matrix_rate(dtype: torch.dtype) -> float:
    """Return the rate of a large matrix product, in FLOP/s."""
    shape = (MATRIX_SIZE, MATRIX_SIZE)
    left, right = (torch.randn(shape, device=default_device()).to(dtype) for _ in range(2))
    return 2 * MATRIX_SIZE**3 / seconds_per_call(lambda: left @ right)


def copy_rate() -> float:
    """Return the memory bandwidth of a large copy, in bytes/s; both reads and writes count."""
    source = torch.ones(COPY_BYTES // 4, device=default_device())
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds_per_call(lambda: target.copy_(source))


def linear_products(
    sizes: Sequence[int], batch_size: int, dtype: torch.dtype
) -> Callable[[], None]:
    """Return a function that does the matrix products of one step of a multilayer perceptron.

    Args:
        sizes: number of features of the input and of each layer's output.
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
            if index > 0:  # training does not need the gradient of the data
                gradient @ weight

    return step


def convolution_products(
    model: nn.Module,
    input_shape: Sequence[int],
    dtype: torch.dtype,
    memory_format: torch.memory_format,
) -> Callable[[], None]:
    """Return a function that does the convolutions of one step of `model`, forward and backward.

    Args:
        input_shape: of the model: [batch, channels, height, width].
    """
    convolutions = convolutions_of(model, input_shape, dtype, memory_format)

    def step() -> None:
        for convolution in convolutions:
            convolution.forward()
        for index, convolution in enumerate(convolutions):
            # Training does not need the gradient of the data.
            convolution.backward(needs_input_gradient=index > 0)

    return step


@dataclass(frozen=True)
class Convolution:
    """A convolution and random tensors of the shapes that it has in a training step."""

    layer: nn.Conv2d
    features: torch.Tensor
    weight: torch.Tensor
    gradient: torch.Tensor  # of the output

    def forward(self) -> None:
        """Do the convolution of the forward pass."""
        nn.functional.conv2d(
            self.features, self.weight, None, self.layer.stride, self.layer.padding
        )

    def backward(self, needs_input_gradient: bool) -> None:
        """Do the convolutions of the backward pass."""
        layer = self.layer
        torch.ops.aten.convolution_backward(
            self.gradient,
            self.features,
            self.weight,
            None,
            layer.stride,
            layer.padding,
            layer.dilation,
            False,
            [0, 0],
            layer.groups,
            [needs_input_gradient, True, False],  # gradients of input, weight and bias
        )


def convolutions_of(
    model: nn.Module,
    input_shape: Sequence[int],
    dtype: torch.dtype,
    memory_format: torch.memory_format,
) -> list[Convolution]:
    """Return the convolutions of a model, in the order of its forward pass."""
    device = default_device()
    convolutions: list[Convolution] = []

    def random_like(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, device=device).to(dtype, memory_format=memory_format)

    def hook(layer: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        assert isinstance(layer, nn.Conv2d)
        convolutions.append(
            Convolution(
                layer, random_like(inputs[0]), random_like(layer.weight), random_like(output)
            )
        )

    model = model.to(device)
    handles = [
        layer.register_forward_hook(hook)
        for layer in model.modules()
        if isinstance(layer, nn.Conv2d)
    ]
    with torch.no_grad():
        model(torch.randn(tuple(input_shape), device=device))
    for handle in handles:
        handle.remove()
    return convolutions


def measure_machine() -> dict[str, float]:
    """Return the machine's rates, by name with unit; emulated precisions are left out."""
    precisions = ["fp32"]
    if torch.cuda.is_available() or cpu_has_bf16():
        precisions.append("bf16")
    if torch.cuda.is_available():
        precisions.append("fp16")
    rates = {
        f"matrix product {name}, GFLOP/s": matrix_rate(DTYPES[name]) / 1e9 for name in precisions
    }
    return rates | {"memory copy, GB/s": copy_rate() / 1e9}
