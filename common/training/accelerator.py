"""Build the Accelerator: device, precision that really runs, threads, kernels, process group."""

import functools
import inspect
import os
import platform
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import accelerate.optimizer
import torch
from accelerate import Accelerator, utils
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.amp.grad_scaler import OptState

from common.config import TrainingConfig
from common.console import warn
from common.devices import (
    default_device,
    has_autocast,
    has_float64,
    has_loss_scaling,
    has_tf32,
    is_accelerator,
)
from common.errors import UserError, outcome_of
from common.files import MOST_WORDS
from common.machine import cpu_threads, local_world_size, name_interface, rank, world_size
from common.measure.memory import limit_memory
from common.training.averaging import ddp_options
from common.training.rendezvous import rendezvous_url
from common.training.sharding import ShardingAccelerator, take_fsdp_request

LAUNCH = (
    "launch with one of accelerate_configs/, such as multi_cpu.yaml, or with "
    "--multi_gpu --num_processes N"
)
# What `accelerate launch` sets for `distributed_type: DEEPSPEED` and the like.
NOT_HONOURED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "tensor or context parallelism",
}
NEEDS = {
    "fp16": "fp16 needs a GPU that has it and there is none here (it would silently run as fp32)",
    "bf16": "this GPU has no bf16 arithmetic",
    "tf32": "tf32 needs a GPU that has it, as NVIDIA's since Ampere (2020)",
}
# `auto` on the accelerators whose matrix units are known to be faster in 16 bits, if they have it:
# NVIDIA's and AMD's (fp16, since Volta), and Intel's (bf16, which needs no loss scale: that of
# torch takes float64, which many of Intel's GPUs lack). Apple's compute fp16 no faster than fp32,
# and unfused updates in fp16 would wait for the GPU each. Of others nothing is known.
AUTO_PRECISIONS = {"cuda": "fp16", "xpu": "bf16"}


