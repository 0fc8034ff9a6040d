"""Converts images of any bit depth to 8 bits a channel, on the same scale for a whole data set.

Pillow can't do this: it has no mode for colours of 16 bits, and silently keeps only their high
bytes.
"""

import io
import sys

import numpy as np
from PIL import ExifTags, Image, ImageFile, ImageOps

from common.errors import UserError
from common.run_directory.model_records import PixelFormat

# How to turn a photo upright, by its EXIF orientation. It is upright already with all others.
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


def image_to_pixels(image: Image.Image, pixel_format: PixelFormat, name: str) -> np.ndarray:
    """Return an image as pixels of a format: upright, resized and centre-cropped.

    Args:
        pixel_format: its white level is one that `white_level_of` returns. Larger values become
            white, too. Without a white level, an image of more than 8 bits a channel is refused.
        name: what a message calls the image.

    Returns:
        uint8 [image_size, image_size, channels].

    Raises:
        UserError: pixels are real numbers or negative, or the image has more than 8 bits a channel
            and there is no white level.
    """
    # `pixels` is None unless the image has more than 8 bits a channel.
    pixels, decoded_image = deep_pixels(image, name)
    if pixels is not None:
        if pixel_format.white_level is None:
            raise UserError(
                f"{name} can't be used, because it has more than 8 bits per channel, unlike the "
                "training images",
                advice="save it with 8 bits per channel",
            )
        result = Image.fromarray(to_eight_bits(pixels, pixel_format.white_level))
    else:
        result = decoded_image
    orientation = decoded_image.getexif().get(ExifTags.Base.Orientation, 1)
    if orientation in TURNS:
        result = result.transpose(TURNS[orientation])
    mode = "L" if pixel_format.channels == 1 else "RGB"
    if result.mode != mode:  # else, `convert` would make a copy
        result = result.convert(mode)
    size = pixel_format.image_size
    if result.size != (size, size):
        result = ImageOps.fit(result, (size, size), Image.Resampling.BILINEAR)
    return np.asarray(result).reshape(size, size, pixel_format.channels)


def deep_pixels(image: Image.Image, name: str) -> tuple[np.ndarray | None, Image.Image]:
    """Return the pixels of an image with more than 8 bits a channel, and the image itself.

    The largest of these pixels determines the white level of a data set, and the white level then
    scales all of them to 8 bits. An image of Pillow may have lost their low bytes.

    Args:
        name: what a message calls the image.

    Returns:
        First, the pixels: integers [height, width] or [height, width, 3], without transparency;
        None for an image of 8 bits. Second, the image: `image` itself, or another decoding of its
        file with the same EXIF data.

    Raises:
        UserError: pixels are real numbers or negative, or have an unknown layout.
    """
    if image.mode == "F":
        # Pillow would make an image with values from 0 to 1 black.
        raise UserError(
            f"{name} can't be used, because its pixels are real numbers",
            advice="save it with 8 or 16 bits per channel",
        )
    if image.mode.startswith("I"):
        pixels = np.asarray(image)
        if pixels.min(initial=0) < 0:
            raise UserError(
                f"{name} can't be used, because its pixels are negative or have 32 bits",
                advice="save it with 8 or 16 bits per channel",
            )
        return pixels, image
    if isinstance(image, ImageFile.ImageFile):
        raw_mode = raw_mode_of(image)
        if ";16" in raw_mode:
            return deep_colours(image, raw_mode, name)
    return None, image


def raw_mode_of(image: ImageFile.ImageFile) -> str:
    """Return Pillow's name for the layout of the pixels in the file, such as ``RGB;16B``.

    The layout shows whether the file has 16 bits a colour, which the image's mode does not show.
    The name is empty if the pixels have been loaded, or if the format has no such name.
    """
    if not image.tile:
        return ""
    arguments = image.tile[0][3]  # those of the tile's decoder; see `decoded_as`
    raw_mode = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    return raw_mode if isinstance(raw_mode, str) else ""


