"""The process from which generated copies are forked: it has imported the libraries and `common`.

It is a fork of the process in `tests/template.py`, and serves requests in the same way. To save
time, it leaves out two things. `os.fsync` does nothing, because copies write many small files and
no test cuts the power. The speed of the processor is not measured.

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
    """Import the modules that every copy needs, and replace the slow functions."""
    from common.config import TrainingConfig
    from common.measure import peak

    for name in ("common.run", "torch.optim.swa_utils", "tests.generated.notes"):
        importlib.import_module(name)
    os.fsync = do_not_wait
    if hasattr(peak, "measured_tflops"):
        setattr(peak, "measured_tflops", lambda *arguments: 1.0)  # noqa: B010
    # Tyro remembers what it has found out about the types of the shared flags.
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
    # `template.py` removes the first entry of the path, which is its own folder.
    sys.path.insert(0, str(TESTS))
    LISTENER = listen(sys.argv[1])
    SOURCE = (TESTS / "template.py").read_text()
    sys.argv = [str(TESTS / "template.py"), str(LISTENER.detach()), sys.argv[1]]
    exec(compile(SOURCE, sys.argv[0], "exec"))
