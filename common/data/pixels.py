"""Converts images of any bit depth to 8 bits a channel, on the same scale for a whole data set.

Pillow has no mode for colours of 16 bits, and would silently keep the high byte alone.
"""

import io
import sys

import numpy as np
from PIL import ExifTags, Image, ImageFile, ImageOps

FULL_SCALE = 65535  # the largest value of 16 bits: white for a model that states no white level
# How to turn a photo upright, by its EXIF orientation.
TURNS = {
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
    """Return an image as uint8 [size, size, channels]: upright, resized and centre-cropped.

    Args:
        channels: 1 or 3.
        white_level: the value of white in images of more than 8 bits a channel, as
            `white_level_of` returns it. Larger values become white, too. None: such an image is
            refused.

    Raises:
        ValueError: pixels are real numbers or negative, or the image has more than 8 bits a channel
            and there is no white level.
    """
    # The pixels are None unless the image has more than 8 bits a channel.
    pixels, decoded_image = deep_pixels(image)
    if pixels is not None:
        if white_level is None:
            raise ValueError(
                "it has more than 8 bits per channel, unlike the training images: use 8 bits"
            )
        result = Image.fromarray(to_eight_bits(pixels, white_level))
    else:
        result = decoded_image
    orientation = decoded_image.getexif().get(ExifTags.Base.Orientation, 1)
    if orientation in TURNS:
        result = result.transpose(TURNS[orientation])
    result = result.convert("L" if channels == 1 else "RGB")
    if result.size != (size, size):
        result = ImageOps.fit(result, (size, size), Image.Resampling.BILINEAR)
    return np.asarray(result).reshape(size, size, channels)


def deep_pixels(image: Image.Image) -> tuple[np.ndarray | None, Image.Image]:
    """Return the pixels of an image with more than 8 bits a channel, and the image itself.

    These pixels determine the white level of a data set, by which they are then scaled. Pillow can
    do neither.

    Returns:
        First, the pixels: integers [height, width] or [height, width, 3], without transparency;
        None for an image of 8 bits. Second, the image: `image` itself, or another copy of it if its
        file had to be decoded in another way.

    Raises:
        ValueError: pixels are real numbers or negative.
    """
    if image.mode == "F":  # Pillow would make an image with values from 0 to 1 black
        raise ValueError("its pixels are real numbers: save it with 8 or 16 bits per channel")
    if image.mode.startswith("I"):
        pixels = np.asarray(image)
        if pixels.min(initial=0) < 0:
            raise ValueError(
                "its pixels are negative or have 32 bits: save it with 8 or 16 bits per channel"
            )
        return pixels, image
    if isinstance(image, ImageFile.ImageFile):
        raw_mode = raw_mode_of(image)
        if ";16" in raw_mode:
            return deep_colours(image, raw_mode)
    return None, image


def raw_mode_of(image: ImageFile.ImageFile) -> str:
    """Return Pillow's name for the layout of the pixels in the file, such as ``RGB;16B``.

    The layout shows whether the file has 16 bits a colour, which the image's mode does not show.
    The name is empty for an image whose pixels have been loaded.
    """
    if not image.tile:
        return ""
    arguments = image.tile[0][3]
    raw_mode = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    return raw_mode if isinstance(raw_mode, str) else ""


def deep_colours(image: ImageFile.ImageFile, raw_mode: str) -> tuple[np.ndarray, Image.Image]:
    """Return the pixels of an image with 16 bits a colour, and the image itself.

    Pillow keeps one byte of each value. So a colour image is decoded twice: once in its own byte
    order, which gives the high bytes, and once in the other order, which gives the low ones. Grey
    with transparency is decoded once, as four channels of a byte. Transparency is left out.

    Args:
        image: a file of Pillow whose pixels have not been loaded.
        raw_mode: the result of `raw_mode_of`.

    Raises:
        ValueError: the layout is not known.
    """
    assert image.fp is not None  # it is None only after the pixels have been loaded
    position = image.fp.tell()
    image.fp.seek(0)
    encoded = image.fp.read()
    image.fp.seek(position)
    if raw_mode == "LA;16B":
        # These are read as four channels of 8 bits: two bytes of grey, then two of transparency.
        loaded = decoded_as(encoded, "RGBA", "RGBA")
        planes = np.asarray(loaded).astype(np.uint16)
        return planes[..., 0] * 256 + planes[..., 1], loaded
    channels, order = raw_mode.split(";16")
    # "B" is big-endian, "L" little-endian; "N" or nothing is the order of this machine.
    native = "L" if sys.byteorder == "little" else "B"
    order = native if order in ("", "N") else order
    if channels not in ("RGB", "RGBA") or order not in ("B", "L"):
        raise ValueError(f"its pixels are stored as {raw_mode}: save it as RGB or greyscale")
    other = "L" if order == "B" else "B"
    loaded = decoded_as(encoded, image.mode, f"{channels};16{order}")
    high = np.asarray(loaded).astype(np.uint16)
    low = np.asarray(decoded_as(encoded, image.mode, f"{channels};16{other}"))
    return (high * 256 + low)[..., :3], loaded


def decoded_as(encoded: bytes, mode: str, raw_mode: str) -> Image.Image:
    """Decode an image file as if its pixels had another layout of the same number of bits.

    Pillow states the layout in each tile of the image. So the tiles are changed before the pixels
    are loaded.

    Args:
        encoded: the contents of the file.
        mode: the mode of the returned image.
        raw_mode: Pillow's name for the layout.
    """
    image = Image.open(io.BytesIO(encoded))
    image._mode = mode
    tiles = []
    for tile in image.tile:
        others = tile.args[1:] if isinstance(tile.args, tuple) else None
        tiles.append(tile._replace(args=raw_mode if others is None else (raw_mode, *others)))
    image.tile = tiles
    image.load()
    return image


def white_level_of(peak: int) -> int:
    """Return the value of white in images whose largest value is `peak`.

    White is the largest value with as many bits: 1023 for a camera with 10 bits, for example.
    Images without values above 255 have the white level 255, so they stay as they are.
    """
    return max(255, 2 ** int(peak).bit_length() - 1)


def to_eight_bits(pixels: np.ndarray, white_level: int) -> np.ndarray:
    """Scale integer pixels so that `white_level` becomes 255; larger values become 255, too.

    Args:
        white_level: a value with all bits set, from `white_level_of`.

    Returns:
        uint8, of the same shape.
    """
    clipped = np.minimum(pixels.astype(np.int64), white_level)
    # All but the highest 8 of the white level's bits are cut off.
    return (clipped >> (white_level.bit_length() - 8)).astype(np.uint8)
