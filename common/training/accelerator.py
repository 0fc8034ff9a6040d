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
from common.errors import UserError, is_loss, outcome_of
from common.files import MOST_CHARACTERS
from common.measure.memory import limit_memory
from common.system.devices import (
    USE_CPU_VARIABLE,
    default_device,
    has_autocast,
    has_float64,
    has_loss_scaling,
    has_tf32,
    is_accelerator,
    is_cpu_asked_for,
)
from common.system.machine import (
    FALSE_WORDS,
    TRUE_WORDS,
    cpu_threads,
    local_world_size,
    name_interface,
    rank,
    world_size,
)
from common.training.averaging import ddp_options
from common.training.rendezvous import rendezvous_url
from common.training.sharding import ShardingAccelerator, take_fsdp_request

LAUNCH = (
    "launch with one of accelerate_configs/, such as multi_cpu.yaml, or with "
    "--multi_gpu --num_processes N"
)
# The variables that `accelerate launch` sets for ways to train that recipes do not support.
UNSUPPORTED_LAUNCHERS = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "tensor or context parallelism",
}
# By precision, why a device can't run it.
MISSING_PRECISION = {
    "fp16": (
        "fp16 needs a GPU that supports it, and this machine has none (Accelerate would silently "
        "train in fp32)"
    ),
    "bf16": "this GPU does not support bf16",
    "tf32": (
        "tf32 needs a GPU that supports it, such as NVIDIA's since Ampere (2020), and this machine "
        "has none"
    ),
}
# What `auto` chooses, if the device has it, on accelerators whose matrix units are faster in 16
# bits. NVIDIA and AMD: fp16. Intel: bf16, which needs no loss scale; torch's loss scale takes
# float64, which many Intel GPUs lack. Apple is missing here, because its GPUs compute fp16 no
# faster than fp32, and each unfused fp16 update would wait for the GPU.
AUTO_PRECISIONS = {"cuda": "fp16", "xpu": "bf16"}
# The variables in which Accelerate expects a word for yes or no. It raises an error for others.
YES_OR_NO = (
    USE_CPU_VARIABLE,
    "ACCELERATE_CPU_AFFINITY",
    "ACCELERATE_DEBUG_MODE",
    "ACCELERATE_USE_FSDP",
    "FORK_LAUNCHED",
)
LAUNCHERS_PRECISION = "ACCELERATE_MIXED_PRECISION"


