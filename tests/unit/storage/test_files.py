"""Files are written completely or not at all."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from common.errors import UserError
from common.storage import files
from common.storage.files import locked, require_writable, write_text
from common.storage.json_files import read_json, write_json

VALUE = {"name": "größer", "list": [1, 2.5, None, True], "object": {"a": "b"}}


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence has the file and the system's reason, and no partial file stays."""
    path = tmp_path / "value.json"
    write_json(path, VALUE)

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UserError, match=r"value\.json .*No space left on device"):
        write_text(path, "other")
    assert [*tmp_path.iterdir()] == [path]
    assert read_json(path) == VALUE


@pytest.mark.parametrize("path", ["/proc/self/none", "/dev/null/none", "x" * 300])
def test_impossible_path_gives_one_sentence(path: str) -> None:
    """The system may refuse it for any reason."""
    with pytest.raises(UserError, match="can't be made or written"):
        write_text(Path(path), "text")


@pytest.mark.parametrize("name", ["old", "new", "folder", "missing/new", "old/new", "x" * 300])
def test_check_of_a_path_changes_nothing(name: str, tmp_path: Path) -> None:
    """The check refuses what a write would refuse, and leaves neither a file nor a change."""
    (tmp_path / "old").write_text("text")
    (tmp_path / "folder").mkdir()
    if name in ("old", "new"):
        require_writable(tmp_path / name, "--html FILE")
    else:
        with pytest.raises(UserError, match="--html FILE can't be made or written"):
            require_writable(tmp_path / name, "--html FILE")
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "folder", tmp_path / "old"]
    assert (tmp_path / "old").read_text() == "text"


def test_long_wait_for_a_lock_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wait ends when the other job ends, or when the timeout ends; a short one is silent."""
    monkeypatch.setattr(files, "SILENT_WAIT", 0.1)
    lock = tmp_path / ".lock"
    is_taken = threading.Event()
    may_end = threading.Event()

    def other_job() -> None:
        with FileLock(lock):
            is_taken.set()
            may_end.wait()

    other = threading.Thread(target=other_job)
    other.start()
    is_taken.wait()
    with pytest.raises(UserError, match="another job is writing"), locked(lock, 0.1):
        pass
    assert capsys.readouterr().out == ""
    with pytest.raises(UserError, match="another job is writing"), locked(lock, 0.2):
        pass
    sentence = f"another job is writing to {tmp_path}; this one waits for up to 0 s\n"
    assert capsys.readouterr().out == sentence
    threading.Timer(1.0, may_end.set).start()
    with locked(lock, other_job="another job is preparing x"):
        assert capsys.readouterr().out == "another job is preparing x; this one waits\n"
    other.join()
