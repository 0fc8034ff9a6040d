"""A process that has the libraries imported, and forks for each launch. It saves their imports.

A fork is a process of its own, with its own session, environment, signals and output. One thing
differs from a fresh interpreter: all forks share the seed of Python's hashes, so the order of a set
of texts is the same in each. So the run that repeats the reference run is launched afresh.

`WarmProcess` is the side of the bench. This module, started as a script, is the other side.
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

from common.system.platforms import (
    IS_LINUX,
    begin_session,
    fork,
    signal_when_parent_ends,
    start_in_own_group,
)

LIBRARIES = ("common.run", "common.tools.prove.observers", "common.tools.prove.probe")


class LaunchRequest(TypedDict):
    """What the bench asks for: one launch."""

    words: list[str]  # the recipe's file and its flags
    environment: dict[str, str]
    log: str  # the file that receives the output


def environment_of_launches() -> dict[str, str]:
    """Return the variables of this process, with waiting threads that do not spin.

    A proof often runs beside other programs, and threads that spin take their cores.
    """
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}


class WarmProcess:
    """Starts launches as forks of a process that has the libraries imported."""

    def __init__(self, recipe: Path) -> None:
        """Start the process; it imports what the recipe imports."""
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(recipe)],
            env=environment_of_launches(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # `select` does not see what a buffer holds
            **start_in_own_group(ends_with_parent=True),
        )

    @staticmethod
    def is_possible() -> bool:
        """Whether forks are safe here: not with the libraries of accelerators, or of macOS."""
        import torch

        return IS_LINUX and not torch.accelerator.is_available()

    def start(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """Start a launch, and return its process id."""
        request = LaunchRequest(words=[*words], environment=dict(environment), log=str(log))
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        return self.read_number(None)

    def wait(self, timeout: float) -> int:
        """Return the exit status of the last launch, which is below 0 after a signal.

        Raises:
            TimeoutError: it has not ended in time.
        """
        return self.read_number(timeout)

    def read_number(self, timeout: float | None) -> int:
        """Return the next line of the process: the id of a launch, or later its exit status."""
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


def imported_by(recipe: Path) -> list[str]:
    """Return the modules that a recipe imports, apart from those beside it."""
    names = []
    for node in ast.walk(ast.parse(recipe.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.append(node.module)
    # By name, because nothing is imported yet: `common.flag_uses` and others look at the files.
    beside = {path.stem for path in recipe.resolve().parent.iterdir()}
    return [name for name in names if name.partition(".")[0] not in beside - {"common"}]


def serve(recipe: Path) -> LaunchRequest:
    """Fork for each request, and report how each fork ends; in a fork, return its request.

    The process ends when the bench does.
    """
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    sys.path.remove(str(Path(__file__).resolve().parent))  # no library is in this folder
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    for name in [*LIBRARIES, *imported_by(recipe)]:
        with contextlib.suppress(ImportError):  # the recipe may catch it, or say what is missing
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that no collection copies the memory that forks share
    for line in requests:
        request: LaunchRequest = json.loads(line)
        process = fork()
        if process == 0:
            requests.close()
            answers.close()
            become(request)
            return request
        answers.write(f"{process}\n".encode())
        _, status = os.waitpid(process, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    raise SystemExit


def become(request: LaunchRequest) -> None:
    """Give a fork the environment, output and random generators of a process of its own."""
    signal_when_parent_ends(signal.SIGTERM)
    begin_session()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # so that it is read from this environment
    # Generators that nobody seeds differ between processes.
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()


def main() -> None:
    """Serve requests; in a fork, run the recipe under observation."""
    request = serve(Path(sys.argv[1]))
    # Under its own name, which `LIBRARIES` has imported.
    probe = importlib.import_module("common.tools.prove.probe")
    probe.main(request["words"])


if __name__ == "__main__":
    main()
