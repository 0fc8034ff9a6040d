"""Odd inputs: command lines generated from the flags, damaged files, and odd data sets."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pyarrow
import pyarrow.parquet
from hypothesis import strategies as st
from PIL import Image

from tests.damage import MISSING, places, with_value
from tests.unit.recipes import kind_of

ODD_TEXT = (
    *(
        "",
        " ",
        "-",
        "--",
        "x",
        "auto",
        "none",
        "None",
        "null",
        "true",
        "nan",
        "inf",
        "-inf",
        "1e400",
    ),
    *("0", "-0", "-1", "1", "7", "0.5", "1e-400", "1.5", "1e3", "0x10", "1_000", "١٢", "½", "∞"),
    "9" * 20,
    "1" + "0" * 400,
    "é",
    "日本",
    "\u202e",
    "a b",
    "a,b",
    "a:b",
    "a=b",
    "%s",
    "{}",
    "$HOME",
    "~",
    ".",
    "..",
    "/",
    "//",
    "/dev/null",
    "/dev/null/x",
    "/proc/self/x",
    "x" * 300,
    "x/" * 2000,
    "\n",
    "\t",
    "\x7f",
    "\udcff",
    "'",
    '"',
    "*",
    "?",
    "[",
    "<",
    "|",
    "&",
    ";",
    "#",
)
ODD_VALUES = (
    None,
    True,
    False,
    0,
    1,
    -1,
    7,
    10**20,
    -(10**20),
    0.5,
    -0.0,
    1e308,
    "",
    "x",
    "é",
    "1",
    "nan",
    "nan",
    "../..",
    "/",
    "x" * 300,
    "\x00",
    "\ud800",
    [],
    {},
    [1, "a", None],
    {"a": 1},
    [[[[]]]],
)
PATHS = ("whole", "file", "empty", "missing", "missing/below", "file/below", "dangling", "loop")


def words_of(config: type) -> st.SearchStrategy[list[str]]:
    """Generate command lines of a recipe: flags with fitting values, odd values, or none."""
    names = [field.name for field in dataclasses.fields(config)]
    return st.lists(
        st.sampled_from(names).flatmap(lambda name: flag(config, name)), max_size=5
    ).map(lambda groups: [word for group in groups for word in group])


def flag(config: type, name: str) -> st.SearchStrategy[list[str]]:
    """Generate the words of one flag."""
    value = st.one_of(
        fitting(kind_of(config, name)), st.sampled_from(ODD_TEXT), st.text(max_size=8)
    )
    value = value.filter(lambda text: "\0" not in text)
    dashed = f"--{name.replace('_', '-')}"
    return st.one_of(
        value.map(lambda text: [dashed, text]),
        value.map(lambda text: [f"{dashed}={text}"]),
        st.lists(value, max_size=3).map(lambda texts: [dashed, *texts]),
        st.sampled_from([[dashed], [dashed.replace("--", "--no-")], [f"--{name}", "1"], [name]]),
        value.map(lambda text: [dashed[:-1], text]),
    )


def fitting(flag_type: Any) -> st.SearchStrategy[str]:
    """Generate values that a flag of a type may have."""
    if get_origin(flag_type) is Literal:
        return st.sampled_from(get_args(flag_type))
    if flag_type is bool:
        return st.sampled_from(["True", "False"])
    if flag_type is int:
        return st.one_of(st.integers(), st.integers(0, 100)).map(str)
    if flag_type is float:
        return st.one_of(st.floats(), st.floats(0, 1)).map(str)
    return st.sampled_from(PATHS)


def make_paths(folder: Path) -> None:
    """Make the paths of `PATHS` in a folder, except "whole"."""
    (folder / "file").write_text("text")
    (folder / "empty").mkdir()
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")


# Damage


def damaged_json(data: st.DataObject, value: Any) -> Any:
    """Draw a copy of nested JSON in which one value is replaced or removed."""
    place = data.draw(st.sampled_from([(), *places(value)]))
    other = data.draw(st.one_of(st.sampled_from(ODD_VALUES), st.just(MISSING)))
    return with_value(value, place, other)


def damaged_bytes(data: st.DataObject, whole: bytes) -> bytes:
    """Draw damaged contents of a file: cut, with a flipped bit, zeroed, or replaced."""
    at = data.draw(st.integers(0, max(0, len(whole) - 1)))
    return data.draw(
        st.sampled_from(
            [
                b"",
                whole[:at],
                whole[at:],
                whole + whole,
                whole[:at] + bytes([whole[at] ^ 1 << at % 8 if whole else 0]) + whole[at + 1 :],
                whole[:at] + bytes(len(whole) - at),
                whole[:at] + b"\xff\xfe" + whole[at:],
                bytes(len(whole)),
                b"[" * 100_000,
                b"{}",
                b"null",
            ]
        )
    )


def damage(data: st.DataObject, folder: Path, sign: Callable[[Any], Any] | None = None) -> Path:
    """Draw a file under a folder, damage it, and return its path.

    Args:
        sign: adds the digest to changed JSON, as if the run had written it.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = data.draw(st.sampled_from(files))
    change = data.draw(
        st.sampled_from(["json", "json", "bytes", "gone", "folder", "dangling", "other"])
    )
    if change == "json" and path.suffix in (".json", ".jsonl"):
        with contextlib.suppress(ValueError, RecursionError):  # not JSON: damaged before
            text = path.read_text(encoding="utf-8")
            lines = text.splitlines() if path.suffix == ".jsonl" else [text]
            line = data.draw(st.integers(0, len(lines)))
            value = damaged_json(data, json.loads(lines[line] if line < len(lines) else "{}"))
            lines += [""] if line == len(lines) else []
            lines[line] = json.dumps(sign(value) if sign and isinstance(value, dict) else value)
            path.write_text("\n".join(lines) + "\n")
            return path
    if change in ("json", "bytes"):
        path.write_bytes(damaged_bytes(data, path.read_bytes()))
        return path
    other = data.draw(st.sampled_from(files))
    content = other.read_bytes()
    path.unlink()
    if change == "folder":
        path.mkdir()
    elif change == "dangling":
        path.symlink_to(data.draw(st.sampled_from(["nowhere", path.name])))
    elif change == "other":
        path.write_bytes(content)
    return path


