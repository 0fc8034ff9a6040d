"""Reads the inputs of a prediction: texts, or paths of images, from files or standard input."""

import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from PIL import Image

from common.errors import UserError
from common.failures.sentences import reading
from common.storage.files import refuse_pipe


def read_inputs(files: Sequence[str], is_text: bool) -> Iterator[str]:
    """Yield texts, or paths of images, without empty lines.

    Args:
        files: files of texts; or images and folders of images. `-` stands for standard input.
        is_text: whether the model reads texts.

    Raises:
        UserError: a file of texts, a folder or standard input can't be read, or a folder has no
            images. Image files are not opened here.
    """
    for file in files:
        if file == "-":
            yield from read_standard_input()
        elif is_text:
            yield from read_texts(file)
        elif os.path.isdir(file):
            yield from images_in(Path(file))
        elif file.strip():  # an empty argument is not the name of an image
            yield file


def read_standard_input() -> Iterator[str]:
    """Yield the lines of standard input that are not empty.

    Raises:
        UserError: standard input is closed, or it is not UTF-8.
    """
    if sys.stdin is None:  # Python sets None if standard input was closed from the start
        raise UserError("standard input is closed", advice="pass the names of files instead of -")
    # A program that calls this function may have replaced standard input by another stream.
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # whatever the locale is
    with reading("standard input", "pass lines in UTF-8"):
        yield from nonempty_lines(sys.stdin)


def read_texts(file: str) -> Iterator[str]:
    """Yield the lines of a file that are not empty, without a byte order mark before the first.

    Raises:
        UserError: the path is a folder, or the file is not a text in UTF-8.
    """
    if os.path.isdir(file):
        raise UserError(
            f"{file} is a folder, but this model reads text files",
            advice=f"pass the files in it, as in {file}/*",
        )
    with reading(file, "pass a file of lines in UTF-8, or - for standard input"):
        text = refuse_pipe(Path(file)).read_text(encoding="utf-8-sig")
    # `splitlines` would also split at characters that do not end a line in a text file.
    yield from nonempty_lines(io.StringIO(text))


def nonempty_lines(stream: Iterable[str]) -> Iterator[str]:
    """Yield the lines with more than white space, without their line ends."""
    for line in stream:
        if line.strip():
            yield line.rstrip("\r\n")


def images_in(folder: Path) -> list[str]:
    """Return the sorted paths of all images in a folder and its subfolders, also behind links.

    Hidden files and folders are left out, and so are files without an image's suffix.

    Raises:
        UserError: a folder can't be read, or there are no images.
    """
    suffixes = image_suffixes()
    paths: list[str] = []
    # The real paths of visited folders. A link to a folder above it would lead round and round.
    visited: set[str] = set()

    def refuse(problem: OSError) -> None:
        raise UserError(
            f"{problem.filename} can't be read ({problem.strerror})",
            advice="make sure that your user may read it, or pass other files",
        )

    # `os.walk` visits only those subfolders that remain in the list `folders`.
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if os.path.realpath(parent) in visited:
            folders.clear()
            continue
        visited.add(os.path.realpath(parent))
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if Path(name).suffix.lower() in suffixes and not name.startswith("."):
                paths.append(os.path.join(parent, name))
    if not paths:
        raise UserError(
            f"{folder} and its subfolders contain no image files (.png, .jpg and so on; names that "
            "begin with a dot are skipped)",
            advice="pass image files, or another folder",
        )
    return sorted(paths)


def image_suffixes() -> set[str]:
    """Return the suffixes of the image formats that Pillow reads, in lower case, with their dot."""
    formats = Image.registered_extensions()
    return {suffix for suffix, image_format in formats.items() if image_format in Image.OPEN}
