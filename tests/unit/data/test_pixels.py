"""Images of more than 8 bits a channel: one scale for a data set, and no overflow."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common.data.image_decoding.pixels import (
    deep_pixels,
    image_to_pixels,
    to_eight_bits,
    white_level_of,
)
from common.run_directory.model_records import PixelFormat
from tests.unit.data.loading import images, refusal


def deep_png(pixels: np.ndarray) -> bytes:
    """Return uint16 pixels [height, width, channels] as a PNG of 16 bits a channel."""
    height, width, channels = pixels.shape
    color_type = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, color_type, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_all_16_bits_of_a_png_are_read(channels: int) -> None:
    """The alpha channel is dropped, and no value loses bits."""
    pixels = np.random.default_rng(0).integers(0, 2**16, (7, 5, channels)).astype(np.uint16)
    decoded, _ = deep_pixels(Image.open(io.BytesIO(deep_png(pixels))), "an image")
    assert decoded is not None
    expected = pixels[..., :3] if channels > 2 else pixels[..., 0]
    assert np.array_equal(decoded, expected)


@pytest.mark.parametrize("bits", range(1, 32))
def test_scale_follows_the_largest_value(bits: int) -> None:
    """Values of up to 8 bits stay, larger ones keep their highest 8 bits, and brighter ones are
    white.
    """
    peak = 2**bits - 1
    white = white_level_of(peak)
    assert white == max(255, peak)
    values = np.array([0, peak // 2, peak, 2 * peak, 2**31 - 1], dtype=np.int64)
    scaled = to_eight_bits(values, white).astype(int)
    assert scaled[0] == 0
    assert scaled[2] == (peak if bits <= 8 else 255)
    assert (np.diff(scaled) >= 0).all()


def write(folder: Path, split: str, pixels: np.ndarray, suffix: str) -> None:
    for label in ("x", "y"):
        for index in range(6):
            path = folder / split / label / f"{index}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)


@pytest.mark.parametrize(
    ("dtype", "suffix"), [("uint16", "png"), ("uint16", "tiff"), ("int32", "tiff")]
)
@pytest.mark.parametrize("peak", [200, 4095, 60_000])
def test_data_set_has_one_scale(dtype: str, suffix: str, peak: int, tmp_path: Path) -> None:
    """The train split sets it. Brighter pixels of the test split are white."""
    pixels = np.random.default_rng(0).integers(0, peak + 1, (10, 10)).astype(dtype)
    pixels[0, 0] = peak
    write(tmp_path / "deep", "train", pixels, suffix)
    bright = np.minimum(pixels.astype(np.int64) * 3, 65_535).astype(dtype)
    write(tmp_path / "deep", "test", bright, suffix)
    data = images(tmp_path / "deep")
    white = white_level_of(peak)
    assert data.preprocessing()["white_level"] == white
    assert any(f"{white:,} is white" in note for note in data.notes)
    for name, values in (("train", pixels), ("test", bright)):
        expected = to_eight_bits(values, white)
        assert np.array_equal(data.splits[name].images[0, ..., 0], expected)
    pixel_format = PixelFormat(channels=1, image_size=10, white_level=white)
    predicted = image_to_pixels(Image.fromarray(pixels), pixel_format, "an image")
    assert np.array_equal(predicted, data.splits["train"].images[0])


def test_deep_images_beside_8_bit_training_images_are_refused(tmp_path: Path) -> None:
    """The message names the file and the 8 bits of train."""
    pixels = np.arange(100).reshape(10, 10)
    write(tmp_path / "mixed", "train", pixels.astype(np.uint8), "png")
    write(tmp_path / "mixed", "test", pixels.astype(np.uint16), "png")
    message = refusal(lambda: images(tmp_path / "mixed"))
    assert "/test/" in message
    assert "8 bits" in message


@pytest.mark.parametrize(("dtype", "word"), [("float32", "real numbers"), ("int32", "negative")])
def test_pixels_without_a_scale_are_refused(dtype: str, word: str, tmp_path: Path) -> None:
    """Negative and real values have no natural white level. The advice says how to save them."""
    write(tmp_path / "odd", "train", np.full((8, 8), -1).astype(dtype), "tiff")
    message = refusal(lambda: images(tmp_path / "odd"))
    assert message.startswith(f"image {tmp_path / 'odd' / 'train'}")
    assert word in message
    assert ": save it with 8 or 16 bits per channel, and do the same for the others" in message
