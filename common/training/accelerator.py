"""Builds the Accelerator: its device, threads, process group and seed.

Precision and kernels are chosen in `common.training.precision`.
"""

import functools
import inspect
import os
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import accelerate.optimizer
import torch
from accelerate import utils
from accelerate.state import PartialState

from common.config import Precision, TrainingConfig
from common.errors import UserError
from common.measure.memory_limits import limit_memory
from common.system.devices import default_device, is_cpu_asked_for
from common.system.network import set_gloo_interface
from common.system.processor import cpu_threads
from common.training.gradients.averaging import ddp_options
from common.training.launch.checks import (
    launching,
    refuse_missing_devices,
    refuse_missing_processes,
    refuse_unfit_environment,
)
from common.training.launch.rendezvous import rendezvous_url
from common.training.precision import (
    choose_precision,
    enable_precision,
    set_kernels,
    warn_of_slow_bf16,
)
from common.training.sharding.accelerator import ShardingAccelerator
from common.training.sharding.fsdp_request import take_fsdp_request


class ChosenDevice(NamedTuple):
    """The type of device that trains."""

    is_cpu: bool
    is_device_known: bool  # whether Accelerate knows the type; true for the CPU


@launching()
def build_accelerator(
    config: TrainingConfig, ddp: Mapping[str, object] | None = None
) -> ShardingAccelerator:
    """Return the Accelerator of a run or a prediction.

    It is set up for this hardware, the launcher and the flags.

    Args:
        config: the flags.
        ddp: options of DistributedDataParallel that the recipe states.

    Raises:
        UserError: the launcher, a flag or an option asks for something that can't run here, or the
            processes can't start.
    """
    refuse_unfit_environment()
    options = ddp_options(ddp or {}, config.gradient_compression)
    device = choose_device()
    precision = choose_precision(config.mixed_precision, device.is_cpu, config.resume is not None)
    if device.is_cpu:
        prepare_cpu(config, precision)
    cache_lookups_of_updates()
    uses_fsdp = take_fsdp_request()  # before the constructor, which would shard in its own way
    accelerator = make_accelerator(config, options, device, precision)
    refuse_missing_processes(accelerator.num_processes)  # a launcher may start too few
    enable_precision(accelerator, precision, device.is_device_known)
    set_kernels(precision, config.deterministic)  # after Accelerate, which may turn TF32 on
    if uses_fsdp and accelerator.num_processes > 1:  # one process has the whole model anyway
        shard(accelerator, config)
    utils.set_seed(config.seed)  # the same seed on all ranks, for the same initial weights
    return accelerator


def choose_device() -> ChosenDevice:
    """Return the type of device that trains, and have Accelerate use an accelerator of that type.

    The CPU trains if it is asked for, or if there is no accelerator.

    Raises:
        UserError: this machine has fewer accelerators than processes.
    """
    if is_cpu_asked_for() or not torch.accelerator.is_available():
        return ChosenDevice(is_cpu=True, is_device_known=True)
    is_known = name_device_for_accelerate()
    refuse_missing_devices()
    return ChosenDevice(is_cpu=False, is_device_known=is_known)


def make_accelerator(
    config: TrainingConfig,
    options: utils.DistributedDataParallelKwargs,
    device: ChosenDevice,
    precision: Precision,
) -> ShardingAccelerator:
    """Construct the Accelerator; its constructor connects the processes of the job."""
    # Accelerate 1.15 knows only the old name of this option of DDP, about which torch 2.13 warns.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    set_gloo_interface()  # with several machines, gloo might choose the loopback
    process_group = utils.InitProcessGroupKwargs(
        init_method=rendezvous_url(), timeout=timedelta(seconds=config.collective_timeout)
    )
    # Accelerate refuses 16 bits on a device that it does not know (see `enable_precision`), and
    # TF32 is not one of Accelerate's precisions (see `set_kernels`).
    is_set_by_accelerate = device.is_device_known and precision != "tf32"
    accelerator = ShardingAccelerator(
        cpu=device.is_cpu,
        mixed_precision=precision if is_set_by_accelerate else "no",
        # With this, the scheduler makes one step per update on any number of processes. By default
        # it would make one per process.
        dataloader_config=utils.DataLoaderConfiguration(split_batches=True),
        kwargs_handlers=[process_group, options],
    )
    # This is set here, because the environment variable ACCELERATE_GRADIENT_ACCUMULATION_STEPS
    # would override an argument of the constructor.
    accelerator.gradient_accumulation_steps = config.gradient_accumulation_steps
    return accelerator


def shard(accelerator: ShardingAccelerator, config: TrainingConfig) -> None:
    """Have the Accelerator shard networks over the ranks, because the launcher asks for FSDP.

    Raises:
        UserError: `--auto-batch-size` is set.
    """
    if config.auto_batch_size:
        advice = "pass --no-auto-batch-size, and --batch-size N"
        if config.resume is not None:  # a resumed run keeps the flag
            advice = "resume this run without FSDP, or start a new run without --auto-batch-size"
        raise UserError(
            "--auto-batch-size can't be used with a sharded model, because each process tries "
            "sizes on its own",
            advice=advice,
        )
    accelerator.enable_sharding(config.gradient_compression)


def prepare_cpu(config: TrainingConfig, precision: Precision) -> None:
    """Set the threads and the memory limit of a training on a CPU; warn if it would be slow.

    On Linux, a run that exceeds the memory limit ends with an error that gives advice. Without the
    limit, Linux would kill the process.

    Raises:
        UserError: gradients are to be compressed to bf16, which gloo can't sum.
    """
    if config.gradient_compression == "bf16":
        advice = "pass --gradient-compression fp16, or leave the flag out"
        if config.resume is not None:  # a resumed run keeps the flag
            advice = "resume this run on GPUs, or start a new run without this flag"
        raise UserError("--gradient-compression bf16 can't be used on a CPU", advice=advice)
    warn_of_slow_bf16(precision, config.resume is not None)
    torch.set_num_threads(cpu_threads(config.num_threads))
    limit_memory()


def cache_lookups_of_updates() -> None:
    """Cache two facts that Accelerate would look up again in each update, in 120 µs.

    The first is whether the package of the optimizer Lomo is installed (90 µs). The second is the
    signature of `zero_grad` (30 µs). Neither changes during a run.
    """
    accelerate.optimizer.is_lomo_available = functools.cache(utils.is_lomo_available)
    zero_grad: Any = torch.optim.Optimizer.zero_grad  # the type of a function lacks the attribute
    # Without `__signature__`, `inspect.signature` would work the signature out in each call.
    zero_grad.__signature__ = inspect.signature(zero_grad)


def name_device_for_accelerate() -> bool:
    """Have Accelerate use this process's accelerator; return whether Accelerate knows its type.

    Accelerate would use the CPU instead of a type that it does not know, unless a variable of the
    environment names the type. This function sets the variable.
    """
    device = default_device()
    # `default_device` is a property of instances, but there is no instance yet. Its getter ignores
    # the instance, so it can be called with None.
    device_of_accelerate = PartialState.default_device.fget(None)
    if device_of_accelerate.type == device.type:
        return True
    os.environ.setdefault("ACCELERATE_TORCH_DEVICE", device.type)
    return False
