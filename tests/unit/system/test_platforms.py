"""Features of the operating system: one module asks for them, and uses them where they exist."""

from __future__ import annotations

import ast
import codecs
import errno
import functools
import io
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from common.failures.disk_errors import advice_for, is_disk_error
from common.storage.files import replacing, write_text
from common.system.platforms import (
    commands,
    current,
    files,
    limits,
    messages,
    signals,
)
from common.system.printable import PLAIN
from tests.launch import REPOSITORY

COMMON = {path: path.read_text(encoding="utf-8") for path in (REPOSITORY / "common").rglob("*.py")}
# These run on GPU machines with Linux.
OF_GPU_MACHINES = (
    "benchmarks/gpu.py",
    "benchmarks/gpu_session/step.py",
    "benchmarks/gpu_session/steps.py",
    "benchmarks/bring.py",
    "benchmarks/harness/bare_environment.py",
)
PORTABLE = {
    path: path.read_text(encoding="utf-8")
    for folder in ("recipes", "benchmarks")
    for path in (REPOSITORY / folder).rglob("*.py")
    if path.relative_to(REPOSITORY).as_posix() not in OF_GPU_MACHINES
} | COMMON
ON_ALL_SYSTEMS = {"SIGINT", "SIGTERM", "SIG_DFL", "SIG_IGN"}


def nodes(sources: dict[Path, str]) -> Iterator[tuple[str, ast.AST]]:
    """Yield each call, attribute, import and constant in some files, after its file and line."""
    for path, text in sources.items():
        for node in nodes_of(text):
            yield f"{path.relative_to(REPOSITORY)}:{node.lineno}", node


@functools.cache
def nodes_of(text: str) -> list[Any]:
    """Return the nodes of a file that the tests below check."""
    node_types = (ast.Call, ast.Attribute, ast.Import, ast.ImportFrom, ast.Constant)
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, node_types)]


def dotted(node: ast.AST) -> str:
    """Return ``a.b`` of an attribute of a name, else the last part alone."""
    if isinstance(node, ast.Attribute):
        return f"{node.value.id}.{node.attr}" if isinstance(node.value, ast.Name) else node.attr
    return node.id if isinstance(node, ast.Name) else ""


# Rules for all source files.


def test_one_package_knows_the_system() -> None:
    """Other modules neither ask for the system nor use functions that some systems lack."""
    names_of_systems = {name for name in vars(current) if name.startswith("IS_")} | {"SYSTEM"}
    lacking = {
        "sys.platform",
        "os.name",
        "platform.system",
        "os.rename",
        "os.replace",
        "os.fsync",
        "os.fork",
        "os.killpg",
        "os.setsid",
        "os.statvfs",
        "os.getloadavg",
        "os.getuid",
        "os.sched_getaffinity",
        "os.O_NONBLOCK",
        "os.O_DIRECTORY",
        "shlex.quote",
        "shlex.split",
    }
    for place, node in nodes(COMMON):
        if place.startswith("common/system/platforms/"):
            continue
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            assert name not in lacking, place
            is_signal = name.startswith("signal.SIG")
            assert not is_signal or node.attr in ON_ALL_SYSTEMS, place
        if isinstance(node, ast.Import):
            assert not {alias.name for alias in node.names} & {"fcntl", "resource", "pty"}, place
        if isinstance(node, ast.ImportFrom):
            assert not {alias.name for alias in node.names} & names_of_systems, place


def test_text_files_name_their_encoding() -> None:
    """Windows has another default."""
    for place, node in nodes(PORTABLE):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        keywords = {keyword.arg for keyword in node.keywords}
        words = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        is_binary = any(isinstance(word, str) and "b" in word and len(word) < 4 for word in words)
        is_text = (name == "open" and not is_binary) or name.endswith(("read_text", "write_text"))
        opens_path = isinstance(node.func, ast.Attribute) and name.rpartition(".")[2] == "open"
        has_mode = any(word in ("r", "w", "a", "x") for word in words)
        if (is_text and name != "write_text") or (opens_path and has_mode):
            is_stream = "closefd" in keywords  # of standard input or output
            assert "encoding" in keywords or is_stream, place
        if name in ("subprocess.run", "subprocess.Popen"):
            assert "text" not in keywords, place