@contextmanager
def launching() -> Iterator[None]:
    """Turn what Accelerate and torch raise about the launcher's environment into a sentence."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, RuntimeError) as problem:
        lost, words = outcome_of(problem).resumable, " ".join(str(problem).split())[:MOST_WORDS]
        what = f"the processes that were launched can't begin ({type(problem).__name__}: {words})"
        raise UserError(f"{what}: {LAUNCH}", every_rank=True, resumable=lost) from None


@launching()
def build_accelerator(
    config: TrainingConfig, ddp: Mapping[str, Any] | None = None
) -> ShardingAccelerator:
    """Return what fits the hardware, or say what can't run on it.

    Args:
        config: the flags.
        ddp: options of DistributedDataParallel that the recipe states.

    Raises:
        UserError: where the launcher, a flag or an option asks for what can't run here.
    """
    refuse_launchers_compiler()
    options = ddp_options(ddp or {}, config.gradient_compression)
    if not 0 <= rank() < world_size():
        which = f"this is process {rank()} of {world_size()}, numbered from 0"
        raise UserError(f"by RANK and WORLD_SIZE {which}: {LAUNCH}", every_rank=True)
    refuse_other_launchers()
    # A launcher says so with a word, also when the CPU was not asked for.
    asked_for_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on")
    use_cpu = asked_for_cpu or not torch.accelerator.is_available()
    is_known = use_cpu or name_device_for_accelerate()
    devices, started = torch.accelerator.device_count(), local_world_size()
    if not use_cpu and started > devices:
        counts = f"{started} processes on this machine, which has {devices} GPUs"
        raise UserError(f"the launcher started {counts}: pass it --num_processes {devices}")
    precision = choose_precision(config.mixed_precision, use_cpu, config.resume is not None)
    if use_cpu and config.gradient_compression == "bf16":
        advice = "pass --gradient-compression fp16"
        raise UserError(f"gradients can't travel as bf16 between processes on a CPU: {advice}")
    if precision == "bf16" and use_cpu and not (cpu_has_bf16() or config.resume):
        slow = "this processor emulates bf16, which takes many times as long as fp32"
        warn(f"{slow}: pass --mixed-precision no")
    if use_cpu:
        torch.set_num_threads(cpu_threads(config.num_threads))
        limit_memory()
    # Accelerate asks for these in each update: two look-ups of a package that is not there (90 µs),
    # and a signature that never changes (30 µs).
    stepping: Any = accelerate.optimizer
    stepping.is_lomo_available = functools.cache(utils.is_lomo_available)
    zero_grad: Any = torch.optim.Optimizer.zero_grad
    zero_grad.__signature__ = inspect.signature(zero_grad)
    # Accelerate 1.15 knows the old name only, and torch 2.13 warns of it.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    shards = take_fsdp_request()
    name_interface()
    accelerator = ShardingAccelerator(
        cpu=use_cpu,
        mixed_precision=precision if is_known and precision != "tf32" else "no",
        # One scheduler step per update on any number of processes, not one per process.
        dataloader_config=utils.DataLoaderConfiguration(split_batches=True),
        kwargs_handlers=[
            utils.InitProcessGroupKwargs(
                init_method=rendezvous_url(),
                timeout=timedelta(seconds=config.collective_timeout),
            ),
            options,
        ],
    )
    # Not to its constructor: a variable of the environment would override it.
    accelerator.gradient_accumulation_steps = config.gradient_accumulation_steps
    if accelerator.num_processes != world_size():
        seen = f"but each of them sees {accelerator.num_processes}"
        raise UserError(f"the launcher started {world_size()} processes, {seen}: {LAUNCH}")
    # `accelerate launch` says so with `--cpu` or MULTI_CPU, and starts one process all the same.
    is_lonely = {"ACCELERATE_USE_CPU", "MASTER_ADDR"} <= {*os.environ}
    if is_lonely and "WORLD_SIZE" not in os.environ and accelerator.num_processes == 1:
        asked = "was asked for more (or MASTER_ADDR is set, and should not be)"
        raise UserError(f"the launcher started one process, and {asked}: {LAUNCH}")
    if precision in ("fp16", "bf16") and not is_known:  # Accelerate refuses them there
        accelerator.state._mixed_precision = precision
        accelerator.native_amp = True
    if precision == "fp16":  # which Accelerate would leave out on a CPU, where tests see it run
        accelerator.native_amp, accelerator.scaler = True, SharedScaler(accelerator.device.type)
    set_kernels(precision, config.deterministic)  # after Accelerate, which may turn TF32 on
    if shards and accelerator.num_processes > 1:
        if config.auto_batch_size:
            why = "has each rank try alone, and shards can't"
            raise UserError(f"--auto-batch-size {why}: pass a --batch-size")
        accelerator.shard_over_ranks(config.gradient_compression)
    utils.set_seed(config.seed)
    return accelerator


def name_device_for_accelerate() -> bool:
    """Have Accelerate take this process's accelerator; return whether it knows that kind.

    It knows the kinds that it lists, and would take the CPU in place of another one.
    """
    device = default_device()
    known: Any = PartialState.default_device
    if known.fget(None).type == device.type:
        return True
    os.environ.setdefault("ACCELERATE_TORCH_DEVICE", device.type)
    return False


def note_ranks_of_debug_launcher() -> None:
    """Put the ranks where a launcher puts them: `debug_launcher` tells them to torch alone."""
    if "RANK" not in os.environ and torch.distributed.is_initialized():
        own_rank, processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
        os.environ |= {"RANK": str(own_rank), "LOCAL_RANK": str(own_rank)}
        os.environ |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}


def is_called_by_a_program(recipe_file: str) -> bool:
    """Whether a recipe was imported, as by a notebook, which goes on when the run has ended."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    return script is None or os.path.realpath(script) != os.path.realpath(recipe_file)


