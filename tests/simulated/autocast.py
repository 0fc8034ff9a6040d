"""Autocast on the simulated device: which operations run in the lower precision, and which in fp32.

torch has such lists for the devices that it knows, and a backend registers its own. These are
torch's common lists, as far as recipes use their operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from tests.simulated.kernels import DEVICE, LIBRARIES

KEYS = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("AutocastPrivateUse1"))
IN_LOWER_PRECISION = (
    "addbmm",
    "addmm",
    "addmv",
    "addr",
    "baddbmm",
    "bmm",
    "mm",
    "mv",
    "matmul",
    "linear",
    "_convolution",
    "conv1d",
    "conv2d",
    "conv3d",
    "convolution",
    "prelu",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "scaled_dot_product_attention",
)
IN_FP32 = (
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "softplus",
    "logsumexp",
    "dist",
    "cdist",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
    "group_norm",
    "cosine_similarity",
    "nll_loss",
    "nll_loss2d",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "binary_cross_entropy_with_logits",
    "hinge_embedding_loss",
    "soft_margin_loss",
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "sum",
    "sum.dim_IntList",
)
LOW = (torch.float16, torch.bfloat16)


def operation_named(name: str) -> torch._ops.OpOverload:
    """Return one of torch's operations by its name and overload."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def register() -> None:
    """Register the casts of arguments before these operations."""
    everything_else = torch.library.Library("_", "IMPL")
    everything_else.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    library = torch.library.Library("aten", "IMPL")
    for name in IN_LOWER_PRECISION:
        library.impl(name, in_lower_precision(operation_named(name)), "AutocastPrivateUse1")
    for name in IN_FP32:
        library.impl(name, in_fp32(operation_named(name)), "AutocastPrivateUse1")
    LIBRARIES.extend([everything_else, library])


def in_lower_precision(operation: torch._ops.OpOverload) -> Any:
    """Return the operation, run in the precision that autocast asks for."""

    def call(*arguments: Any, **options: Any) -> Any:
        dtype = torch.get_autocast_dtype(DEVICE)

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            is_ours = tensor.device.type == DEVICE
            return tensor.to(dtype) if is_ours and tensor.is_floating_point() else tensor

        with torch._C._ExcludeDispatchKeyGuard(KEYS):
            arguments = tree_map_only(torch.Tensor, cast, arguments)
            options = tree_map_only(torch.Tensor, cast, options)
            return operation(*arguments, **options)

    return call


def in_fp32(operation: torch._ops.OpOverload) -> Any:
    """Return the operation, run in fp32."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.device.type == DEVICE and tensor.dtype in LOW else tensor

    def call(*arguments: Any, **options: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(KEYS):
            arguments = tree_map_only(torch.Tensor, cast, arguments)
            options = tree_map_only(torch.Tensor, cast, options)
            return operation(*arguments, **options)

    return call