def test_every_symbol_has_a_lookalike() -> None:
    """A line stays readable where its characters cannot be printed."""
    symbols = set()
    for _, node in nodes(COMMON):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            symbols |= {letter for letter in node.value if not letter.isascii()}
    symbols = {symbol for symbol in symbols if symbol.isprintable()}
    assert "★" in symbols
    for symbol in symbols | set("⠋⠙━╸"):
        assert "\\" not in symbol.encode("ascii", PLAIN).decode(), symbol


def test_unprintable_letters_are_escaped() -> None:
    """Printable ones stay, and invalid bytes still raise an error when read."""
    file = io.TextIOWrapper(io.BytesIO(), "cp1252", PLAIN)
    file.write("2 × 3 → é ж")
    file.flush()
    assert file.buffer.getvalue().decode("cp1252") == "2 × 3 -> é \\u0436"  # type: ignore[attr-defined]
    with pytest.raises(UnicodeDecodeError):
        codecs.decode(b"\xff", "utf-8", PLAIN)


# Files.


@pytest.mark.parametrize("move", [files.rename_path, files.replace_file])
def test_moving_an_open_file_waits(move: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Some systems refuse it for a moment. On others, a refusal is an error at once."""
    real = os.rename
    refusals = 3

    def busy(source: Path, target: Path) -> None:
        nonlocal refusals
        refusals -= 1
        if refusals >= 0:
            raise PermissionError(errno.EACCES, "it is open")
        real(source, target)

    monkeypatch.setattr(files, "os", SimpleNamespace(rename=busy, replace=busy))
    (tmp_path / "a").touch()
    with pytest.raises(PermissionError):
        move(tmp_path / "a", tmp_path / "b")
    assert refusals == 2
    monkeypatch.setattr(files, "CAN_MOVE_OPEN_FILES", False)
    move(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").exists()


def test_file_that_stays_open_is_an_error(tmp_path: Path, monkeypatch: Any) -> None:
    """The error comes after some seconds, and the file stays unchanged."""
    write_text(tmp_path / "status.json", "before")
    monkeypatch.setattr(files, "CAN_MOVE_OPEN_FILES", False)
    monkeypatch.setattr(files, "MOVE_RETRY_SECONDS", 0.1)

    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EACCES, "it is open")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(UserError, match="it is open"):
        write_text(tmp_path / "status.json", "after")
    assert [*tmp_path.iterdir()] == [tmp_path / "status.json"]
    assert (tmp_path / "status.json").read_text(encoding="utf-8") == "before"


def test_folders_are_synced_where_possible(tmp_path: Path, monkeypatch: Any) -> None:
    """Files always are, and are opened for writing if the system needs that."""
    opened: list[tuple[Path, int]] = []
    real = os.open

    def opening(path: Path, flags: int) -> int:
        opened.append((path, flags))
        return real(path, flags)

    functions = {name: getattr(os, name) for name in ("O_RDONLY", "rename", "fsync", "close")}
    monkeypatch.setattr(files, "os", SimpleNamespace(**functions, open=opening))
    with replacing(tmp_path / "whole") as unfinished:
        (unfinished / "file").touch()
    assert [path.name for path, _ in opened] == ["file", "whole.unfinished", tmp_path.name]
    opened.clear()
    monkeypatch.setattr(files, "CAN_SYNC_FOLDERS", False)
    monkeypatch.setattr(files, "SYNC_MODE", os.O_RDWR)
    with replacing(tmp_path / "whole") as unfinished:
        (unfinished / "file").touch()
    assert [(path.name, flags) for path, flags in opened] == [("file", os.O_RDWR)]


@pytest.mark.parametrize("is_refused", [False, True])
def test_drive_flushes_its_cache(
    is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apple's systems have a call for it. A file system without it is synced as usual."""
    sync_calls: list[str] = []

    def control(descriptor: int, command: int) -> None:
        sync_calls.append("full")
        if is_refused:
            raise OSError(errno.ENOTSUP, "not here")

    monkeypatch.setattr(files, "fcntl", SimpleNamespace(F_FULLFSYNC=51, fcntl=control))
    monkeypatch.setattr(os, "fsync", lambda descriptor: sync_calls.append("fsync"))
    files.sync(tmp_path)
    assert sync_calls == (["full", "fsync"] if is_refused else ["full"])


def test_text_has_the_same_bytes_everywhere(tmp_path: Path, monkeypatch: Any) -> None:
    """Line ends do not change, because digests are compared across systems."""
    monkeypatch.setattr(os, "linesep", "\r\n")
    write_text(tmp_path / "file", "a\nb\n")
    assert (tmp_path / "file").read_bytes() == b"a\nb\n"


def test_lock_is_tested_by_taking_it(tmp_path: Path, monkeypatch: Any) -> None:
    """This is for systems without shared locks. The lock file stays in place."""
    monkeypatch.setattr(files, "fcntl", None)
    lock_file = tmp_path / ".lock"
    assert not files.is_unlocked(lock_file)
    lock_file.touch()
    assert files.is_unlocked(lock_file)
    assert lock_file.exists()
    with FileLock(lock_file):
        assert not files.is_unlocked(lock_file)


# Processes and signals.


def test_only_existing_signals_are_named() -> None:
    """They are looked up by number, and each has its name to print."""
    assert signals.signals_named(["SIGINT", "SIGNONE"]) == {signal.SIGINT: "SIGINT"}
    assert signals.STOP_SIGNAL_NAMES[signal.SIGTERM] == "SIGTERM"


def test_workers_start_as_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers fork on Linux only, unless the program chose a method."""
    monkeypatch.setattr("multiprocessing.get_start_method", lambda allow_none: None)
    monkeypatch.setattr(current, "IS_LINUX", True)
    assert limits.worker_start_method() == "fork"
    monkeypatch.setattr(current, "IS_LINUX", False)
    assert limits.worker_start_method() == "spawn"
    monkeypatch.setattr("multiprocessing.get_start_method", lambda allow_none: "forkserver")
    assert limits.worker_start_method() == "forkserver"


@pytest.mark.parametrize(("method", "is_held_back"), [("spawn", True), ("fork", False)])
def test_spawned_process_receives_no_request_to_stop(
    method: str, is_held_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot ignore one yet. This process handles the signal once the other has started."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    monkeypatch.setattr(signals, "worker_start_method", lambda: method)
    code = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    try:
        with signals.stop_signals_held_back():
            answer = subprocess.check_output([sys.executable, "-c", code], encoding="utf-8")
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            assert received == ([] if is_held_back else [signal.SIGTERM])
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert answer.strip() == str(is_held_back)


def test_end_of_the_parent_is_noticed_without_the_kernel(tmp_path: Path) -> None:
    """A thread checks for it."""
    child = (
        "import signal, sys, threading\n"
        "from common.system.platforms import current, process_tree\n"
        "current.IS_LINUX, process_tree.PARENT_LOOK_SECONDS = False, 0.05\n"
        "came = threading.Event()\n"
        "signal.signal(process_tree.PARENT_ENDED, lambda *_: came.set())\n"
        "process_tree.signal_when_parent_ends()\n"
        "print('ready', flush=True)\n"
        "if came.wait(30):\n"
        "    open(sys.argv[1], 'w', encoding='utf-8').write('noticed')\n"
    )
    parent = (
        "import subprocess, sys\n"
        "words = [sys.executable, '-c', sys.argv[1], sys.argv[2]]\n"
        "subprocess.Popen(words, stdout=subprocess.PIPE).stdout.readline()\n"
    )
    result_path = tmp_path / "told"
    subprocess.run([sys.executable, "-c", parent, child, str(result_path)], check=True, timeout=60)
    wait_until_written(result_path)
    assert result_path.read_text(encoding="utf-8") == "noticed"


def wait_until_written(path: Path) -> None:
    """Wait for the contents of a file."""
    deadline = time.monotonic() + 30
    while not (path.exists() and path.stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.02)


# Command lines that a shell or Windows splits into the same words again.


@given(st.lists(st.text(st.characters(exclude_characters="\x00", codec="utf-8"))))
def test_posix_command_can_be_pasted(words: list[str]) -> None:
    """The shell and `split_words` give back the same words."""
    assert shlex.split(commands.command_line(words)) == words
    assert commands.split_words(commands.command_line(words)) == words


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["python", r"recipes\bert.py"], r"python recipes\bert.py"),
        (["--resume", r"C:\my runs\a"], '--resume "C:\\my runs\\a"'),
        (["--choices", "8 16"], '--choices "8 16"'),
    ],
)
def test_windows_command_can_be_pasted(
    words: list[str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, backslashes belong to paths, and single quotes mean nothing."""
    monkeypatch.setattr(current, "IS_WINDOWS", True)
    assert commands.command_line(words) == line
    assert commands.split_words(line) == words


def test_path_on_another_drive_is_shown_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """No relative path leads there."""

    def refuse(path: object) -> str:
        raise ValueError("path is on mount 'D:', start on mount 'C:'")

    monkeypatch.setattr(os.path, "relpath", refuse)
    path = Path("/other/runs").absolute()
    assert commands.shown_path(path) == str(path)


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("runs/a", "runs/a"),
        ("{here}/runs/a", "runs/a"),
        ("{here}", "."),
        ("..a/b", "..a/b"),
        ("..", "{parent}"),
        ("../other", "{parent}/other"),
        ("{parent}/here-too/a", "{parent}/here-too/a"),
        ("{here}/../other", "{parent}/other"),
    ],
)
def test_path_is_relative_only_inside_the_current_folder(
    path: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path with "../" would be hard to find from another folder."""
    folders = {"here": str(tmp_path / "here"), "parent": str(tmp_path)}
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert commands.shown_path(Path(path.format(**folders))) == shown.format(**folders)


# Messages of the system.


def test_meaningless_messages_match_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has one message for all network errors, and another for a full disk."""
    monkeypatch.setattr(os, "strerror", lambda number: "Unknown error")
    assert messages.error_texts(errno.EPIPE, errno.EDQUOT) == ()
    monkeypatch.undo()
    full = "There is not enough space on the disk. (os error 112)"
    assert is_disk_error(RuntimeError(full))
    assert advice_for(full, error_number=None) == "free some space"
    assert advice_for("Nicht genug Speicherplatz", errno.ENOSPC) == "free some space"
    assert advice_for(os.strerror(errno.ENOENT), errno.ENOSPC) == "free some space"
    assert is_disk_error(OSError(errno.ENOSPC, "Nicht genug Speicherplatz"))
    assert not is_disk_error(OSError(errno.ENOENT, "Unknown error"))


@pytest.mark.parametrize(
    ("is_linux", "can_sync", "names", "lacking"),
    [
        (True, True, ["SIGUSR1"], 0),
        (False, True, ["SIGUSR1"], 1),
        (False, False, ["SIGINT"], 3),
    ],
)
def test_missing_features_are_listed_in_one_line(
    is_linux: bool, can_sync: bool, names: list[str], lacking: int, monkeypatch: Any
) -> None:
    """Linux lacks none."""
    monkeypatch.setattr(current, "IS_LINUX", is_linux)
    monkeypatch.setattr(files, "CAN_SYNC_FOLDERS", can_sync)
    monkeypatch.setattr(signals, "STOP_SIGNAL_NAMES", dict(enumerate(names)))
    line = messages.system_limits()
    assert (line is None) == (lacking == 0)
    assert len([] if line is None else line.split("; ")) == lacking
