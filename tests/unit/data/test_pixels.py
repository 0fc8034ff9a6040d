"""Images of more than 8 bits a channel: on one scale for a data set, never wrapped around."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common.data.decoding import image_to_pixels
from common.data.pixels import deep_pixels, to_eight_bits, white_level_of
from tests.unit.data.loading import images, refusal


def deep_png(pixels: np.ndarray) -> bytes:
    """Return uint16 pixels [height, width, channels] as a PNG of 16 bits a channel."""
    height, width, channels = pixels.shape
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_all_16_bits_of_a_png_are_read(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 2**16, (7, 5, channels)).astype(np.uint16)
    found, _ = deep_pixels(Image.open(io.BytesIO(deep_png(pixels))))
    assert found is not None
    expected = pixels[..., :3] if channels > 2 else pixels[..., 0]
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("bits", range(1, 32))
def test_scale_is_that_of_the_largest_value(bits: int) -> None:
    """To 8 bits values stay, above they keep their highest 8; more than white is white."""
    peak = 2**bits - 1
    white = white_level_of(peak)
    assert white == max(255, peak)
    values = np.array([0, peak // 2, peak, 2 * peak, 2**31 - 1], dtype=np.int64)
    found = to_eight_bits(values, white).astype(int)
    assert found[0] == 0
    assert found[2] == (peak if bits <= 8 else 255)
    assert (np.diff(found) >= 0).all()


def write(folder: Path, split: str, pixels: np.ndarray, suffix: str) -> None:
    for label in ("x", "y"):
        for index in range(6):
            path = folder / split / label / f"{index}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)


@pytest.mark.parametrize(
    ("kind", "suffix"), [("uint16", "png"), ("uint16", "tiff"), ("int32", "tiff")]
)
@pytest.mark.parametrize("peak", [200, 4095, 60_000])
def test_data_set_has_one_scale(kind: str, suffix: str, peak: int, tmp_path: Path) -> None:
    """That of train, for its test split, too, whose brighter pixels are white."""
    pixels = np.random.default_rng(0).integers(0, peak + 1, (10, 10)).astype(kind)
    pixels[0, 0] = peak
    write(tmp_path / "deep", "train", pixels, suffix)
    bright = np.minimum(pixels.astype(np.int64) * 3, 65_535).astype(kind)
    write(tmp_path / "deep", "test", bright, suffix)
    data = images(tmp_path / "deep")
    white = white_level_of(peak)
    assert data.preprocessing()["white_level"] == white
    assert any(f"{white:,} is white" in note for note in data.notes)
    for name, values in (("train", pixels), ("test", bright)):
        expected = to_eight_bits(values, white)
        assert np.array_equal(data.splits[name].images[0, ..., 0], expected)
    predicted = image_to_pixels(Image.fromarray(pixels), 10, 1, white)
    assert np.array_equal(predicted, data.splits["train"].images[0])


def test_deep_image_beside_a_train_of_8_bits_is_refused(tmp_path: Path) -> None:
    pixels = np.arange(100).reshape(10, 10)
    write(tmp_path / "mixed", "train", pixels.astype(np.uint8), "png")
    write(tmp_path / "mixed", "test", pixels.astype(np.uint16), "png")
    message = refusal(lambda: images(tmp_path / "mixed"))
    assert "/test/" in message
    assert "8 bits" in message


@pytest.mark.parametrize(("kind", "word"), [("float32", "real numbers"), ("int32", "negative")])
def test_values_that_have_no_scale_are_refused(kind: str, word: str, tmp_path: Path) -> None:
    write(tmp_path / "odd", "train", np.full((8, 8), -1).astype(kind), "tiff")
    assert word in refusal(lambda: images(tmp_path / "odd"))
