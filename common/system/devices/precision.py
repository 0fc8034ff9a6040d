"""The types of numbers that a device computes with: float64, bf16, fp16, TF32."""

import warnings

import torch

from common.system.devices.backend import optional_function
from common.system.devices.trials import UNSUPPORTED_ERRORS, tried_once


@tried_once
def has_float64(device: torch.device) -> bool:
    """Whether float64 tensors can be made and added up on `device`."""
    try:
        total = torch.ones(2, device=device).sum(dtype=torch.float64)
        return float(total + torch.zeros((), dtype=torch.float64, device=device)) == 2.0
    except UNSUPPORTED_ERRORS:
        return False


@tried_once
def has_autocast(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a matrix product under autocast to `dtype` (fp16 or bf16) really runs in `dtype`.

    The result is false for bf16 on a device that reports that it only emulates bf16.
    """
    if dtype is torch.bfloat16 and not has_native_bf16(device):
        return False
    try:
        with warnings.catch_warnings():
            # Where autocast lacks `dtype`, torch warns, and computes in fp32.
            warnings.simplefilter("ignore")
            matrix = torch.ones((8, 8), device=device)
            with torch.autocast(device.type, dtype=dtype):
                return (matrix @ matrix).dtype == dtype
    except UNSUPPORTED_ERRORS:
        return False


def has_native_bf16(device: torch.device) -> bool:
    """Whether a device computes in bf16 without emulation; true if its backend does not say."""
    is_supported = optional_function(device, "is_bf16_supported")
    if is_supported is None:
        return True
    try:
        return bool(is_supported(including_emulation=False))
    except TypeError:  # the function of another backend may lack this argument
        return bool(is_supported())


def has_tf32(device: torch.device) -> bool:
    """Whether fp32 matrix products on `device` can run in TF32."""
    is_supported = optional_function(device, "is_tf32_supported")
    return is_supported is not None and bool(is_supported())
