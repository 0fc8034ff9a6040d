"""JSON files: NaN becomes null, and a damaged file gives one sentence."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path

import pytest

from common.errors import UserError
from common.storage.json_files import (
    json_safe,
    read_json,
    read_json_if_there,
    read_lines,
    write_json,
)

VALUE = {"name": "größer", "list": [1, 2.5, None, True], "object": {"a": "b"}}


def test_json_survives_a_round_trip(tmp_path: Path) -> None:
    """The file is UTF-8, replaced atomically, and nothing is left beside it."""
    path = tmp_path / "value.json"
    write_json(path, {"other": 1})
    write_json(path, VALUE)
    assert read_json(path) == read_json_if_there(path) == VALUE
    assert [*tmp_path.iterdir()] == [path]


def test_nan_and_infinity_become_null(tmp_path: Path) -> None:
    """NaN and infinity are written as null, and read as None from files that others wrote."""
    path = tmp_path / "value.json"
    value = {"a": float("nan"), "b": [float("inf"), 1.0], "c": {"d": (-float("inf"), 2)}}
    expected = {"a": None, "b": [None, 1.0], "c": {"d": [None, 2]}}
    assert json_safe(value) == expected
    write_json(path, value)
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == expected
    path.write_text('{"a": NaN, "b": [Infinity, -Infinity], "step": 1}\n')
    assert read_json(path) == {"a": None, "b": [None, None], "step": 1}
    assert read_lines(path, "step") == [{"a": None, "b": [None, None], "step": 1}]


def test_missing_file_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    """A file instead of its folder counts as missing, too."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "none.json", tmp_path / "file" / "none.json"):
        assert read_json_if_there(path) is None
        assert read_lines(path, "step") == []
        with pytest.raises(UserError, match=r"none\.json does not exist"):
            read_json(path)
    with pytest.raises(UserError, match="can't be read"):
        read_json_if_there(tmp_path)
    with pytest.raises(UserError, match="can't be read"):
        read_lines(tmp_path, "step")


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"null", b"\x00", b"\xff{}", b"[" * 10**5])
def test_json_that_is_no_object_is_refused(content: bytes, tmp_path: Path) -> None:
    """The message names the file."""
    path = tmp_path / "value.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"value\.json"):
        read_json_if_there(path)


def test_damaged_json_never_raises_another_exception(tmp_path: Path) -> None:
    """The file is cut at each byte, or a random byte changes: one sentence, or another object."""
    path = tmp_path / "value.json"
    generator = random.Random(0)
    whole = json.dumps(VALUE).encode()
    damaged = [whole[:length] for length in range(len(whole))]
    for _ in range(500):
        changed = bytearray(whole)
        changed[generator.randrange(len(whole))] = generator.randrange(256)
        damaged.append(bytes(changed))
    readable = 0
    for content in damaged:
        path.write_bytes(content)
        with contextlib.suppress(UserError):
            assert isinstance(read_json(path), dict)
            readable += 1
    assert readable < 500


def test_incomplete_line_is_left_out_and_damaged_one_is_named(tmp_path: Path) -> None:
    """The file is cut at each byte, as if the run was still writing or had been killed."""
    path = tmp_path / "rows.jsonl"
    rows = [{"step": step, "text": "ü"} for step in range(4)]
    lines = [json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows]
    whole = b"".join(lines)
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        read_rows = read_lines(path, "step")
        # A line that lacks only its newline counts as complete.
        assert read_rows == rows[: (whole[:length] + b"\n").count(b"}\n")]
    for damaged in (
        b"[1]\n",
        b"\n",
        b"{}\n",
        b'{"step": null}\n',
        b'{"a": \xff}\n',
        b"[" * 10**5 + b"\n",
    ):
        path.write_bytes(lines[0] + damaged + lines[1])
        with pytest.raises(UserError, match=r"rows\.jsonl, line 2, is damaged"):
            read_lines(path, "step")
        messages: list[str] = []
        assert read_lines(path, "step", messages.append) == rows[:2]
        assert messages == [f"{path}, line 2, is damaged and was left out"]


@pytest.mark.parametrize("text", ["{", "[1]", None])
def test_unreadable_json_names_the_action(tmp_path: Path, text: str | None) -> None:
    """The error keeps problem and action apart, for sentences with another action."""
    path = tmp_path / "value.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as refused:
        read_json(path)
    assert (
        refused.value.message
        == f"{refused.value.problem}: restore it from a backup, or start a new run"
    )
