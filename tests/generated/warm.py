"""A process that copies are forked from: it has the libraries, and the shared code besides.

It is itself a fork of the process in `tests/template.py`, and serves as that does. It leaves out
what takes time and says nothing about a copy: copies write small files in quick succession, and no
test cuts the power, so nothing waits for the disk. Nor does a copy measure how fast the processor
multiplies.

python tests/generated/warm.py SOCKET
"""

import importlib
import os
import socket
import sys
from pathlib import Path

import tyro

TESTS = Path(__file__).resolve().parents[1]


def prepare() -> None:
    """Import what every copy needs, and leave out what none does."""
    from common.config import TrainingConfig
    from common.measure import peak

    for name in ("common.run", "torch.optim.swa_utils", "tests.generated.notes"):
        importlib.import_module(name)
    os.fsync = do_not_wait
    if hasattr(peak, "measured_tflops"):
        setattr(peak, "measured_tflops", lambda *arguments: 1.0)  # noqa: B010
    # What tyro finds out of the shared flags' types, it remembers.
    tyro.cli(TrainingConfig, args=[])


def do_not_wait(descriptor: int) -> None:
    """Take the place of `os.fsync`."""


def listen(path: str) -> socket.socket:
    """Return a socket that listens at a path, which appears once it does."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{path}.part")
    listener.listen()
    os.rename(f"{path}.part", path)
    return listener


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS.parent))
    prepare()
    # `template.py` takes its own folder away from the beginning of the path.
    sys.path.insert(0, str(TESTS))
    LISTENER = listen(sys.argv[1])
    SOURCE = (TESTS / "template.py").read_text()
    sys.argv = [str(TESTS / "template.py"), str(LISTENER.detach()), sys.argv[1]]
    exec(compile(SOURCE, sys.argv[0], "exec"))