# Data


FILES = (
    "train",
    "test",
    "validation",
    "dev",
    "train-00000-of-00002",
    "data",
    "x y",
    "é",
    ".hidden",
)
COLUMNS = ("text", "label", "sentence1", "sentence2", "idx", "image", "Label", "", "a.b", "path")
CELLS: dict[str, st.SearchStrategy[Any]] = {
    "texts": st.one_of(
        st.text(max_size=20), st.sampled_from(["a cat", "two dogs", "", "NA", "\x00"])
    ),
    "classes": st.sampled_from(["a", "b", "c"]),
    "numbers": st.integers(-2, 2),
    "large": st.sampled_from([0, 1, 2**62, -(2**63)]),
    "reals": st.floats(width=32),
    "flags": st.booleans(),
    "nothing": st.none(),
    "lists": st.lists(st.integers(0, 3), max_size=3),
    "objects": st.fixed_dictionaries({"bytes": st.binary(max_size=9), "path": st.none()}),
    "raw": st.binary(max_size=9),
}


def write_tables(data: st.DataObject, folder: Path) -> None:
    """Draw a folder of tables: some that a user may pass as a data set, and odd ones."""
    folder.mkdir()
    cell_types = data.draw(st.lists(st.sampled_from([*CELLS]), min_size=1, max_size=3))
    for _ in range(data.draw(st.integers(0, 3))):
        if data.draw(st.integers(0, 9)) == 9:  # a file that is unlike the others
            cell_types = data.draw(st.lists(st.sampled_from([*CELLS]), min_size=1, max_size=3))
        names = data.draw(st.permutations(COLUMNS))[: len(cell_types)]
        if data.draw(st.booleans()):
            names = ["text", "label", "idx"][: len(cell_types)]
        count = data.draw(st.integers(0, 12))
        rows = [
            {
                n: data.draw(st.one_of(CELLS[k], CELLS[k], st.none()))
                for n, k in zip(names, cell_types, strict=True)
            }
            for _ in range(count)
        ]
        form = data.draw(st.sampled_from([".csv", ".jsonl", ".parquet", ".txt", ".json", ".py"]))
        path = folder / f"{data.draw(st.sampled_from(FILES))}{form}"
        with contextlib.suppress(pyarrow.ArrowException, UnicodeEncodeError):
            write_table(path, rows, names)


def write_table(path: Path, rows: list[dict[str, Any]], names: Sequence[str]) -> None:
    """Write rows in the format that the path's suffix says; JSON lines for unknown suffixes."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            writer.writerows(row.values() for row in rows)
    else:
        path.write_text("".join(f"{json.dumps(row, default=str)}\n" for row in rows))


MODES = ("L", "RGB", "RGBA", "1", "P", "I", "I;16", "F", "CMYK")


def write_images(data: st.DataObject, folder: Path) -> None:
    """Draw a folder of images in folders by class, some of them damaged."""
    for split in ("train", "test"):
        for name in data.draw(st.sampled_from([("a", "b"), ("a",), ("a", "b", "é c"), ()])):
            for number in range(2):
                mode = data.draw(st.sampled_from(MODES))
                form = data.draw(
                    st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"])
                )
                size = data.draw(st.sampled_from([(8, 8), (1, 1), (5, 9), (300, 2)]))
                encoded = io.BytesIO()
                with contextlib.suppress(OSError, ValueError):  # some formats lack some modes
                    Image.new(mode, size, -1 if mode == "I" else 0).save(encoded, form)
                content = encoded.getvalue()
                if data.draw(st.integers(0, 5)) == 5:
                    content = damaged_bytes(data, content)
                path = folder / split / name / f"{number}.{form.lower()}"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)


def emptied(target: Path) -> Path:
    """Remove the file, link or folder at `target`, and return the path."""
    if target.is_symlink() or target.is_file():
        target.unlink()
    shutil.rmtree(target, ignore_errors=True)
    return target


def copied(folder: Path, target: Path) -> Path:
    """Replace `target` by a copy of `folder`, and return its path."""
    shutil.copytree(folder, emptied(target), symlinks=True)
    return target


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files under a folder, by relative path."""
    return {
        os.path.relpath(path, folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    }
