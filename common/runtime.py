"""Build the Accelerator: device, precision that really runs, threads, kernels, process group."""

from __future__ import annotations

import functools
import inspect
import os
import platform
import warnings
from datetime import timedelta
from typing import Any

import accelerate.optimizer
import torch
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    set_seed,
)

from common.config import TrainingConfig
from common.errors import UserError


def build_accelerator(config: TrainingConfig) -> Accelerator:
    """Return an Accelerator set to what is best for the hardware.

    Raises:
        UserError: when the precision asked for can't run here, in arithmetic or in gradients
            that travel, or when the launcher started more processes than can see each other.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    use_cpu = not torch.accelerator.is_available() or asked_for_cpu()
    precision = choose_precision(config.mixed_precision, use_cpu)
    if use_cpu and config.gradient_compression == "bf16":
        raise UserError(
            "gradients can't travel as bf16 between processes on a CPU: pass "
            "--gradient-compression fp16"
        )
    set_kernels(config.deterministic)
    if use_cpu:
        torch.set_num_threads(cpu_threads(local_world_size()))
    # Two look-ups of a package that is not there cost 90 µs in each optimizer step.
    accelerate.optimizer.is_lomo_available = functools.cache(  # type: ignore[attr-defined]
        accelerate.optimizer.is_lomo_available
    )
    # Nor need it find out in each step what arguments this function takes.
    zero_grad: Any = torch.optim.Optimizer.zero_grad
    zero_grad.__signature__ = inspect.signature(zero_grad)
    # Accelerate 1.15 knows the old name only, and torch 2.13 warns of it.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    accelerator = Accelerator(
        cpu=use_cpu,
        mixed_precision=precision,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        # One scheduler step per update on any number of processes, not one per process.
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timedelta(seconds=config.collective_timeout)),
            # Buffers (batch norm's statistics) are averaged at evaluation, not sent every step.
            # No static graph: it gained nothing measurable on two gloo processes, and torch 2.13
            # fails with it where an update's first micro-batch is under `no_sync`.
            DistributedDataParallelKwargs(
                gradient_as_bucket_view=True,
                broadcast_buffers=False,
                comm_hook=DDPCommunicationHookType(config.gradient_compression),
            ),
        ],
    )
    if accelerator.num_processes != world_size:
        raise UserError(
            f"the launcher started {world_size} processes, but each of them sees "
            f"{accelerator.num_processes}: launch with one of accelerate_configs/, such as "
            "multi_cpu.yaml, or with --multi_gpu --num_processes N",
        )
    set_seed(config.seed)
    return accelerator


def asked_for_cpu() -> bool:
    """Whether the launcher asked for the CPU; it says so with a word, also when it did not."""
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on")


def choose_precision(asked: str, use_cpu: bool) -> str:
    """Return the precision that will run: "no" (fp32), "bf16" or "fp16".

    ``auto`` is what the launcher asked for; else fp16 on CUDA, bf16 on a CPU that has bf16
    instructions, and fp32 elsewhere.

    Raises:
        UserError: when fp16 or bf16 is asked for where it would not run, or not pay.
    """
    launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    wanted = launcher if asked == "auto" and launcher in ("fp16", "bf16") else asked
    has_cuda = torch.cuda.is_available() and not use_cpu
    if wanted == "auto":
        return "fp16" if has_cuda else "bf16" if use_cpu and cpu_has_bf16() else "no"
    if wanted == "fp16" and not has_cuda:
        alternative = "bf16" if use_cpu and cpu_has_bf16() else "no"
        raise UserError(
            "fp16 needs a CUDA GPU and there is none here (it would silently run as fp32): "
            f"pass --mixed-precision {alternative}"
        )
    if wanted == "bf16" and has_cuda and not torch.cuda.is_bf16_supported(False):
        raise UserError("this GPU has no bf16 arithmetic: pass --mixed-precision fp16")
    return wanted


def cpu_has_bf16() -> bool:
    """Whether the processor has bf16 matrix instructions (AVX512-BF16 or AMX)."""
    return platform.machine() in ("x86_64", "AMD64") and (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )


def set_kernels(deterministic: bool) -> None:
    """Choose kernels: TF32 and autotuned convolutions, or deterministic ones."""
    if torch.cuda.is_available():
        # The older of torch's two interfaces to TF32: torch's compiler reads it, and raises where
        # the newer one has been written to.
        torch.set_float32_matmul_precision("highest" if deterministic else "high")
        torch.backends.cudnn.allow_tf32 = not deterministic
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def local_world_size() -> int:
    """Return how many processes of this job share this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def usable_cores() -> int:
    """Return how many processor cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_threads(local_processes: int) -> int:
    """Return how many threads one process should use, so that all cores are used once.

    ``accelerate launch`` exports ``OMP_NUM_THREADS=1`` when nothing is set, which would leave
    every core but one idle; any other value is the user's and is kept.
    """
    asked = int(os.environ.get("OMP_NUM_THREADS", "1"))
    return asked if asked > 1 else max(1, usable_cores() // local_processes)
