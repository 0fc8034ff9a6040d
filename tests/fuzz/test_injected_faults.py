"""Each call that changes the disk fails once: a sentence says so, and nothing saved is lost."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from common.errors import UserError
from common.run_directory.records import MANIFEST
from tests.small_run import FLAGS, STEPS, digest, newest_checkpoint_digests, prepared, run

pytestmark = pytest.mark.usefixtures("quick_runs")

# How the run begins, the errors that calls fail with in turn, and which of every eight calls fail.
FAULTS = [
    pytest.param("resumed", (errno.ENOSPC,), {0}, id="resumed-some"),
    *(
        pytest.param(begins, numbers, calls, marks=pytest.mark.exhaustive, id=f"{begins}-{name}")
        for begins, name, numbers, calls in (
            ("resumed", "the rest", (errno.EIO, errno.ENOSPC, errno.EACCES), {*range(1, 8)}),
            ("with a model", "all", (errno.ENOSPC, errno.EIO, errno.EACCES), {*range(8)}),
        )
    ),
]
# The functions by which a run makes, changes and removes files, besides `open` and `write`.
CALLS: list[tuple[Any, str]] = [
    *((os, n) for n in ("open", "mkdir", "fsync", "replace", "rename", "unlink", "rmdir")),
    (shutil, "copytree"),
    (safetensors.torch, "save_file"),
]


class Disk:
    """A disk that fails once, at the n-th call that changes a file under a folder."""

    def __init__(self, folder: Path, fails_at: int, number: int) -> None:
        self.folder = str(folder)
        self.fails_at = fails_at
        self.number = number  # of the error
        self.calls: list[str] = []

    def count(self, name: str, *arguments: Any) -> None:
        """Count a call, and raise if it is the one that fails."""
        paths = [argument for argument in arguments if isinstance(argument, (str, os.PathLike))]
        path = paths[0] if paths else None
        if path is None and arguments and isinstance(arguments[0], int):
            path = os.readlink(f"/proc/self/fd/{arguments[0]}")
        if path is None or not os.path.abspath(path).startswith(self.folder):
            return
        self.calls.append(f"{name} {Path(path).name}")
        if len(self.calls) - 1 == self.fails_at:
            raise OSError(self.number, os.strerror(self.number), os.fspath(path))

    def counting(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts before it does what `real` does."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            self.count(name, *arguments)
            return real(*arguments, **keywords)

        return call

    def open(self, path: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
        """Open a file; count the call and later writes if the file is opened to be written."""
        if not {*"wax+"} & {*mode}:
            return OPEN(path, mode, *arguments, **keywords)
        self.count("open", path)
        return Written(OPEN(path, mode, *arguments, **keywords), self, path)


class Written:
    """A file whose writes are counted."""

    def __init__(self, file: Any, disk: Disk, path: Any) -> None:
        self.file = file
        self.disk = disk
        self.path = path

    def write(self, data: Any) -> int:
        self.disk.count("write", self.path)
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> Written:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


OPEN = io.open


def failing(folder: Path, fails_at: int, number: int, *flags: object) -> tuple[Disk, Any, str]:
    """Run on a disk on which one call fails; return the disk and the results of `run`."""
    disk = Disk(folder, fails_at, number)
    with pytest.MonkeyPatch.context() as patch:
        for module, name in CALLS:
            patch.setattr(module, name, disk.counting(name, getattr(module, name)))
        for module in (io, builtins):
            patch.setattr(module, "open", disk.open)
        return disk, *run(*flags)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without faults."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    with prepared():
        assert run(*FLAGS, "--output-dir", directory)[0] is None
    return directory


def cut_off(whole: Path, directory: Path) -> None:
    """Make a copy of a run that was killed during a save and has a damaged checkpoint."""
    shutil.copytree(whole, directory)
    for name in ("model", "summary.json", "memory.json"):
        path = directory / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    checkpoints = directory / "checkpoints"
    (checkpoints / f"step-{STEPS[1]:08d}" / MANIFEST).write_bytes(b"{}")
    shutil.copytree(checkpoints / f"step-{STEPS[0]:08d}", checkpoints / "step-00000003.unfinished")
    status = {"status": "failed", "resumable": False, "reason": "before", "global_step": 4}
    (directory / "status.json").write_text(json.dumps(status))


@pytest.mark.parametrize(("begins", "numbers", "calls"), FAULTS)
def test_each_call_fails_once(
    tmp_path: Path, whole: Path, begins: str, numbers: tuple[int, ...], calls: set[int]
) -> None:
    """The same command then resumes from the newest whole checkpoint to the same weights."""
    model = Path("model", "model.safetensors")
    failed_calls = set()
    final = "" if begins == "with a model" else digest(whole / model)
    reference: dict[int, dict[str, str]] = {}
    for fails_at in (call for call in range(10_000) if call % 8 in calls):
        directory = tmp_path / "one" / "run"
        least = 0
        number = numbers[fails_at % len(numbers)]
        if begins == "resumed":
            cut_off(whole, directory)
            least = STEPS[0]
        flags = (*FLAGS, "--output-dir", directory, "--resume", "auto")
        if begins == "with a model":
            flags = (*flags, "--init-from", whole)
        disk, error, output = failing(directory.parent, fails_at, number, *flags)
        where = f"call {fails_at}, {disk.calls[fails_at : fails_at + 1]}: {error!r}\n{output}"
        step, digests = newest_checkpoint_digests(directory)
        assert step >= least, where
        assert reference.setdefault(step, digests) == digests, where
        if len(disk.calls) > fails_at:
            failed_calls.add(disk.calls[fails_at].split()[0])
            assert error is None or isinstance(error, UserError), where
            status = directory / "status.json"
            if error is not None and number != errno.EACCES and status.exists():
                assert json.loads(status.read_text())["resumable"], where
            if error is not None:
                error, output = run(*flags)
        assert error is None, f"{where}\nthen {error!r}\n{output}"
        final = final or digest(directory / model)
        assert digest(directory / model) == final, where
        assert newest_checkpoint_digests(directory)[0] == STEPS[-1], where
        if len(disk.calls) <= fails_at:
            break
        shutil.rmtree(directory.parent)
    every_call = {"open", "write", "mkdir", "fsync", "replace", "rename", "unlink", "save_file"}
    assert failed_calls >= every_call or len(calls) == 1
    assert reference.keys() == {0, *STEPS} if begins != "resumed" else {*STEPS}
