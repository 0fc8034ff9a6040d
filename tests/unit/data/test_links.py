"""Data sets of symbolic links, as git-annex and DVC make them: read, or refused."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.data.images import ImageData
from common.data.sources import find_named, fingerprint_of_folder
from common.data.versions.local_files import MAX_VISITS, find_files
from tests.local_data import sentences, write_csv, write_image_folder
from tests.unit.data.loading import images, refusal, text


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    return write_image_folder(tmp_path / "pets", ["cat", "dog", "emu"], per_class=8)


def moved(path: Path, store: Path) -> None:
    """Move a file or a folder to another place, and leave a link to it."""
    store.mkdir(parents=True, exist_ok=True)
    place = store / "-".join(path.parts[-3:])
    path.rename(place)
    path.symlink_to(place)


@pytest.mark.parametrize("layout", ["class", "split", "files", "all"])
def test_linked_images_are_read_like_files(layout: str, pets: Path, tmp_path: Path) -> None:
    """Links to files, classes and splits give the same classes and fingerprint."""
    before = images(pets)
    train = pets / "train"
    store = tmp_path / "store"
    if layout in ("files", "all"):
        for path in sorted(train.rglob("*.png")):
            moved(path, store)
    if layout in ("class", "all"):
        moved(train / "dog", store)
    if layout in ("split", "all"):
        moved(train, store)
    after = images(pets)
    assert after.class_names == ["cat", "dog", "emu"]
    assert after.fingerprint == before.fingerprint


def test_linked_tables_are_read(tmp_path: Path) -> None:
    """A split may be a link to a folder of tables."""
    write_csv(tmp_path / "store" / "a" / "one.csv", sentences(12, 0))
    write_csv(tmp_path / "mine" / "test" / "two.csv", sentences(9, 1))
    (tmp_path / "mine" / "train").symlink_to(tmp_path / "store" / "a")
    sizes = {name: len(split) for name, split in text(tmp_path / "mine").splits.items()}
    assert sizes == {"train": 12, "test": 9}


def test_circular_links_end(pets: Path) -> None:
    """Each image is found once, and a link to itself counts as dangling."""
    (pets / "train" / "cat" / "again").symlink_to(pets)
    (pets / "train" / "itself").symlink_to(pets / "train" / "itself")
    listing = find_files(pets)
    assert len(listing.files) == 24
    assert listing.dangling == [str(pets / "train" / "itself")]


def test_maze_of_links_is_refused(tmp_path: Path) -> None:
    """The message names a folder to which links lead again and again."""
    for name in "abcdefgh":
        for other in "abcdefgh":
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f"to-{other}").symlink_to(tmp_path / other)
    message = refusal(lambda: find_files(tmp_path))
    named = re.search(r"leads to (\S+) more than 16 times through links", message)
    assert named is not None
    assert Path(named[1]).parent == tmp_path.resolve()
    assert named[1][-1] in "abcdefgh"


@pytest.mark.parametrize("links", [16, 17])
def test_folder_that_many_links_share_is_named(links: int, tmp_path: Path) -> None:
    """There is no loop, so the message speaks of none."""
    folder = tmp_path / "pets"
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "a.png").touch()
    for number in range(links):
        (folder / f"class-{number}").mkdir(parents=True)
        (folder / f"class-{number}" / "more").symlink_to(shared)
    if links <= MAX_VISITS:
        assert len(find_files(folder).files) == links
    else:
        message = refusal(lambda: find_files(folder))
        assert f"{folder} leads to {shared.resolve()} more than 16 times" in message
        assert "remove links to this folder, or copy its files" in message


def test_many_folders_are_told_apart_on_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, the status of a listed entry has neither device nor inode."""

    class Entry:
        def __init__(self, entry: os.DirEntry[str]) -> None:
            self.entry = entry

        def __getattr__(self, name: str) -> object:
            return getattr(self.entry, name)

        def stat(self) -> os.stat_result:
            status = self.entry.stat()
            return os.stat_result((status.st_mode, 0, 0, *status[3:]))

    listing = os.scandir

    @contextmanager
    def scandir(path: str) -> Iterator[Iterator[Entry]]:
        with listing(path) as entries:
            yield map(Entry, entries)

    for number in range(MAX_VISITS + 1):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "a.png").touch()
    monkeypatch.setattr(os, "scandir", scandir)
    assert len(find_files(tmp_path).files) == MAX_VISITS + 1


@pytest.mark.parametrize("gone", [1, 6, 8])
def test_dangling_links_are_noted_or_refused(gone: int, pets: Path) -> None:
    """Some in each class are noted, but a whole class of them is refused."""
    for name in ("cat", "dog", "emu") if gone < 8 else ("dog",):
        for index in range(gone):
            path = pets / "train" / name / f"{index:03d}.png"
            path.unlink()
            path.symlink_to("../../.git/annex/objects/nowhere")
    if gone == 8:
        message = refusal(lambda: images(pets))
        assert "train/dog/000.png" in message
        assert "a class or split would be missing" in message
    else:
        (note,) = [
            note for note in images(pets).notes if "files are links to missing files" in note
        ]
        assert f"{3 * gone} of 24 files" in note
        assert "train/cat/000.png" in note


def test_class_that_is_a_dangling_link_is_refused(pets: Path) -> None:
    """The message names the class."""
    (pets / "train" / "fox").symlink_to("nowhere")
    message = refusal(lambda: images(pets))
    assert "train/fox" in message
    assert "or correct or remove the links" in message


def rows_of_class_b(data: ImageData) -> int:
    """Count the rows of the second of two classes over all splits."""
    return sum(int(split.labels.sum()) for split in data.splits.values())


def test_fingerprint_follows_content_not_size_and_time(tmp_path: Path) -> None:
    """A relabelled table and a changed image count as new data, which are read again."""
    folder = write_image_folder(tmp_path / "pets", [""], per_class=12)
    train = folder / "train"
    table = train / "metadata.csv"
    table.write_text(
        "file_name,label\n" + "".join(f"{n:03d}.png,{'ab'[n % 2]}\n" for n in range(12))
    )
    before = images(folder)
    status = table.stat()
    changed = table.read_text().replace("000.png,a", "000.png,b")
    table.write_text(changed)
    os.utime(table, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = images(folder)
    assert before.fingerprint != after.fingerprint
    assert sum(len(split) for split in after.splits.values()) == 12
    assert rows_of_class_b(before) == 6
    assert rows_of_class_b(after) == 7
    image = train / "003.png"
    known = fingerprint_of_folder(folder)
    status = image.stat()
    content = bytearray(image.read_bytes())
    content[-20] ^= 1
    with image.open("r+b") as file:
        file.write(content)
    os.utime(image, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert fingerprint_of_folder(folder) != known


def test_touched_table_is_the_same_data(tmp_path: Path) -> None:
    """Only its modification time has changed."""
    write_csv(tmp_path / "train.csv", sentences(12, 0))
    before = find_named(str(tmp_path), None).fingerprint
    os.utime(tmp_path / "train.csv", ns=(1, 1))
    assert find_named(str(tmp_path), None).fingerprint == before