@contextmanager
def launching() -> Iterator[None]:
    """Turn what Accelerate and torch raise about the launcher's environment into a `UserError`."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, RuntimeError) as problem:
        text = " ".join(str(problem).split())[:MOST_CHARACTERS]
        details = f"{type(problem).__name__}: {text}"
        if is_loss(problem):
            raise UserError(
                f"the launched processes could not reach each other ({details})",
                advice="check MASTER_ADDR, MASTER_PORT and the network between the machines",
                every_rank=True,
                resumable=True,  # they may find each other if the job is started again
            ) from None
        raise UserError(
            f"the launched processes can't begin ({details})",
            advice=LAUNCH,
            every_rank=True,
            resumable=outcome_of(problem).resumable,
        ) from None


@launching()
def build_accelerator(
    config: TrainingConfig, ddp: Mapping[str, object] | None = None
) -> ShardingAccelerator:
    """Return the run's Accelerator, set up for this hardware, the launcher and the flags.

    Args:
        config: the flags.
        ddp: options of DistributedDataParallel that the recipe states.

    Raises:
        UserError: the launcher, a flag or an option asks for something that can't run here.
    """
    refuse_malformed_variables()
    refuse_launchers_compiler()
    options = ddp_options(ddp or {}, config.gradient_compression)
    refuse_wrong_rank()
    refuse_other_launchers()
    use_cpu = is_cpu_asked_for() or not torch.accelerator.is_available()
    # Whether Accelerate knows the type of the device; it always knows the CPU.
    is_known_to_accelerate = use_cpu or name_device_for_accelerate()
    if not use_cpu:
        refuse_missing_devices()
    precision = choose_precision(config.mixed_precision, use_cpu, config.resume is not None)
    if use_cpu:
        prepare_cpu(config, precision)
    quicken_updates()
    # Accelerate 1.15 only knows the old name, of which torch 2.13 warns.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    uses_fsdp = take_fsdp_request()
    name_interface()
    process_group = utils.InitProcessGroupKwargs(
        init_method=rendezvous_url(), timeout=timedelta(seconds=config.collective_timeout)
    )
    accelerator = ShardingAccelerator(
        cpu=use_cpu,
        # Accelerate refuses 16 bits on a device that it does not know (see `enable_precision`), and
        # TF32 is no precision of Accelerate's (see `set_kernels`).
        mixed_precision=precision if is_known_to_accelerate and precision != "tf32" else "no",
        # One scheduler step per update on any number of processes, not one per process.
        dataloader_config=utils.DataLoaderConfiguration(split_batches=True),
        kwargs_handlers=[process_group, options],
    )
    # If the constructor got this, a variable of the environment would override it.
    accelerator.gradient_accumulation_steps = config.gradient_accumulation_steps
    refuse_missing_processes(accelerator)
    enable_precision(accelerator, precision, is_known_to_accelerate)
    set_kernels(precision, config.deterministic)  # after Accelerate, which may turn TF32 on
    if uses_fsdp and accelerator.num_processes > 1:
        if config.auto_batch_size:
            raise UserError(
                "--auto-batch-size has each rank try sizes alone, which a sharded model can't",
                advice="leave --auto-batch-size out, and pass --batch-size",
            )
        accelerator.shard_over_ranks(config.gradient_compression)
    utils.set_seed(config.seed)
    return accelerator


def refuse_wrong_rank() -> None:
    """Raise a `UserError` if RANK is not between 0 and WORLD_SIZE - 1."""
    if not 0 <= rank() < world_size():
        position = f"this is process {rank()} of {world_size()}, numbered from 0"
        raise UserError(f"RANK and WORLD_SIZE say that {position}", advice=LAUNCH, every_rank=True)


def refuse_missing_devices() -> None:
    """Raise a `UserError` if this machine has fewer accelerators than processes."""
    devices = torch.accelerator.device_count()
    local_processes = local_world_size()
    if local_processes > devices:
        counts = f"{local_processes} processes on this machine, which has {devices} GPUs"
        raise UserError(
            f"the launcher started {counts}", advice=f"pass it --num_processes {devices}"
        )


def enable_precision(
    accelerator: Accelerator, precision: str, is_known_to_accelerate: bool
) -> None:
    """Turn on 16-bit precisions where Accelerate does not.

    Args:
        precision: the one that runs; see `choose_precision`.
        is_known_to_accelerate: whether Accelerate knows the type of the device.
    """
    if precision in ("fp16", "bf16") and not is_known_to_accelerate:
        # Accelerate refuses these on devices that it does not know.
        accelerator.state._mixed_precision = precision
        accelerator.native_amp = True
    if precision == "fp16":
        # Accelerate would have no loss scale on a CPU, where tests run fp16.
        accelerator.native_amp = True
        accelerator.scaler = SharedScaler(accelerator.device.type)


def prepare_cpu(config: TrainingConfig, precision: str) -> None:
    """Set the threads and the memory limit of a training on a CPU.

    A warning says if bf16 is slow on this processor.

    Raises:
        UserError: gradients are to be compressed to bf16, which gloo can't sum.
    """
    if config.gradient_compression == "bf16":
        advice = "pass --gradient-compression fp16"
        raise UserError("gradients can't travel as bf16 between processes on a CPU", advice=advice)
    # A resumed run can't change its precision, so it gets no such advice.
    if precision == "bf16" and not (cpu_has_bf16() or config.resume):
        problem = "this processor emulates bf16, which takes many times as long as fp32"
        warn(f"{problem}: pass --mixed-precision no")
    torch.set_num_threads(cpu_threads(config.num_threads))
    limit_memory()


def quicken_updates() -> None:
    """Cache two things that Accelerate looks up in each update, which takes 120 µs.

    One is whether the package of the optimizer Lomo is installed (90 µs). The other is the
    signature of `zero_grad` (30 µs), which never changes.
    """
    optimizer_module: Any = accelerate.optimizer
    optimizer_module.is_lomo_available = functools.cache(utils.is_lomo_available)
    zero_grad: Any = torch.optim.Optimizer.zero_grad
    # `inspect.signature` works the signature out only if a function has no such attribute.
    zero_grad.__signature__ = inspect.signature(zero_grad)


def refuse_missing_processes(accelerator: Accelerator) -> None:
    """Raise a `UserError` if the processes of this job do not train together."""
    if accelerator.num_processes != world_size():
        problem = f"but each of them sees {accelerator.num_processes}"
        raise UserError(f"the launcher started {world_size()} processes, {problem}", advice=LAUNCH)
    # For `--cpu` or MULTI_CPU, `accelerate launch` sets these variables for several processes, but
    # starts only one.
    expects_more = {"ACCELERATE_USE_CPU", "MASTER_ADDR"} <= {*os.environ}
    if expects_more and "WORLD_SIZE" not in os.environ and accelerator.num_processes == 1:
        problem = "was asked for more (or MASTER_ADDR is set, and should not be)"
        raise UserError(f"the launcher started one process, and {problem}", advice=LAUNCH)


def name_device_for_accelerate() -> bool:
    """Have Accelerate use this process's accelerator; return whether Accelerate knows its type.

    In place of a type that it does not know, Accelerate would use the CPU.
    """
    device = default_device()
    accelerate_default: Any = PartialState.default_device  # a property that ignores its instance
    if accelerate_default.fget(None).type == device.type:
        return True
    os.environ.setdefault("ACCELERATE_TORCH_DEVICE", device.type)
    return False


def note_ranks_of_debug_launcher() -> None:
    """Set RANK and similar variables under Accelerate's `debug_launcher`.

    It tells only torch the rank, but recipes read the rank from these variables.
    """
    if "RANK" not in os.environ and torch.distributed.is_initialized():
        own_rank = str(torch.distributed.get_rank())
        processes = str(torch.distributed.get_world_size())
        os.environ |= {"RANK": own_rank, "LOCAL_RANK": own_rank}
        os.environ |= {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}


def is_called_by_a_program(recipe_file: str) -> bool:
    """Whether another program, such as a notebook, imported the recipe and outlives its run.

    Such a program gets back what a run has changed in the process, such as signal handlers.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    return script is None or os.path.realpath(script) != os.path.realpath(recipe_file)


