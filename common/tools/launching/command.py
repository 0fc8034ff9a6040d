"""Builds the command line that starts a recipe, in one process or by `accelerate launch`."""

import sys
from collections.abc import Sequence
from pathlib import Path

ACCELERATE_LAUNCH = ("-m", "accelerate.commands.accelerate_cli", "launch")
# The launcher's variables for FSDP2, as `accelerate_configs/fsdp2_bf16.yaml` sets them.
FSDP2_VARIABLES = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


def options_for(processes: int) -> list[str]:
    """Return the options of `accelerate launch` for a number of processes on this machine.

    A single process needs no launcher, so the result is empty.
    """
    if processes == 1:
        return []
    any_free_port = ["--main_process_port", "0"]
    # --multi_gpu also starts several processes on a CPU, where --cpu would start only one.
    return ["--multi_gpu", "--num_processes", str(processes), *any_free_port]


def launch_command(launcher_options: Sequence[str], script: str, words: Sequence[str]) -> list[str]:
    """Return the command that starts a script with this interpreter.

    If there are options for `accelerate launch`, that launcher starts the script. Otherwise the
    interpreter starts it directly.

    Args:
        launcher_options: see `options_for`.
        words: the words of the script's command line.
    """
    launcher = [*ACCELERATE_LAUNCH, *launcher_options] if launcher_options else []
    return [sys.executable, *launcher, script, *words]


def command_of_run(
    launcher_options: Sequence[str], recipe: str, flags: Sequence[str], directory: Path
) -> list[str]:
    """Return the command that starts a run in `directory`, or resumes the unfinished run there.

    Args:
        launcher_options: see `options_for`.
        flags: the words of the recipe's flags.
    """
    words = [*flags, "--output-dir", str(directory), "--resume", "auto"]
    return launch_command(launcher_options, recipe, words)
