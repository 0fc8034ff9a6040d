"""Pixels of an image with up to 32 bits a channel, as 8 bits, on one scale for a data set."""

import io
import sys
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageOps

FULL_SCALE = 65535  # of images of 16 bits: of models that say no other
TURNS = {  # how to turn an image whose camera says so, by its EXIF orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
GREY_MODES = {"1", "L", "I", "I;16", "I;16B", "I;16L", "I;16N", "F"}


def image_to_pixels(
    image: Image.Image, size: int, channels: int, white_level: int | None = FULL_SCALE
) -> np.ndarray:
    """Return an image as uint8 [size, size, channels], resized and centre-cropped.

    Args:
        white_level: the value of white in images of more than 8 bits a channel, as of
            `white_level_of`. What is above is white, too. None: such an image is refused.

    Raises:
        ValueError: its pixels are real numbers or negative, or it has more than 8 bits and there is
            no white level.
    """
    pixels, loaded = deep_pixels(image)
    if pixels is not None:
        if white_level is None:
            raise ValueError("it has more than 8 bits a channel, unlike those of train: write 8")
        turned = Image.fromarray(to_eight_bits(pixels, white_level))
    else:
        turned = loaded
    orientation = loaded.getexif().get(ExifTags.Base.Orientation, 1)
    if orientation in TURNS:
        turned = turned.transpose(TURNS[orientation])
    turned = turned.convert("L" if channels == 1 else "RGB")
    if turned.size != (size, size):
        turned = ImageOps.fit(turned, (size, size), Image.Resampling.BILINEAR)
    return np.asarray(turned).reshape(size, size, channels)


def deep_pixels(image: Image.Image) -> tuple[np.ndarray | None, Image.Image]:
    """Return the pixels of an image with more than 8 bits a channel, and the image, loaded.

    They are integers [height, width] or [height, width, 3], without transparency; None of an image
    with 8 bits. Pillow has no mode for colours of 16 bits, and keeps the high byte alone.

    Raises:
        ValueError: they are real numbers or negative.
    """
    if image.mode == "F":  # which Pillow would clip, of 0 to 1 to black
        raise ValueError("its pixels are real numbers: write them with 8 or 16 bits")
    if image.mode.startswith("I"):
        pixels = np.asarray(image)
        if pixels.min(initial=0) < 0:
            raise ValueError("its pixels are negative, or of 32 bits: write them with 8 or 16 bits")
        return pixels, image
    raw_mode = raw_mode_of(image)
    if ";16" not in raw_mode:
        return None, image
    return deep_colours(image, raw_mode)


def raw_mode_of(image: Image.Image) -> str:
    """Return how an image's file holds its pixels, as Pillow calls it; empty of a loaded image."""
    tiles: list[Any] = getattr(image, "tile", None) or []
    if not tiles:
        return ""
    arguments = tiles[0][3]
    raw_mode = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    return raw_mode if isinstance(raw_mode, str) else ""


def deep_colours(image: Any, raw_mode: str) -> tuple[np.ndarray, Image.Image]:
    """Return 16 bits of each colour: the high bytes, and the low ones, as if of another order."""
    position = image.fp.tell()
    image.fp.seek(0)
    encoded = image.fp.read()
    image.fp.seek(position)
    if raw_mode == "LA;16B":  # as four channels of 8 bits: both bytes of grey, then transparency
        loaded = decoded_as(encoded, "RGBA", "RGBA")
        planes = np.asarray(loaded).astype(np.uint16)
        return planes[..., 0] * 256 + planes[..., 1], loaded
    channels, order = raw_mode.split(";16")
    native = "L" if sys.byteorder == "little" else "B"
    order = native if order in ("", "N") else order
    if channels not in ("RGB", "RGBA") or order not in ("B", "L"):
        raise ValueError(f"its pixels are kept as {raw_mode}: write them as RGB or grey")
    other = "L" if order == "B" else "B"
    loaded = decoded_as(encoded, image.mode, f"{channels};16{order}")
    high = np.asarray(loaded).astype(np.uint16)
    low = np.asarray(decoded_as(encoded, image.mode, f"{channels};16{other}"))
    return (high * 256 + low)[..., :3], loaded


def decoded_as(encoded: bytes, mode: str, raw_mode: str) -> Image.Image:
    """Decode a file as if it held its pixels in another way, of as many bits."""
    image: Any = Image.open(io.BytesIO(encoded))
    image._mode = mode
    tiles = []
    for codec, extents, offset, arguments in image.tile:
        is_tuple = isinstance(arguments, tuple)
        changed = (raw_mode, *arguments[1:]) if is_tuple else raw_mode
        tiles.append((codec, extents, offset, changed))
    image.tile = tiles
    image.load()
    return image


def white_level_of(peak: int) -> int:
    """Return the value of white in images whose largest value is `peak`: that of all bits set.

    Values to 255 stay as they are, those of cameras with 10 or 12 bits are scaled by that range.
    """
    return max(255, 2 ** int(peak).bit_length() - 1)


def to_eight_bits(pixels: np.ndarray, white_level: int) -> np.ndarray:
    """Return the 8 highest of the bits that `white_level` has; what is above it is 255."""
    clipped = np.minimum(pixels.astype(np.int64), white_level)
    return (clipped >> (white_level.bit_length() - 8)).astype(np.uint8)
