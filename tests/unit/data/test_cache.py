"""Caches of prepared data: whole and as they were, or made again; a full disk is a sentence."""

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

from common import files
from common.data import cache, decoding, tokens
from common.data.cache import cached
from common.data.sources import DataSource
from common.errors import UserError
from tests.local_data import sentences, write_csv, write_image_folder
from tests.unit.data import loading
from tests.unit.data.loading import refusal

SOURCE = DataSource("mine", "/mine", None, "named", "1")


def numbers(source: DataSource, folder: Path, count: int) -> dict[str, Any]:
    """Prepare two splits of numbers, and write down that it was done."""
    with (folder.parent / "times.txt").open("a") as times:
        times.write("once\n")
    (folder / "more").mkdir()
    (folder / "more" / "words.txt").write_text("words")
    for split in ("train", "test"):
        cache.write_array(folder / f"{split}_x.npy", [np.arange(count), np.arange(3)], count + 3)
    return {"splits": ["train", "test"], "mean": 0.1, "notes": ("a",)}


def load(count: int = 5) -> tuple[Path, dict[str, Any], dict[str, list[np.ndarray]]]:
    return cached(SOURCE, numbers, "numbers-1", ("x",), {"count": count})


def times() -> int:
    """Return how often numbers were prepared."""
    return len((load()[0].parent / "times.txt").read_text().splitlines())


def test_parts_of_an_array_are_one(tmp_path: Path) -> None:
    """Written part by part it is what NumPy writes and reads."""
    whole = np.arange(42, dtype=np.uint8).reshape(7, 3, 2)
    cache.write_array(tmp_path / "a.npy", [whole[:4], whole[4:]], 7)
    np.save(tmp_path / "b.npy", whole)
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()


def test_fingerprint_is_of_the_samples(tmp_path: Path) -> None:
    """Not of where the data lie or when they were written; one other label makes another."""
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
    """Put a file of the same size in its place, as old."""
    stat, other = path.stat(), path.with_name("other")
    other.write_bytes(bytes(stat.st_size))
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(path)


def changed_in_place(path: Path) -> None:
    """Write other bytes into the file itself, of the same size, and set its time back."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.write(bytes(stat.st_size))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


DAMAGE = (emptied, truncated, zeroed, moved_away, made_a_folder, made_another, changed_in_place)
FILES = ("train_x.npy", "test_x.npy", "facts.json", "more/words.txt")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_cache_is_made_again(
    damage: Callable[[Path], None], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever happened to any of its files: said in one line, and then as it was."""
    folder, facts, _ = load()
    assert facts == {"mean": 0.1, "notes": ["a"], "fingerprint": facts["fingerprint"]}
    assert not capsys.readouterr().out
    damage(folder / name)
    again = load()
    assert again[2]["train"][0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert (folder / "more" / "words.txt").read_text() == "words"
    assert again[1] == facts
    (line,) = capsys.readouterr().out.splitlines()
    assert str(folder) in line
    assert "made again" in line
    assert times() == 2
    assert not capsys.readouterr().out


@pytest.mark.parametrize("damage", DAMAGE)
def test_stamps_that_are_lost_cost_a_look(damage: Callable[[Path], None]) -> None:
    """What says that a cache was seen to be whole may be gone: it is looked at again."""
    damage(load()[0] / cache.SEEN)
    load()
    assert times() == 1


def test_digests_are_compared_where_a_stamp_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither when it was just made nor each time, but after a copy, once."""
    read: list[str] = []
    digest = cache.receipt_of
    folder = load()[0]
    monkeypatch.setattr(cache, "receipt_of", lambda p: read.append(p.name) or digest(p))
    load()
    assert not read
    shutil.copytree(folder, folder.with_name("copy"))
    shutil.rmtree(folder)
    folder.with_name("copy").rename(folder)
    load()
    assert sorted(read) == ["test_x.npy", "train_x.npy", "words.txt"]
    load()
    assert len(read) == 3


def test_cache_that_cannot_be_written_to_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole one needs neither a lock nor a note that it was looked at."""
    folder = load()[0]
    (folder / cache.SEEN).unlink()

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files.FileLock, "acquire", refuse)
    monkeypatch.setattr("common.files.os.replace", refuse)
    assert load()[2]["test"][0][-1] == 2
    assert not (folder / cache.SEEN).exists()
    assert times() == 1


