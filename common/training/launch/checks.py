"""Checks the launcher's environment: a request that recipes don't support ends in an error."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from common.errors import UserError
from common.failures.error_causes import is_lost_process
from common.failures.outcomes import outcome_of
from common.failures.sentences import cause_text
from common.system.devices import USE_CPU_VARIABLE
from common.system.launch_variables import (
    FALSE_WORDS,
    TRUE_WORDS,
    local_world_size,
    rank,
    world_size,
)
from common.system.wording import counted

LAUNCH_ADVICE = (
    "start the recipe with accelerate launch --config_file accelerate_configs/multi_cpu.yaml (or "
    "another file of that folder), or with accelerate launch --multi_gpu --num_processes N"
)
# The variables that `accelerate launch` sets for ways to train that recipes do not support.
UNSUPPORTED_BACKENDS = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "tensor or context parallelism",
}
# Variables in which Accelerate expects a word for yes or no. At other words, Accelerate raises an
# error.
YES_OR_NO = (
    USE_CPU_VARIABLE,
    "ACCELERATE_CPU_AFFINITY",
    "ACCELERATE_DEBUG_MODE",
    "ACCELERATE_USE_FSDP",
    "FORK_LAUNCHED",
)


@contextmanager
def launching() -> Iterator[None]:
    """Turn errors of Accelerate and torch about the launcher's environment into a `UserError`."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        cause = cause_text(error)
        if is_lost_process(error):
            raise UserError(
                f"the launched processes could not reach each other ({cause})",
                advice="check MASTER_ADDR, MASTER_PORT and the network between the machines",
                every_rank=True,
                resumable=True,  # they may find each other if the job is started again
            ) from None
        raise UserError(
            f"the launched processes can't start ({cause})",
            advice=f"correct the setting that this error names, or {LAUNCH_ADVICE}",
            every_rank=True,
            resumable=outcome_of(error).resumable,
        ) from None


def refuse_unfit_environment() -> None:
    """Raise a `UserError` if a launcher's variable is wrong, or asks for what recipes lack.

    These checks need no Accelerator, so they come before anything else.
    """
    refuse_malformed_variables()
    refuse_launchers_compiler()
    refuse_wrong_rank()
    refuse_unsupported_backends()


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


def refuse_launchers_compiler() -> None:
    """Raise a `UserError` if the launcher asks for torch.compile.

    Recipes compile by their own flag, `--compile`. With both, the network would be compiled twice.
    """
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if backend.lower() not in ("", "no"):
        problem = f"the launcher asks for torch.compile (--dynamo_backend {backend.lower():.50})"
        raise UserError(
            problem,
            advice=(
                "leave dynamo_backend out of the launcher's command or configuration file (and "
                "unset ACCELERATE_DYNAMO_BACKEND if you set it); to compile the model, pass "
                "--compile to the recipe when you start a new run"
            ),
        )


def refuse_wrong_rank() -> None:
    """Raise a `UserError` if RANK is not between 0 and WORLD_SIZE - 1, or WORLD_SIZE is below 1."""
    if not 0 <= rank() < world_size():
        problem = (
            f"RANK is {rank()} and WORLD_SIZE is {world_size()}, but RANK must be from 0 to "
            f"{world_size() - 1}"
        )
        if world_size() < 1:
            problem = f"WORLD_SIZE is {world_size()}, but must be 1 or more"
        elif "WORLD_SIZE" not in os.environ:
            problem = f"RANK is {rank()}, but WORLD_SIZE is not set"
        raise UserError(
            f"the environment variable {problem}",
            advice=(
                f"unset both variables to train in one process, or {LAUNCH_ADVICE}, which sets them"
            ),
            every_rank=True,
        )


def refuse_unsupported_backends() -> None:
    """Raise a `UserError` where the launcher asks for a way to train that recipes do not have."""
    for variable, setting in UNSUPPORTED_BACKENDS.items():
        value = os.environ.get(variable, "")
        if value.lower() in TRUE_WORDS:
            raise UserError(
                f"the launcher asks for {setting} ({variable}={value}), which recipes do not "
                "support",
                advice=(
                    "choose another configuration, as in accelerate launch --config_file "
                    "accelerate_configs/multi_gpu_bf16.yaml, or unset the variable if you set it "
                    "yourself"
                ),
            )


def refuse_missing_devices() -> None:
    """Raise a `UserError` if this machine has more processes than accelerators that they see."""
    devices = torch.accelerator.device_count()
    local_processes = local_world_size()
    if local_processes > devices:
        gpus = counted(devices, "GPU")
        counts = f"{local_processes} processes on this machine, but they see only {gpus}"
        raise UserError(
            f"the launcher started {counts}",
            advice=(
                "start at most one process for each GPU, as with accelerate launch "
                f"--num_processes {devices} on one machine; or make more GPUs visible, if "
                "an environment variable or the job's allocation hides some"
            ),
        )


def refuse_missing_processes(processes: int) -> None:
    """Raise a `UserError` if other than the launcher's number of processes train together.

    Args:
        processes: the number of processes that the Accelerator trains with.
    """
    if processes != world_size():
        raise UserError(
            f"the launcher started {world_size()} processes, but Accelerate would train with "
            f"{processes} in each of them, so they would not train together",
            advice=LAUNCH_ADVICE,
        )
    # For `--cpu` or MULTI_CPU, `accelerate launch` sets these variables if several processes are
    # asked for, but it starts only one, without WORLD_SIZE.
    expects_more = {"ACCELERATE_USE_CPU", "MASTER_ADDR"} <= {*os.environ}
    if expects_more and "WORLD_SIZE" not in os.environ and processes == 1:
        raise UserError(
            "the launcher started one process, although its command or configuration asks for "
            "several; or MASTER_ADDR is set, although there is only one process",
            advice=f"{LAUNCH_ADVICE}, or unset MASTER_ADDR if you set it yourself",
        )
