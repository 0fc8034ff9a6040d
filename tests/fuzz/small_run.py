"""A whole training run in this process, in a tenth of a second: read, restored, trained, saved."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tyro
from accelerate.state import AcceleratorState

from common.checkpoints.finished import newest_whole
from common.config import parse_config
from common.measure.meters import Meters
from common.system.platforms import STOP_SIGNALS
from common.track import facts
from examples import regression

FLAGS = (
    *("--hidden-sizes", 3, "--max-steps", 4, "--checkpoint-every", 2, "--log-every", 2),
    *("--batch-size", 64, "--tracker", "none", "--mixed-precision", "no", "--num-threads", 1),
)
STEPS = (2, 4)  # that have a checkpoint
PARSE, PARSED = tyro.cli, dict[Any, Any]()


def parse(kind: Any, **asked: Any) -> Any:
    """Read a command line as tyro does, which takes a third of a run; the same one only once."""
    key = (kind, repr(asked["default"]), *sys.argv)
    if key not in PARSED:
        PARSED[key] = PARSE(kind, **asked)
    return copy.deepcopy(PARSED[key])


class Inline:
    """A thread that is over when it has started, so that calls have an order."""

    def __init__(self, target: Any, args: Any) -> None:
        self.target, self.arguments = target, args

    def start(self) -> None:
        """Do its work."""
        self.target(*self.arguments)

    def join(self) -> None:
        """Wait for nothing."""


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Leave out what takes time and is not looked at; put back what a run sets in a process."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    versions = facts.metadata.version("torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.checkpoints.store.threading.Thread", Inline)
        patch.setattr(Meters, "find_flops", lambda *_: None)
        patch.setattr(facts, "git_commit", lambda: None)
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(facts.metadata, "version", lambda name: versions)
        patch.setattr("common.errors.time.sleep", lambda seconds: None)
        patch.setattr(tyro, "cli", parse)
        yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run(*flags: object) -> tuple[BaseException | None, str]:
    """Run the recipe to its end; return what ended it early, and what it printed."""
    AcceleratorState._reset_state(True)
    said, words = io.StringIO(), sys.argv
    sys.argv = ["regression.py", *map(str, flags)]
    try:
        with contextlib.redirect_stdout(said):
            regression.main(parse_config(regression.Config))
    except (Exception, SystemExit) as error:
        return error, said.getvalue()
    finally:
        sys.argv = words
    return None, said.getvalue()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def learned(directory: Path) -> tuple[int, dict[str, str]]:
    """Return the newest whole checkpoint's step and, of what it holds and was learned, digests."""
    newest, _ = newest_whole(directory / "checkpoints")
    if newest is None:
        return 0, {}
    names = ("model", "optimizer", "scheduler")
    files = {name: newest / f"{name}.safetensors" for name in names}
    found = {name: digest(path) for name, path in files.items() if path.exists()}
    return int(newest.name.removeprefix("step-")), found