def test_others_keep_what_they_have_mapped() -> None:
    """A cache that is made again does not change under those who read the one before."""
    before = load()
    emptied(before[0] / "test_x.npy")
    load()
    assert before[2]["train"][0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert not before[0].with_name(before[0].name + ".old").exists()


def slow_numbers(source: DataSource, folder: Path, count: int) -> dict[str, Any]:
    time.sleep(0.2)
    return numbers(source, folder, count)


def load_slowly(results: Any) -> None:
    found = cached(SOURCE, slow_numbers, "numbers-1", ("x",), {"count": 5})
    results.put(found[2]["train"][0].tolist())


@pytest.mark.parametrize("damage", [None, truncated])
def test_one_of_several_processes_prepares(damage: Callable[[Path], None] | None) -> None:
    """The others wait, and all have the same, also where there was a damaged one."""
    if damage is not None:
        damage(load()[0] / "train_x.npy")
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=load_slowly, args=(results,)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert found == [[0, 1, 2, 3, 4, 0, 1, 2]] * 4
    assert times() == (1 if damage is None else 2)


# Disks that fill, and other ends.


def write_pets(folder: Path) -> Callable[[], Any]:
    write_image_folder(folder, ["cat", "dog"], 4)
    return lambda: loading.images(folder)


def write_words(folder: Path) -> Callable[[], Any]:
    write_csv(folder / "train.csv", sentences(12, 0))
    return lambda: loading.text(folder)


# What touches the disk while data are prepared.
POINTS: tuple[tuple[Any, str], ...] = (
    *((module, "write_array") for module in (decoding, tokens)),
    *((cache, name) for name in ("receipt_of", "write_json")),
    *((files, name) for name in ("sync", "rename_path")),
    *((Path, name) for name in ("mkdir", "write_text")),
)


@pytest.mark.parametrize("write", [write_pets, write_words])
def test_each_failure_to_write_is_a_sentence(
    write: Callable[[Path], Callable[[], Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    thorough: bool,
) -> None:
    """Each call fails in turn: the cache and what to do are named, and the next start works."""
    load_data, root = write(tmp_path / "mine"), tmp_path / "cache" / "accelerate-recipes"
    counts: list[str] = []
    fail_at, number = [-1], errno.ENOSPC

    def failing(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if any(str(root) in str(value) for value in given):
                counts.append(name)
                if len(counts) - 1 == fail_at[0]:
                    problem = OSError(number, os.strerror(number), str(given[0]))
                    raise UserError(str(problem)) if name == "write_json" else problem
            return function(*given, **named)

        return call

    for owner, name in POINTS:
        monkeypatch.setattr(owner, name, failing(getattr(owner, name), name))
    load_data()
    called = [*counts]
    assert {*called} == {name for _, name in POINTS}
    numbers = itertools.cycle([errno.ENOSPC, errno.EIO, errno.EACCES])
    for (fail_at[0], name), number in zip(enumerate(called), numbers, strict=False):
        if not thorough and name in called[: fail_at[0]]:
            continue  # of each kind, the first
        shutil.rmtree(root.parent)
        counts.clear()
        try:
            load_data()
            # The lock's folder, and stamps: a run does without.
            assert name in ("mkdir", "write_json", "write_text")
        except UserError as error:
            message = error.message
            assert all(
                word in message for word in ("XDG_CACHE_HOME", str(root), os.strerror(number))
            )
            assert "\n" not in message
        made = [path for path in root.glob("*") if path.is_dir()]
        assert all((path / "facts.json").exists() for path in made), (name, made)
        fail_at[0] = -1
        load_data()


def test_tokenizer_that_cannot_be_saved_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its library raises anything but an OSError of a full disk."""
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


def test_full_disk_of_the_libraries_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `datasets` could not write is no mistake in the data."""
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


def test_folder_for_caches_that_is_none_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file where `XDG_CACHE_HOME` should be a folder is named."""
    load_pets = write_pets(tmp_path / "pets")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    message = refusal(load_pets)
    assert "XDG_CACHE_HOME" in message
    assert str(tmp_path / "file") in message


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_interrupted_preparation_leaves_nothing(end: type[BaseException]) -> None:
    """Whatever ends it, no half of a cache is left, and the lock is free."""

    def interrupted(source: DataSource, folder: Path, count: int) -> dict[str, Any]:
        (folder / "half.npy").write_text("half")
        raise end

    with pytest.raises(end):
        cached(SOURCE, interrupted, "numbers-1", ("x",), {"count": 5})
    folder = load()[0]
    assert {path.name for path in folder.parent.iterdir() if path.is_dir()} == {folder.name}
