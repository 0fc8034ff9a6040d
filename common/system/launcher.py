"""The command of the launcher that started this process."""

import os
from collections.abc import Sequence

from common.system.launch_variables import world_size
from common.system.platforms.commands import command_line
from common.system.platforms.process_tree import starting_process

UNKNOWN_LAUNCHER = "LAUNCHER"  # shows where the user's own launcher belongs
INSTALLED_LAUNCHERS = ("accelerate", "torchrun")  # programs that Python itself executes


def launcher_command(script: str) -> str:
    """Return the command before the recipe, such as ``accelerate launch --num_processes 2``.

    A message uses it to show how to start the recipe again, with other flags. A single process
    needs only ``python``. The result is `UNKNOWN_LAUNCHER` if the command can't be read, or does
    not name the recipe.

    Args:
        script: the recipe as the launcher started it: ``sys.argv[0]``.
    """
    import psutil

    if world_size() == 1:
        return "python"
    try:
        launcher = starting_process()
        words = launcher.cmdline()
    except (OSError, psutil.Error):
        return UNKNOWN_LAUNCHER
    # On Windows, a launcher that has ended is not found: see `starting_process`. On POSIX, another
    # process has adopted this one, and its command does not name the recipe.
    if launcher.pid == os.getpid():
        return UNKNOWN_LAUNCHER
    return command_before(words, script)


def command_before(words: Sequence[str], script: str) -> str:
    """Return the command that a launcher's words form before the recipe; see `launcher_command`."""
    if script not in words:
        return UNKNOWN_LAUNCHER
    launcher = [*words[: words.index(script)]]
    # The system shows how Python started the launcher: /usr/bin/python /usr/bin/accelerate ...
    if len(launcher) > 1 and os.path.basename(launcher[1]) in INSTALLED_LAUNCHERS:
        launcher = [os.path.basename(launcher[1]), *launcher[2:]]
    return command_line(launcher) or UNKNOWN_LAUNCHER
