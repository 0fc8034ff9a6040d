"""Images of any format and mode: decoded correctly, or named."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import ExifTags, Image
from torch.utils.data import get_worker_info

from common.data.image_decoding import encoded_images, image_files
from common.data.image_decoding.pixels import image_to_pixels
from common.data.image_decoding.preparation import path_in_data_set, paths_of
from common.data.samples import Samples
from common.data.workers.pool import Workers
from common.errors import UserError
from common.run_directory.model_records import FULL_SCALE, PixelFormat
from tests.conftest import first
from tests.local_data import (
    grey_images,
    write_image_folder,
    write_image_parquet,
)
from tests.unit.data.loading import images, refusal


@pytest.mark.parametrize("turn", range(9))
def test_exif_orientation_is_applied(turn: int) -> None:
    """The result equals what `datasets` decodes."""
    pixels = np.arange(72, dtype=np.uint8).reshape(9, 8)
    file = io.BytesIO()
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = turn
    Image.fromarray(pixels).save(file, "PNG", exif=exif)
    expected = datasets.Image().decode_example({"bytes": file.getvalue(), "path": None})
    pixel_format = PixelFormat(channels=1, image_size=8, white_level=FULL_SCALE)
    pixels_of_file = image_to_pixels(Image.open(file), pixel_format, "an image")
    assert np.array_equal(pixels_of_file, image_to_pixels(expected, pixel_format, "an image"))
    unturned = image_to_pixels(Image.fromarray(pixels), pixel_format, "an image")
    assert turn < 2 or not np.array_equal(pixels_of_file, unturned)


@pytest.mark.parametrize(
    ("mode", "channels"), [("1", 1), ("L", 1), ("I;16", 1), ("P", 3), ("RGBA", 3), ("CMYK", 3)]
)
def test_images_of_any_mode_are_decoded(mode: str, channels: int, tmp_path: Path) -> None:
    """The modes are black and white, grey, 16-bit, palette, transparent and print images."""
    pixels = np.random.default_rng(0).integers(0, 256, (10, 10), dtype=np.uint8)
    if mode == "I;16":
        image = Image.fromarray(pixels.astype(np.uint16) * 256)
    else:
        image = Image.fromarray(pixels).convert("RGB").convert(mode)
    suffix = "tiff" if mode == "CMYK" else "png"
    for label in ("x", "y"):
        for index in range(6):
            path = tmp_path / "modes" / "train" / label / f"{index}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
    data = images(tmp_path / "modes")
    assert data.channels == channels
    expected = pixels if channels == 1 else np.asarray(image.convert("RGB"))
    if mode != "1":  # this mode is dithered
        decoded = data.splits["train"].images[0]
        assert np.array_equal(decoded.reshape(expected.shape), expected)


@pytest.mark.parametrize("size", [None, 5])
def test_workers_read_the_same_images(
    size: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images, labels, paths and scaling do not depend on the processes that decode."""
    folder = write_image_folder(tmp_path / "pets", ["cat", "dog"], per_class=300)
    processes: list[int] = []
    monkeypatch.setattr(encoded_images, "Workers", counting_workers(processes))
    loaded = []
    for number, many_images in enumerate((10**6, 1)):
        monkeypatch.setattr(encoded_images, "MANY_IMAGES", many_images)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache-{number}"))
        loaded.append(images(folder, image_size=size))
    alone, with_workers = loaded
    half = len(processes) // 2
    assert set(processes[:half]) == {0}
    assert min(processes[half:]) > 0
    assert with_workers.preprocessing() == alone.preprocessing()
    assert with_workers.splits.keys() == alone.splits.keys()
    for name, split in with_workers.splits.items():
        assert np.array_equal(split.images, alone.splits[name].images)
        assert np.array_equal(split.labels, alone.splits[name].labels)
        assert split.files == alone.splits[name].files


def counting_workers(processes: list[int]) -> type[Workers]:
    """Return a class of workers that appends the number of its processes to `processes`."""

    class CountingWorkers(Workers):
        def __init__(self, samples: Samples, count: int, *others: Any) -> None:
            processes.append(count)
            super().__init__(samples, count, *others)

    return CountingWorkers