def forget_accelerator() -> None:
    """Reset Accelerate's global state, so that another run in this process can build its own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def refuse_malformed_variables() -> None:
    """Raise a `UserError` if a variable of `YES_OR_NO` is set to neither yes nor no."""
    for variable in YES_OR_NO:
        value = os.environ.get(variable)
        if value is not None and value.lower() not in TRUE_WORDS + FALSE_WORDS:
            raise UserError(
                f"the environment variable {variable} is {value!r:.50}, which is neither true nor "
                "false",
                advice=f"set {variable} to true or false, or unset it",
                every_rank=True,
            )


def launchers_precision() -> str:
    """Return the precision that the launcher asks for, "no" if it asks for none.

    Raises:
        UserError: the variable names no precision that recipes have.
    """
    value = os.environ.get(LAUNCHERS_PRECISION) or "no"
    precision = value.lower()
    if precision not in ("no", "fp16", "bf16"):
        raise UserError(
            f"the environment variable {LAUNCHERS_PRECISION} is {value!r:.50}, which is no "
            "precision of these recipes",
            advice=f"set {LAUNCHERS_PRECISION} to no, fp16 or bf16, or unset it",
            every_rank=True,
        )
    return precision


def refuse_launchers_compiler() -> None:
    """Raise a `UserError` if the launcher asks for torch.compile: recipes have a flag for it.

    Accelerate would compile the network a second time.
    """
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if backend.lower() not in ("", "no"):
        problem = f"the launcher asks for torch.compile (--dynamo_backend {backend.lower():.50})"
        raise UserError(
            problem, advice="leave --dynamo_backend out, and pass --compile to the recipe"
        )


def refuse_other_launchers() -> None:
    """Raise a `UserError` where the launcher asks for a way to train that recipes do not have."""
    for variable, setting in UNSUPPORTED_LAUNCHERS.items():
        value = os.environ.get(variable, "")
        if value.lower() in TRUE_WORDS:
            problem = f"{variable}={value} asks for {setting}, which recipes do not use"
            raise UserError(
                problem, advice=f"unset {variable}, or launch with one of accelerate_configs/"
            )


class SharedScaler(torch.amp.GradScaler):
    """fp16's loss scale for several optimizers: it changes once all of them have stepped.

    Accelerate calls `update` after each optimizer's step. That would reset the state of the others:
    their gradients, which clipping has unscaled, would be divided by the scale again.
    """

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Change the scale, but only in the call that follows the last optimizer's step.

        `new_scale` is ignored, because Accelerate never passes one.
        """
        stages = [state["stage"] for state in self._per_optimizer_states.values()]
        if all(stage is OptState.STEPPED for stage in stages):
            super().update(new_scale)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, also on a device without float64.

        Torch inverts the scale in float64. In fp32 the result is the same, because the scale is a
        power of two.
        """
        scale = self._scale
        # Without a tensor, no loss was scaled yet, which torch's method handles.
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
    """Return the dtype that matrix products run in; for TF32 it is float32, as of its tensors."""
    types = {"fp16": torch.float16, "bf16": torch.bfloat16}
    return types.get(accelerator.mixed_precision, torch.float32)


def running_precision(accelerator: Accelerator) -> str:
    """Return the precision that runs: "no" (fp32), "tf32", "bf16" or "fp16".

    Accelerate itself calls TF32 "no".
    """
    is_tf32 = torch.get_float32_matmul_precision() == "high"
    return "tf32" if is_tf32 else accelerator.mixed_precision


def class_of_unkept_part(accelerator: Accelerator, kept_parts: Iterable[object]) -> str | None:
    """Return the class name of a prepared object that is not in `kept_parts`; None if all are.

    Only objects that `run.keep` names are saved, so a forgotten one would be lost on resume.
    """
    # Accelerate may wrap a network in DDP, which has it as `module`. A recipe may keep the network
    # or the wrapper, so both are compared by the network. Optimizers are compared as they are:
    # `optimizer` of Accelerate's wrapper only gives the name of the class.
    kept_ids = {id(getattr(part, "module", part)) for part in kept_parts}
    for part in (*accelerator._models, *accelerator._optimizers, *accelerator._schedulers):
        if id(getattr(part, "module", part)) not in kept_ids:
            return type(getattr(part, "module", getattr(part, "optimizer", part))).__name__
    return None


def choose_precision(requested: str, use_cpu: bool, resumes: bool = False) -> str:
    """Return the precision to run in: "no" (fp32), "tf32", "bf16" or "fp16".

    Args:
        requested: the value of `--mixed-precision`. ``auto`` takes the launcher's precision, or the
            best of this device if the launcher names none.
        use_cpu: whether the CPU trains.
        resumes: whether a run is resumed. Its precision can't change, so an error has other advice.

    Raises:
        UserError: the device can't run this precision.
    """
    best = best_precision(use_cpu)
    precision = requested
    if requested == "auto":
        launcher_precision = launchers_precision()
        precision = best if launcher_precision == "no" else launcher_precision
    advice = f"pass --mixed-precision {best}"
    if resumes:
        advice = (
            "resume this run on a machine that has it, or start another run from its model with "
            "--init-from RUN"
        )
    if not is_offered(precision, use_cpu):
        raise UserError(MISSING_PRECISION[precision], advice=advice)
    return precision


def best_precision(use_cpu: bool) -> str:
    """Return the precision that `auto` takes if the launcher names none."""
    if use_cpu:
        return "bf16" if cpu_has_bf16() else "no"
    precision = AUTO_PRECISIONS.get(default_device().type, "no")
    return precision if is_offered(precision, use_cpu) else "no"


def is_offered(precision: str, use_cpu: bool) -> bool:
    """Whether a precision can be chosen on this device.

    Torch could run fp16 on a CPU, but slower than fp32, so it is not offered there. Any CPU can run
    bf16; `prepare_cpu` warns if it is slow.
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


def set_kernels(precision: str, deterministic: bool) -> None:
    """Choose the kernels for a precision, and deterministic ones if requested."""
    # Torch has two interfaces to TF32. Use the older one: torch's compiler reads it, and raises an
    # error if the newer one was set. cuDNN uses TF32 by default, so turn that off for fp32.
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = not deterministic
    # On Hopper GPUs torch 2.11 prefers cuDNN's attention. That builds a plan for each batch size
    # and length, half a second each, and texts come in many. It also rounds the dropout rate.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if deterministic:
        # cuBLAS repeats its results only with workspaces of a fixed size.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
