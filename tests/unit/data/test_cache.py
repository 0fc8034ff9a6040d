"""Caches of prepared data: complete and verified, or prepared again.

A full disk is one sentence.
"""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.data import tokens
from common.data.image_decoding import preparation
from common.data.prepared_data import cache
from common.data.prepared_data.cache import cached
from common.data.sources import DataSource
from common.errors import UserError
from common.storage import files
from tests.conftest import first
from tests.local_data import sentences, write_csv, write_image_folder
from tests.unit.data import loading
from tests.unit.data.loading import refusal

SOURCE = DataSource("mine", "/mine", None, "named", "1")


def numbers(source: DataSource, folder: Path, count: int) -> dict[str, Any]:
    """Prepare two splits of numbers, and note the call in `times.txt`."""
    with (folder.parent / "times.txt").open("a") as times:
        times.write("once\n")
    (folder / "more").mkdir()
    (folder / "more" / "words.txt").write_text("words")
    for split in ("train", "test"):
        cache.write_array(folder / f"{split}_x.npy", [np.arange(count), np.arange(3)], count + 3)
    return {"splits": ["train", "test"], "mean": 0.1, "notes": ("a",)}


def load(count: int = 5) -> tuple[Path, dict[str, Any], dict[str, list[np.ndarray]]]:
    """Return the cache's folder, the facts, and each split's arrays."""
    return cached(SOURCE, numbers, "numbers-1", ("x",), {"count": count})


def times() -> int:
    """Return how often numbers were prepared."""
    return len((load()[0].parent / "times.txt").read_text().splitlines())


def test_array_written_in_parts_equals_numpys_file(tmp_path: Path) -> None:
    """The file has the bytes that `numpy.save` writes."""
    whole = np.arange(42, dtype=np.uint8).reshape(7, 3, 2)
    cache.write_array(tmp_path / "a.npy", [whole[:4], whole[4:]], 7)
    np.save(tmp_path / "b.npy", whole)
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()


def test_fingerprint_depends_on_the_samples_only(tmp_path: Path) -> None:
    """Neither place nor time of the files matters, but one changed label does."""
    columns = sentences(12, 0)
    write_csv(tmp_path / "here" / "train.csv", columns)
    write_csv(tmp_path / "there" / "train.csv", columns)
    columns["label"][0] = columns["label"][1]
    write_csv(tmp_path / "changed" / "train.csv", columns)
    here, there, changed = (
        loading.text(tmp_path / name).facts().fingerprint for name in ("here", "there", "changed")
    )
    assert here == there != changed


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def moved_away(path: Path) -> None:
    path.unlink()


def made_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def made_another(path: Path) -> None:
    """Put another file of the same size and age in its place."""
    stat = path.stat()
    other = path.with_name("other")
    other.write_bytes(bytes(stat.st_size))
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(path)


def changed_in_place(path: Path) -> None:
    """Overwrite the file itself with as many other bytes, and set its time back."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.write(bytes(stat.st_size))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


DAMAGE = (emptied, truncated, zeroed, moved_away, made_a_folder, made_another, changed_in_place)
FILES = ("train_x.npy", "test_x.npy", "facts.json", "more/words.txt")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_cache_is_prepared_again(
    damage: Callable[[Path], None], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any of its files may be damaged in any way. One line says so, and the data are the same."""
    folder, facts, _ = load()
    assert facts == {"mean": 0.1, "notes": ["a"], "fingerprint": facts["fingerprint"]}
    assert not capsys.readouterr().out
    damage(folder / name)
    _, new_facts, arrays = load()
    assert arrays["train"][0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert (folder / "more" / "words.txt").read_text() == "words"
    assert new_facts == facts
    (line,) = capsys.readouterr().out.splitlines()
    assert str(folder) in line
    assert "made again" in line
    assert "restore it from a backup" not in line
    assert times() == 2
    assert not capsys.readouterr().out


@pytest.mark.parametrize("damage", DAMAGE)
def test_lost_stamp_does_not_invalidate_a_cache(damage: Callable[[Path], None]) -> None:
    """The stamp only notes that the cache was verified, so it is verified again."""
    damage(load()[0] / cache.SEEN)
    load()
    assert times() == 1


def test_digests_are_compared_once_after_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copied cache is verified at its first start, not after preparation or at each start."""
    read: list[str] = []
    digest = cache.sha256_of_file
    folder = load()[0]
    monkeypatch.setattr(cache, "sha256_of_file", lambda p: read.append(p.name) or digest(p))
    load()
    assert not read
    shutil.copytree(folder, folder.with_name("copy"))
    shutil.rmtree(folder)
    folder.with_name("copy").rename(folder)
    load()
    assert sorted(read) == ["test_x.npy", "train_x.npy", "words.txt"]
    load()
    assert len(read) == 3


def test_read_only_cache_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole cache needs neither a lock nor a new stamp."""
    folder = load()[0]
    (folder / cache.SEEN).unlink()

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files.FileLock, "acquire", refuse)
    monkeypatch.setattr("common.storage.files.os.replace", refuse)
    _, _, arrays = load()
    assert arrays["test"][0][-1] == 2
    assert not (folder / cache.SEEN).exists()
    assert times() == 1


