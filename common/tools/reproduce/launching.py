"""Builds the command and the environment that train an old run again, as a user would."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from common.run_directory.directory import INITIAL
from common.run_directory.provenance import IMPORT_ROOT, NUMERIC_VARIABLES
from common.run_directory.records import CONFIG, Environment
from common.system.platforms.commands import command_line
from common.tools.launching.command import FSDP2_VARIABLES, command_of_run, options_for
from common.tools.reproduce.code import RestoredCode
from common.tools.reproduce.compared_run import ComparedRun


def flags_of_reproduction(old: ComparedRun) -> list[str]:
    """Return the words of the flags that repeat a run.

    A flag that the run resolved itself, such as a precision of `auto`, gets the resolved value. The
    new run has no tracker and no target, because these change no figure.
    """
    environment = old.saved_config.environment
    flags = ["--config", str(old.directory / CONFIG)]
    flags += ["--mixed-precision", environment.mixed_precision]
    flags += ["--no-auto-batch-size", "--target", "None", "--tracker", "none"]
    if environment.device_type == "cpu" and environment.threads_per_process is not None:
        flags += ["--num-threads", str(environment.threads_per_process)]
    if (old.directory / INITIAL).is_dir():
        flags += ["--init-from", str(old.directory / INITIAL)]
    return flags


def command_of(old: ComparedRun, recipe: Path, flags: Sequence[str], output: Path) -> list[str]:
    """Return the command that trains a run again in `output`, or resumes the training there.

    Args:
        flags: command-line words that replace flags of the run.
    """
    launcher_options = options_for(old.saved_config.environment.world_size)
    all_flags = [*flags_of_reproduction(old), *flags]
    return command_of_run(launcher_options, str(recipe), all_flags, output)


def environment_of(old: ComparedRun, code: RestoredCode) -> dict[str, str]:
    """Return the environment variables of the new run.

    The variables that choose kernels are those of the old run. The new run imports `common` from
    the restored code.
    """
    other_variables = dict(os.environ)
    for name in NUMERIC_VARIABLES:
        other_variables.pop(name, None)
    variables = {
        **other_variables,
        **old.attempt.variables,
        **variables_of_device(old.saved_config.environment),
    }
    if code.library != IMPORT_ROOT:
        variables["PYTHONPATH"] = with_library(code.library, os.environ)
    return variables


def variables_of_device(environment: Environment) -> dict[str, str]:
    """Return the variables that choose the type of device, and how the weights are sharded."""
    variables = {}
    if environment.device_type == "cpu" and torch.accelerator.is_available():
        variables["ACCELERATE_USE_CPU"] = "true"
    if environment.sharding == "FSDP2":
        variables |= FSDP2_VARIABLES
    return variables


def with_library(library: Path, variables: Mapping[str, str]) -> str:
    """Return the value of `PYTHONPATH`, with the folder of the library before any other folders."""
    earlier_value = variables.get("PYTHONPATH")
    if not earlier_value:
        return str(library)
    return os.pathsep.join([str(library), earlier_value])


def shown_command(command: Sequence[str]) -> str:
    """Return the command for a receipt, in which `python` replaces this interpreter's path."""
    return command_line(["python", *command[1:]])
