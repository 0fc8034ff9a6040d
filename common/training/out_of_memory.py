"""The error of a run that runs out of memory, with advice to make it fit."""

import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

import torch

from common.config import TrainingConfig
from common.data.loader import Loader
from common.errors import TrainingError
from common.flags import spelled, stated_metadata
from common.measure import memory
from common.run_directory.records import CONFIG
from common.system.devices import is_accelerator
from common.system.launcher import launcher_command
from common.system.platforms.commands import command_line

END_OTHER_PROGRAMS = "end other programs that take up memory (on a GPU: the memory of the GPU)"


def out_of_memory_error(
    config: TrainingConfig, directory: Path, device: torch.device, loaders: Iterable[Loader]
) -> TrainingError:
    """Return the error of a run that ran out of memory, with a command to start or resume it.

    The command halves the micro-batch and doubles the accumulation, so that the updates stay the
    same; almost the same for an odd micro-batch. At batch size 1 there is other advice instead.
    """
    peak = memory.peak_memory(memory.memory_used(device))
    problem = f"out of memory at batch size {config.batch_size}, with a peak of {peak:,.0f} MiB"
    placed_mib = placed_bytes(device, loaders) / memory.MEBIBYTE
    if placed_mib:
        problem += (
            f" (the data take {placed_mib:,.0f} MiB of it, or none with --data-placement workers)"
        )
    if config.batch_size == 1:
        advice = one_sample_advice(config, has_placed_data=placed_mib > 0)
    else:
        advice = half_batch_advice(config, command_with_half_the_batch(config, directory))
    return TrainingError(problem, advice=advice, every_rank=True)


def half_batch_advice(config: TrainingConfig, command: str) -> str:
    """Return the advice to run a command with half the batch size, or to train a smaller model."""
    if config.evaluate_only:  # the model is given, and there are no updates
        return f"evaluate with half the batch size: {command}"
    is_even = config.batch_size % 2 == 0
    updates = "the same updates" if is_even else "almost the same updates"
    return (
        f"start a new run with {smaller_model(config)}, or make {updates} from half the batch "
        f"size with: {command}"
    )


def placed_bytes(device: torch.device, loaders: Iterable[Loader]) -> int:
    """Return the bytes of device memory that `--data-placement workers` would free.

    The result is 0 on a CPU, because the data lie in the host's memory in any case.
    """
    return sum(loader.placed_bytes for loader in loaders) if is_accelerator(device) else 0


def one_sample_advice(config: TrainingConfig, has_placed_data: bool) -> str:
    """Return advice for a run in which not even one sample per batch fits into memory.

    A resume can't change what the model computes, so the advice names such flags for a new run.
    Call this only for an error. It reads `--gradient-checkpointing`, so the flag would count as
    used in a run that goes on (see `common.command_line.flag_reads`).

    Args:
        has_placed_data: whether `--data-placement workers` would free memory.
    """
    remedies = [END_OTHER_PROGRAMS]
    if has_placed_data:
        remedies.append("pass --data-placement workers")
    if config.evaluate_only:  # the model is given, and there are no gradients
        return ", or ".join(remedies)
    changes = [] if config.gradient_checkpointing else ["--gradient-checkpointing"]
    changes.append(smaller_model(config))
    remedies.append(f"or start a new run with {' or '.join(changes)}")
    return ", ".join(remedies)


def command_with_half_the_batch(config: TrainingConfig, directory: Path) -> str:
    """Return a command that resumes a run, or repeats it if the run has not begun to train.

    The command halves the micro-batch, and doubles the accumulation if the run trains.
    """
    has_begun = (directory / CONFIG).is_file()  # a run writes this file before its first update
    arguments = ["--resume", str(directory)] if has_begun else sys.argv[1:]
    script = sys.argv[0]
    command = f"{launcher_command(script)} {command_line([script, *arguments])}"
    command += f" --batch-size {config.batch_size // 2}"
    if config.evaluate_only:
        return command
    return f"{command} --gradient-accumulation-steps {config.gradient_accumulation_steps * 2}"


def smaller_model(config: TrainingConfig) -> str:
    """Return a phrase for what takes less memory, such as "a lower --image-size".

    It names the recipe's flags for the size of the model or of its samples, if there are any.
    """
    size_flags = [
        spelled(field.name)
        for field in fields(config)
        if stated_metadata(type(config), field.name)["role"] == "size"
    ]
    if not size_flags:
        return "a smaller model or smaller samples"
    return f"a lower {' or '.join(size_flags)}"
