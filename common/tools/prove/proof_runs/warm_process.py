"""A process that imports the libraries once, and forks for each launch. This saves time.

Each fork is a separate process, with its own session, environment, signals and output. One thing
differs from a fresh interpreter: all forks share the seed of Python's hashes, so a set of strings
has the same order in each. A recipe whose results depend on that order would seem repeatable. So
the run that repeats the reference run gets a fresh interpreter.

The bench uses `WarmProcess`, which starts this module as a script.
"""

import ast
import contextlib
import gc
import importlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from common.system.platforms.limits import can_fork_with_threads
from common.system.platforms.process_tree import (
    begin_session,
    fork,
    own_group_arguments,
    signal_when_parent_ends,
)
from common.system.source_imports import absolute_imports

# Modules that the process imports in addition to those that the recipe imports.
LIBRARIES = (
    "torch._dynamo",  # the first optimizer of a process imports it, which takes seconds
    "common.run",
    "common.tools.prove.observation.run_observer",
    "common.tools.prove.observation.probe",
)


class LaunchRequest(TypedDict):
    """A launch that the bench asks for."""

    words: list[str]  # the recipe's file and its flags
    environment: dict[str, str]
    log: str  # the file that receives the output


def environment_of_launches() -> dict[str, str]:
    """Return the variables of this process, with a setting that keeps waiting threads idle.

    A proof often runs beside other programs. Threads that spin while they wait take their cores. If
    the user has set OMP_WAIT_POLICY, that value stays.
    """
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}


class WarmProcess:
    """Starts launches as forks of a process that has imported the libraries."""

    def __init__(self, recipe: Path) -> None:
        """Start the process, which imports the libraries that the recipe imports."""
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(recipe)],
            env=environment_of_launches(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # `select` does not see what a buffer holds
            **own_group_arguments(),
        )

    @staticmethod
    def is_possible() -> bool:
        """Whether forks are safe: only on Linux, and only if no accelerator is available."""
        import torch

        return can_fork_with_threads() and not torch.accelerator.is_available()

    def start(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """Start a launch, and return its process id."""
        request = LaunchRequest(words=[*words], environment=dict(environment), log=str(log))
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        return self.read_number(None)

    def wait(self, timeout: float) -> int:
        """Wait for the last launch, and return its exit status, which is negative after a signal.

        Call this once per launch; a second call would read another number.

        Args:
            timeout: the most seconds to wait.

        Raises:
            TimeoutError: the launch has not ended in time.
        """
        return self.read_number(timeout)

    def read_number(self, timeout: float | None) -> int:
        """Read the next number from the process: the id of a launch, or later its exit status."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            raise TimeoutError
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the process that forks for launches has ended")
        return int(line)

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


def imported_modules(recipe: Path) -> list[str]:
    """Return the modules that a recipe imports, except those in its folder.

    Each launch imports those in its folder itself, as it does without a fork.
    """
    names = absolute_imports(ast.parse(recipe.read_text(encoding="utf-8")))
    # The modules are not imported yet, so only their names tell which are the recipe's own. In this
    # repository, the folder `common` lies beside `recipes`, and is a library all the same.
    names_in_folder = {path.stem for path in recipe.resolve().parent.iterdir()} - {"common"}
    return [name for name in names if name.partition(".")[0] not in names_in_folder]


def serve(recipe: Path) -> LaunchRequest:
    """Fork for each request. In a fork, return its request.

    The reply to a request is the fork's process id, and later its exit status. This process ends
    when the bench calls `WarmProcess.close`, or when the bench ends.
    """
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    # Python has added this folder, whose modules could hide libraries with the same names.
    sys.path.remove(str(Path(__file__).resolve().parent))
    # From here on, imported libraries can neither read requests nor write between the replies.
    null_device = os.open(os.devnull, os.O_RDWR)
    os.dup2(null_device, 0)
    os.dup2(null_device, 1)
    for name in [*LIBRARIES, *imported_modules(recipe)]:
        with contextlib.suppress(Exception):  # the recipe may catch the error, or report it
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # otherwise a collection would copy the memory that forks share
    for line in requests:
        request: LaunchRequest = json.loads(line)
        process_id = fork()
        if process_id == 0:  # this is the fork
            requests.close()
            replies.close()
            set_up_fork(request)
            return request
        replies.write(f"{process_id}\n".encode())
        _, status = os.waitpid(process_id, 0)
        replies.write(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    raise SystemExit


def set_up_fork(request: LaunchRequest) -> None:
    """Give a fork its own session, environment, output and random generators.

    The fork gets SIGTERM when its parent ends.
    """
    signal_when_parent_ends(signal.SIGTERM)
    begin_session()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # Python then reads it from this environment
    # A fork inherits the states of the generators. Seed them from the system's randomness, because
    # separate processes start with different states.
    random.seed()
    # `LIBRARIES` have imported NumPy and torch. Importing them at the top of this file would slow
    # the bench, which imports it.
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()


def main() -> None:
    """Serve requests; in a fork, run the recipe under observation."""
    request = serve(Path(sys.argv[1]))
    # `serve` returns only in a fork. The probe is one of `LIBRARIES`, so the fork has imported it
    # already.
    probe = importlib.import_module("common.tools.prove.observation.probe")
    probe.main(request["words"])


if __name__ == "__main__":
    main()