def forget_accelerator() -> None:
    """Let another run in this process have an Accelerator of its own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def refuse_launchers_compiler() -> None:
    """Raise a `UserError` where the launcher asks for torch.compile, which is a recipe's flag.

    Accelerate would wrap a network in a compiled one, besides the one that the recipe compiles.
    """
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if backend.lower() not in ("", "no"):
        asked = f"the launcher asks for torch.compile (--dynamo_backend {backend.lower():.50})"
        raise UserError(f"{asked}: leave that out, and pass --compile to the recipe")


def refuse_other_launchers() -> None:
    """Raise a `UserError` where the launcher asks for a way to train that recipes do not have."""
    for variable, setting in NOT_HONOURED.items():
        value = os.environ.get(variable, "")
        if value.lower() in ("1", "true", "yes", "on"):
            asked = f"{variable}={value} asks for {setting}, which recipes do not use"
            raise UserError(f"{asked}: unset it, or launch with one of accelerate_configs/")


class SharedScaler(torch.amp.GradScaler):
    """fp16's loss scale, set anew once all optimizers that were clipped have stepped.

    Accelerate asks for that after the step of each, and a second optimizer's gradients, unscaled
    when they were clipped, would be divided by the scale again.
    """

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        stages = [state["stage"] for state in self._per_optimizer_states.values()]
        if all(stage is OptState.STEPPED for stage in stages):
            super().update(new_scale)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, as torch does on devices with float64.

        Torch inverts the scale in float64. In fp32 the result is the same, because the scale is a
        power of two.
        """
        scale = self._scale
        if not isinstance(scale, torch.Tensor) or has_float64(scale.device):
            super().unscale_(optimizer)
            return
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            raise RuntimeError("gradients are unscaled once for each update, and before the step")
        overflow = torch.zeros((), dtype=torch.float32, device=scale.device)
        state["found_inf_per_device"] = self._unscale_grads_(
            optimizer, scale.reciprocal(), overflow, False
        )
        state["stage"] = OptState.UNSCALED


def compute_dtype(accelerator: Accelerator) -> torch.dtype:
    """Return the type that matrix products run in."""
    types = {"fp16": torch.float16, "bf16": torch.bfloat16}
    return types.get(accelerator.mixed_precision, torch.float32)


def running_precision(accelerator: Accelerator) -> str:
    """Return "no" (fp32), "tf32", which Accelerate takes and shows as "no", "bf16" or "fp16"."""
    is_tf32 = torch.get_float32_matmul_precision() == "high"
    return "tf32" if is_tf32 else accelerator.mixed_precision


def left_out(accelerator: Any, named: Iterable[Any]) -> str | None:
    """Return the kind of what the Accelerator has prepared and is not `named`, if anything."""
    bare = {id(getattr(part, "module", part)) for part in named}
    for part in (*accelerator._models, *accelerator._optimizers, *accelerator._schedulers):
        if id(getattr(part, "module", part)) not in bare:
            return type(getattr(part, "module", getattr(part, "optimizer", part))).__name__
    return None


def choose_precision(asked: str, use_cpu: bool, resumes: bool = False) -> str:
    """Return what will run, "no" (fp32) to "fp16"; ``auto``: the launcher's, or the best here."""
    launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    best = best_precision(use_cpu)
    wanted = asked if asked != "auto" else launcher if launcher in ("fp16", "bf16") else best
    advice = f"pass --mixed-precision {best}"
    if resumes:
        advice = "resume this run where it can, or start another from its model with --init-from"
    if not is_offered(wanted, use_cpu):
        raise UserError(f"{NEEDS[wanted]}: {advice}")
    return wanted


def best_precision(use_cpu: bool) -> str:
    """Return the precision that `auto` takes if the launcher names none."""
    if use_cpu:
        return "bf16" if cpu_has_bf16() else "no"
    precision = AUTO_PRECISIONS.get(default_device().type, "no")
    return precision if is_offered(precision, use_cpu) else "no"


def is_offered(precision: str, use_cpu: bool) -> bool:
    """Whether the device has it; fp16 not on a CPU, where torch has all of it, slower than fp32."""
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


def set_kernels(precision: str, deterministic: bool) -> None:
    """Choose the kernels for a precision, as reproducible ones as asked for."""
    # The older of torch's two interfaces to TF32: torch's compiler reads it, and raises where the
    # newer one has been written to. cuDNN's default is TF32: fp32 has to be asked for.
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = not deterministic
    # On Hopper GPUs torch 2.11 prefers cuDNN's attention. That builds a plan for each batch size
    # and length, half a second each, and texts come in many. It also rounds the dropout rate.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
