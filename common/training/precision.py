"""The precision in which a run computes: what `auto` takes, and what this device can run."""

import os
import platform

import torch
from accelerate import Accelerator

from common.config import Precision, RequestedPrecision
from common.console import warn
from common.errors import UserError
from common.system.devices import (
    default_device,
    has_autocast,
    has_loss_scaling,
    has_tf32,
    is_accelerator,
)
from common.training.gradients.loss_scale import SharedScaler

# What an error adds about TF32 on a device that can't run it.
TF32_REMARK = " (it needs a GPU such as NVIDIA's since Ampere, 2020)"
# What `auto` chooses, if the device has it, on accelerators whose matrix units are faster in 16
# bits. NVIDIA and AMD: fp16. Intel: bf16, which needs no loss scale; torch's loss scale takes
# float64, which many Intel GPUs lack. Apple is missing here, because its GPUs compute fp16 no
# faster than fp32, and each unfused fp16 update would wait for the GPU.
AUTO_PRECISIONS: dict[str, Precision] = {"cuda": "fp16", "xpu": "bf16"}
LAUNCHER_PRECISION_VARIABLE = "ACCELERATE_MIXED_PRECISION"
# The precision to run in, by the value of `LAUNCHER_PRECISION_VARIABLE` in lower case.
SUPPORTED_OF_LAUNCHER: dict[str, Precision] = {"no": "no", "fp16": "fp16", "bf16": "bf16"}
# The dtype of each 16-bit precision. A run in any other precision has float32 tensors.
SIXTEEN_BIT_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def choose_precision(
    requested: RequestedPrecision, use_cpu: bool, is_resumed: bool = False
) -> Precision:
    """Return the precision to run in.

    Args:
        requested: the value of `--mixed-precision`. ``auto`` takes the launcher's precision, or the
            best of this device if the launcher names none.
        use_cpu: whether the CPU trains. It does if there is no accelerator.
        is_resumed: whether a run is resumed. Its precision can't change, so the advice of an error
            differs.

    Raises:
        UserError: the device can't run this precision, or the launcher names a precision that
            recipes lack.
    """
    best = best_precision(use_cpu)
    if requested == "auto":
        launcher_precision = launchers_precision()
        precision = best if launcher_precision == "no" else launcher_precision
    else:
        precision = requested
    if not is_offered(precision, use_cpu):
        setting = "--mixed-precision" if requested != "auto" else "the launcher's mixed_precision"
        is_on_cpu = use_cpu or not is_accelerator(default_device())
        device = "a CPU" if is_on_cpu else "this GPU"
        remark = TF32_REMARK if precision == "tf32" else ""
        advice = f"pass --mixed-precision {best}"
        if is_resumed:
            advice = (
                "resume this run on a machine that supports this precision, or start a new run "
                f"with --mixed-precision {best}"
            )
        raise UserError(f"{setting} {precision} can't be used on {device}{remark}", advice=advice)
    return precision


def launchers_precision() -> Precision:
    """Return the precision that the launcher asks for; "no" if it asks for no precision.

    `accelerate launch` also says "no" if nobody has chosen a precision, so "no" is not a request
    for fp32.

    Raises:
        UserError: `LAUNCHER_PRECISION_VARIABLE` names a precision that recipes lack.
    """
    value = os.environ.get(LAUNCHER_PRECISION_VARIABLE) or "no"
    precision = SUPPORTED_OF_LAUNCHER.get(value.lower())
    if precision is None:
        raise UserError(
            f"the environment variable {LAUNCHER_PRECISION_VARIABLE} is {value!r:.50}, which is "
            "not a precision that recipes support",
            advice=(
                "set mixed_precision to no, fp16 or bf16 in the launcher's command or "
                "configuration file, or unset the variable if you set it yourself"
            ),
            every_rank=True,
        )
    return precision


def best_precision(use_cpu: bool) -> Precision:
    """Return the precision that `auto` takes if the launcher names no precision; "no" is fp32."""
    if use_cpu:
        return "bf16" if cpu_has_bf16() else "no"
    precision = AUTO_PRECISIONS.get(default_device().type, "no")
    return precision if is_offered(precision, use_cpu=False) else "no"


def is_offered(precision: Precision, use_cpu: bool) -> bool:
    """Whether a precision can be chosen on this device.

    Torch could run fp16 on a CPU, but slower than fp32, so it is not offered there. Any CPU can run
    bf16; `warn_of_slow_bf16` says if it is slow.
    """
    if precision == "no":
        return True
    device = torch.device("cpu") if use_cpu else default_device()
    if not is_accelerator(device):
        return precision == "bf16"
    if precision == "tf32":
        return has_tf32(device)
    if precision == "bf16":
        return has_autocast(device, torch.bfloat16)
    return has_autocast(device, torch.float16) and has_loss_scaling(device)


def cpu_has_bf16() -> bool:
    """Whether the processor has bf16 matrix instructions (AVX512-BF16 or AMX)."""
    return platform.machine() in ("x86_64", "AMD64") and (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )


def warn_of_slow_bf16(precision: Precision, is_resumed: bool) -> None:
    """Warn that this processor only emulates bf16, if the run computes in bf16.

    Call this only if the CPU trains. A resumed run can't change its precision, so it gets no
    warning.
    """
    if precision == "bf16" and not (cpu_has_bf16() or is_resumed):
        problem = "this processor emulates bf16, which takes many times as long as fp32"
        warn(f"{problem}: pass --mixed-precision no")


def enable_precision(accelerator: Accelerator, precision: Precision, is_device_known: bool) -> None:
    """Turn on 16-bit precisions where Accelerate does not, and give fp16 its loss scale.

    Args:
        precision: the precision that runs; see `choose_precision`.
        is_device_known: whether Accelerate knows the type of the device.
    """
    if precision in SIXTEEN_BIT_DTYPES and not is_device_known:
        # Accelerate refuses these precisions on devices that it does not know.
        accelerator.state._mixed_precision = precision
        accelerator.native_amp = True
    if precision == "fp16":
        # `SharedScaler` takes the place of Accelerate's loss scale. On a CPU, where tests run fp16,
        # Accelerate would have none.
        accelerator.native_amp = True
        accelerator.scaler = SharedScaler(accelerator.device.type)


def set_kernels(precision: Precision, deterministic: bool) -> None:
    """Choose the kernels for a precision, and deterministic ones if requested."""
    # Torch has two interfaces to TF32. Use the older one, because torch's compiler reads it, and
    # raises an error if the newer one was set. cuDNN uses TF32 by default, so turn it off for fp32.
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = not deterministic
    # On Hopper GPUs torch 2.11 prefers cuDNN's attention. Its kernel builds a plan for each batch
    # size and length, which takes half a second each, and texts have many lengths. It also rounds
    # the dropout rate.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if deterministic:
        # cuBLAS repeats its results only with workspaces of a fixed size.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def compute_dtype(accelerator: Accelerator) -> torch.dtype:
    """Return the dtype of the tensors in matrix products; TF32 products take float32 tensors."""
    return SIXTEEN_BIT_DTYPES.get(accelerator.mixed_precision, torch.float32)


def running_precision(accelerator: Accelerator) -> Precision:
    """Return the precision that runs.

    Accelerate calls both TF32 and fp32 "no", so its own answer would not tell them apart.
    """
    is_tf32 = torch.get_float32_matmul_precision() == "high"
    return "tf32" if is_tf32 else accelerator.mixed_precision