@pytest.mark.parametrize("many_images", [1, 10**6])
@pytest.mark.parametrize("damage", ["truncated", "no image"])
def test_corrupt_image_is_named(
    damage: str, many_images: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cache is left, and the data load once the image is removed, with or without workers."""
    monkeypatch.setattr(encoded_images, "MANY_IMAGES", many_images)
    folder = write_image_folder(tmp_path / "pets", ["cat", "dog"], per_class=10)
    path = folder / "train" / "dog" / "003.png"
    path.write_bytes(path.read_bytes()[:120] if damage == "truncated" else b"not an image")
    message = refusal(lambda: images(folder))
    assert "003.png" in message
    caches = (tmp_path / "cache" / "accelerate-recipes").glob("pets-*")
    assert not [c for c in caches if c.is_dir() and not c.name.endswith(".unfinished")]
    path.unlink()
    assert len(images(folder).splits["train"]) > 10


@pytest.mark.parametrize("content", [b"\x89PNG broken", b""])
def test_corrupt_image_in_parquet_is_refused(content: bytes, tmp_path: Path) -> None:
    """The message names at least the split and the data set."""
    columns = grey_images(12, 0)
    columns["image"][4] = {"bytes": content, "path": None}
    folder = write_image_parquet(tmp_path / "inside", {"train": columns})
    message = refusal(lambda: images(folder))
    assert "inside" in message
    assert "train" in message or "validation" in message


@pytest.mark.parametrize(
    ("path", "location", "shown"),
    [
        ("train/cat/1.png", "user/name", "train/cat/1.png"),
        ("/data/animals/train/cat/1.png", "/data/animals", "train/cat/1.png"),
        ("/home/me/.cache/huggingface/0a1b/1.png", "user/name", "1.png"),
    ],
)
def test_path_of_an_image_does_not_depend_on_the_working_directory(
    path: str, location: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image of the Hub lies in the cache of `datasets`, which is on no path from its id."""
    monkeypatch.chdir(tmp_path)
    assert path_in_data_set(path, location) == shown


def test_killed_decoder_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel kills a process if memory runs out. The same command may succeed later."""
    folder = write_image_folder(tmp_path / "pets", ["cat", "dog"], per_class=100)

    def kill_worker(*arguments: object) -> None:
        if get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(encoded_images, "MANY_IMAGES", 1)
    monkeypatch.setattr(image_files, "image_to_pixels", kill_worker)
    with pytest.raises(UserError) as error:
        images(folder)
    assert "a process that decodes images was killed" in error.value.message
    assert error.value.resumable


def test_paths_are_found_in_every_part_of_a_column() -> None:
    """A data set of several files has a column of several parts; an image may be missing."""
    parts = [
        datasets.Dataset.from_dict(
            {"image": [{"path": f"{part}-{row}.png", "bytes": b"x"} for row in range(3)] + [None]},
            features=datasets.Features({"image": datasets.Image(decode=False)}),
        )
        for part in range(3)
    ]
    whole = datasets.concatenate_datasets(parts)
    expected = [None if row == 3 else f"{part}-{row}.png" for part in range(3) for row in range(4)]
    assert list(paths_of(whole, "image")) == expected
    assert list(paths_of(whole.select([5, 3, 0]), "image")) == [expected[row] for row in (5, 3, 0)]


@pytest.mark.parametrize("has_workers", [False, True])
@pytest.mark.parametrize("damage", first(1, ["contents", "end"]))
def test_all_damaged_images_are_named_at_once(
    damage: str, has_workers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header shows a wrong file at once; a cut file is only found when it is decoded."""
    if has_workers:
        monkeypatch.setattr(encoded_images, "MANY_IMAGES", 1)
    folder = write_image_folder(tmp_path / "pets", ("cat", "dog"), 30)
    damaged = [folder / "train" / "cat" / "003.png", folder / "train" / "dog" / "007.png"]
    for file in damaged:
        contents = file.read_bytes()
        file.write_bytes(b"text" if damage == "contents" else contents[: len(contents) // 2])
    message = refusal(lambda: images(folder))
    assert message.startswith(f"image {damaged[0]} can't be read (")
    assert message.endswith(
        "; 1 other image can't be used either (dog/007.png): replace or remove this image, and do "
        "the same for the others"
    )
    damaged[0].unlink()
    assert "dog/007.png" in refusal(lambda: images(folder))
    damaged[1].unlink()
    assert len(images(folder).splits["train"]) > 50


def test_many_damaged_images_end_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the first few."""
    monkeypatch.setattr(encoded_images, "MOST_UNREADABLE", 8)
    folder = write_image_folder(tmp_path / "pets", ("cat", "dog"), 10)
    for file in folder.rglob("*.png"):
        file.write_bytes(b"text")
    message = refusal(lambda: images(folder))
    # Two of the twenty images are held out for validation, which is read later.
    assert "; at least 17 other images can't be used either (cat/002.png, cat/003.png" in message
    assert message.endswith(
        "cat/006.png, and 12 more): replace or remove this image, and do the same for the others"
    )
