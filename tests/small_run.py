"""A whole training run in the test's process, in 0.1 s: it reads, restores, trains and saves."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tyro
from accelerate.state import AcceleratorState

from common.checkpoints.folders import newest_whole, step_folders
from common.config import parse_config
from common.lifecycle.start import environment
from common.measure.meters import Meters
from common.run import Run
from common.run_directory.identity import saved_run_id
from common.run_directory.provenance import ProvenanceWriter
from common.system.platforms.signals import STOP_SIGNALS
from examples import regression

FLAGS = (
    *("--hidden-sizes", 3, "--max-steps", 4, "--checkpoint-every", 2, "--log-every", 2),
    *("--batch-size", 64, "--tracker", "none", "--mixed-precision", "no", "--num-threads", 1),
)
STEPS = (2, 4)  # the updates that have a checkpoint
PARSE = tyro.cli  # the original
PARSED: dict[Any, Any] = {}  # configs by command line


def parse(config_class: Any, **options: Any) -> Any:
    """Stand for `tyro.cli`, but parse each command line only once: it takes a third of a run."""
    key = (config_class, repr(options["default"]), *sys.argv)
    if key not in PARSED:
        PARSED[key] = PARSE(config_class, **options)
    return copy.deepcopy(PARSED[key])


class Inline:
    """A thread whose `start` does the whole work, so that the order of calls is fixed."""

    def __init__(self, target: Any, args: Any) -> None:
        self.target = target
        self.arguments = args

    def start(self) -> None:
        """Do the work."""
        self.target(*self.arguments)

    def join(self) -> None:
        """Return at once, because the work is done."""


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Replace slow functions that these tests do not need; restore the signal handlers."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    versions = environment.metadata.version("torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.checkpoints.store.threading.Thread", Inline)
        patch.setattr(Meters, "find_flops", lambda *_: None)
        patch.setattr("common.measure.memory_plan.optimizer_state_bytes", lambda *_: None)
        patch.setattr("common.measure.machine_load.own_seconds", float)
        patch.setattr(environment, "commit_of_library", lambda: None)
        patch.setattr(environment, "digest_of_code_beside", lambda recipe_file: None)
        patch.setattr(ProvenanceWriter, "begin", lambda *_: None)
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(environment.metadata, "version", lambda name: versions)
        patch.setattr("common.ranks.rank_exits.time.sleep", lambda seconds: None)
        patch.setattr(tyro, "cli", parse)
        yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run(*flags: object) -> tuple[BaseException | None, str]:
    """Run the recipe; return the exception that ended it early, if any, and its output."""
    AcceleratorState._reset_state(True)
    output = io.StringIO()
    words = sys.argv
    sys.argv = ["regression.py", *map(str, flags)]
    try:
        with contextlib.redirect_stdout(output):
            regression.main(parse_config(regression.Config))
    except (Exception, SystemExit) as error:
        return error, output.getvalue()
    finally:
        sys.argv = words
    return None, output.getvalue()


class Killed(BaseException):
    """Ends a run as kill -9 does: nothing catches it."""


def run_until_killed(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, *flags: object
) -> None:
    """Run until the function `where.name` is called, and end there as if killed."""

    def kill(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(where, name, kill)
        patch.setattr(Run, "__exit__", lambda self, *_: self.directory.release())
        with pytest.raises(Killed):
            run(*flags)


def unfinished_run(directory: Path, *flags: object) -> Path:
    """Return a run that was killed before its end, with a best model."""
    evaluated = ("--eval-every", 1, "--checkpoint-every", 1)
    error, _ = run(*FLAGS, *evaluated, *flags, "--output-dir", directory)
    assert error is None
    shutil.rmtree(directory / "model")
    (directory / "summary.json").unlink()
    (directory / "status.json").write_text('{"status": "running", "global_step": 3}')
    shutil.rmtree(step_folders(directory / "checkpoints")[-1])
    return directory


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def newest_checkpoint_digests(directory: Path) -> tuple[int, dict[str, str]]:
    """Return the step of the newest whole checkpoint, and digests of its model and optimizer."""
    newest, _ = newest_whole(directory / "checkpoints", None, saved_run_id(directory) or "")
    if newest is None:
        return 0, {}
    names = ("model", "optimizer", "scheduler")
    files = {name: newest / f"{name}.safetensors" for name in names}
    digests = {name: digest(path) for name, path in files.items() if path.exists()}
    return int(newest.name.removeprefix("step-")), digests