def deep_colours(
    image: ImageFile.ImageFile, raw_mode: str, name: str
) -> tuple[np.ndarray, Image.Image]:
    """Return the pixels of an image with 16 bits a colour, and another decoding of the image.

    Pillow keeps one byte of each value. So a colour image is decoded twice: in its own byte order,
    which gives the high bytes, and in the opposite order, which gives the low bytes. A grey image
    with transparency is decoded once, as four channels of one byte each. Transparency is left out.

    Args:
        image: an image that Pillow has opened, and whose pixels have not been loaded.
        raw_mode: the layout of its pixels, from `raw_mode_of`.
        name: what a message calls the image.

    Returns:
        First, the pixels: uint16 [height, width, 3], or [height, width] if they are grey. Second,
        the image with the high bytes of its colours, or with the four channels.

    Raises:
        UserError: the layout is not known.
    """
    assert image.fp is not None  # it is None only after the pixels have been loaded
    position = image.fp.tell()
    image.fp.seek(0)
    encoded = image.fp.read()
    image.fp.seek(position)
    if raw_mode == "LA;16B":
        # These are read as four channels of 8 bits: two bytes of grey, then two of transparency.
        decoded = decoded_as(encoded, "RGBA", "RGBA")
        planes = np.asarray(decoded).astype(np.uint16)
        return planes[..., 0] * 256 + planes[..., 1], decoded
    channels, order = raw_mode.split(";16")
    # "B" is big-endian, "L" is little-endian, and "N" or nothing is the byte order of this machine.
    if order in ("", "N"):
        order = "L" if sys.byteorder == "little" else "B"
    if channels not in ("RGB", "RGBA") or order not in ("B", "L"):
        raise UserError(
            f"{name} can't be used, because its pixels are stored as {raw_mode}",
            advice="save it as RGB or greyscale",
        )
    opposite_order = "L" if order == "B" else "B"
    decoded = decoded_as(encoded, image.mode, f"{channels};16{order}")
    high_bytes = np.asarray(decoded).astype(np.uint16)
    low_bytes = np.asarray(decoded_as(encoded, image.mode, f"{channels};16{opposite_order}"))
    return (high_bytes * 256 + low_bytes)[..., :3], decoded


def decoded_as(encoded: bytes, mode: str, raw_mode: str) -> Image.Image:
    """Decode an image file, and read its pixels in the layout `raw_mode` instead of its own.

    Both layouts must have the same number of bits per pixel.

    Pillow keeps the layout in each tile of the image. So this function changes the tiles before it
    loads the pixels.

    Args:
        encoded: the contents of the file.
        mode: the mode of the returned image.
        raw_mode: Pillow's name for the layout, as in `raw_mode_of`.
    """
    image = Image.open(io.BytesIO(encoded))
    # `load` makes pixels of this mode. Pillow has no public way to set it before.
    image._mode = mode
    tiles = []
    for tile in image.tile:
        # The layout is the only argument of the tile's decoder, or the first one.
        arguments = (raw_mode, *tile.args[1:]) if isinstance(tile.args, tuple) else raw_mode
        tiles.append(tile._replace(args=arguments))
    image.tile = tiles
    image.load()
    return image


def white_level_of(peak: int) -> int:
    """Return the value of white in images whose largest value is `peak`.

    White is the largest number with as many bits as `peak`. For example, it is 1023 for a camera
    with 10 bits. If no value is above 255, white is 255, so that the pixels stay as they are.
    """
    return max(255, 2 ** int(peak).bit_length() - 1)


def to_eight_bits(pixels: np.ndarray, white_level: int) -> np.ndarray:
    """Scale integer pixels so that `white_level` becomes 255; larger values become 255, too.

    Args:
        white_level: 2**n - 1 with n of at least 8, such as 4095, as `white_level_of` returns it.

    Returns:
        uint8, of the same shape.
    """
    clipped = np.minimum(pixels.astype(np.int64), white_level)
    # Keep the highest 8 of the white level's bits, and cut off the lower ones.
    return (clipped >> (white_level.bit_length() - 8)).astype(np.uint8)