def test_mapped_arrays_survive_a_new_preparation() -> None:
    """A process that mapped the old files still reads the same values."""
    folder, _, arrays = load()
    emptied(folder / "test_x.npy")
    load()
    assert arrays["train"][0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert not folder.with_name(folder.name + ".old").exists()


def slow_numbers(source: DataSource, folder: Path, count: int) -> dict[str, Any]:
    time.sleep(0.2)
    return numbers(source, folder, count)


def load_slowly(results: Any) -> None:
    loaded = cached(SOURCE, slow_numbers, "numbers-1", ("x",), {"count": 5})
    results.put(loaded[2]["train"][0].tolist())


@pytest.mark.parametrize("damage", [None, truncated])
def test_one_of_several_processes_prepares(damage: Callable[[Path], None] | None) -> None:
    """The others wait and load the same data, even if a damaged cache was there before."""
    if damage is not None:
        damage(load()[0] / "train_x.npy")
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=load_slowly, args=(results,)) for _ in range(4)]
    for process in processes:
        process.start()
    loaded = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert loaded == [[0, 1, 2, 3, 4, 0, 1, 2]] * 4
    assert times() == (1 if damage is None else 2)


# Disks that fill, and preparations that are interrupted.


def write_pets(folder: Path) -> Callable[[], Any]:
    write_image_folder(folder, ["cat", "dog"], 4)
    return lambda: loading.images(folder)


def write_words(folder: Path) -> Callable[[], Any]:
    write_csv(folder / "train.csv", sentences(12, 0))
    return lambda: loading.text(folder)


# All calls that touch the disk while data are prepared.
POINTS: tuple[tuple[Any, str], ...] = (
    *((module, "write_array") for module in (preparation, tokens)),
    *((cache, name) for name in ("sha256_of_file", "write_json")),
    *((files, name) for name in ("sync", "rename_path")),
    *((Path, name) for name in ("mkdir", "write_text")),
)


class FailingDisk:
    """Notes each call of POINTS below a folder, and makes one of them fail."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.calls: list[str] = []
        self.failing_call: int | None = None
        self.error_number = errno.ENOSPC
        for owner, name in POINTS:
            monkeypatch.setattr(owner, name, self.wrapped(getattr(owner, name), name))

    def fail_at(self, call_number: int, error_number: int) -> None:
        """Let a call fail, counted from now on."""
        self.calls.clear()
        self.failing_call = call_number
        self.error_number = error_number

    def work_again(self) -> None:
        self.failing_call = None

    def wrapped(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if any(str(self.root) in str(value) for value in args):
                self.calls.append(name)
                if len(self.calls) - 1 == self.failing_call:
                    message = os.strerror(self.error_number)
                    problem = OSError(self.error_number, message, str(args[0]))
                    raise UserError(str(problem)) if name == "write_json" else problem
            return function(*args, **kwargs)

        return call


@pytest.mark.parametrize("write", first(1, [write_pets, write_words]))
def test_any_failed_disk_call_gives_one_sentence(
    write: Callable[[Path], Callable[[], Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    thorough: bool,
) -> None:
    """It names the cache and the remedy, leaves no half of a cache, and the next start works."""
    load_data = write(tmp_path / "mine")
    root = tmp_path / "cache" / "accelerate-recipes"
    disk = FailingDisk(root, monkeypatch)
    load_data()
    all_calls = [*disk.calls]
    assert {*all_calls} == {name for _, name in POINTS}
    error_numbers = itertools.cycle([errno.ENOSPC, errno.EIO, errno.EACCES])
    for (call_number, name), error_number in zip(enumerate(all_calls), error_numbers, strict=False):
        if not thorough and name in all_calls[:call_number]:
            continue  # only the first call of each function
        shutil.rmtree(root.parent)
        disk.fail_at(call_number, error_number)
        try:
            load_data()
            # A run works without the lock's folder and without stamps.
            assert name in ("mkdir", "write_json", "write_text")
        except UserError as error:
            message = error.message
            assert "XDG_CACHE_HOME" in message
            assert str(root) in message
            assert os.strerror(error_number) in message
            assert "\n" not in message
        caches = [path for path in root.glob("*") if path.is_dir()]
        assert all((path / "facts.json").exists() for path in caches), (name, caches)
        disk.work_again()
        load_data()


def test_failure_to_save_a_tokenizer_gives_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk gives one sentence, though the tokenizer's library raises no OSError."""
    from transformers import BertTokenizer

    load_words = write_words(tmp_path / "words")

    def save(*_: Any, **__: Any) -> None:
        raise Exception("No space left on device (os error 28)")

    with monkeypatch.context() as patched:
        patched.setattr(BertTokenizer, "save_pretrained", save)
        message = refusal(load_words)
    assert "No space left" in message
    assert "XDG_CACHE_HOME" in message
    load_words()


def test_full_disk_inside_a_library_gives_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message does not blame the data if `datasets` could not write."""
    load_words = write_words(tmp_path / "words")

    def read(*_: Any, **__: Any) -> None:
        from datasets.exceptions import DatasetGenerationError

        problem = OSError(errno.ENOSPC, "No space left on device")
        raise DatasetGenerationError("An error occurred") from problem

    with monkeypatch.context() as patched:
        patched.setattr("datasets.load_dataset", read)
        message = refusal(load_words)
    assert "XDG_CACHE_HOME" in message
    assert "No space left" in message
    load_words()


def test_file_in_place_of_the_cache_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`XDG_CACHE_HOME` may name a file."""
    load_pets = write_pets(tmp_path / "pets")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    message = refusal(load_pets)
    assert "XDG_CACHE_HOME" in message
    assert str(tmp_path / "file") in message


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_interrupted_preparation_leaves_nothing(end: type[BaseException]) -> None:
    """No half of a cache is left, and the lock is free."""

    def interrupted(source: DataSource, folder: Path, count: int) -> dict[str, Any]:
        (folder / "half.npy").write_text("half")
        raise end

    with pytest.raises(end):
        cached(SOURCE, interrupted, "numbers-1", ("x",), {"count": 5})
    folder = load()[0]
    assert {path.name for path in folder.parent.iterdir() if path.is_dir()} == {folder.name}
