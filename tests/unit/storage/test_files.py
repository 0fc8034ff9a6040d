"""Files are written completely or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from common.storage.files import write_text
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
