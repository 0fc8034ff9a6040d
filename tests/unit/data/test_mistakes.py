"""Users' data of every sort: read, or refused in one sentence that names what to fix."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import struct
import zlib
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from datasets.data_files import SPLIT_KEYWORDS
from PIL import Image

from common.data.image_decoding.image_files import Decoder
from common.data.mistakes import empty_split_error
from common.data.reading.builders import open_builder
from common.data.reading.json_files import refuse_damaged_json
from common.data.reading.split_names import capital_split_name
from common.data.sources import DataSource, find_named
from common.errors import UserError
from common.run_directory.model_records import PixelFormat
from tests.local_data import (
    grey_images,
    sentences,
    write_csv,
    write_image_folder,
    write_image_parquet,
    write_parquet,
)
from tests.own_errors import require_no_own_class
from tests.unit.data.loading import images, refusal, text

SOURCE = DataSource("pets", "/data/pets", None, "named", "1")
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "ICO", "TGA", "PCX", "SGI", "ICNS")
MODES = ("L", "RGB", "P", "1", "RGBA", "CMYK", "I;16", "F", "LA", "I")


def encoded(image_format: str, mode: str) -> bytes | None:
    """Return a small image as a file, or None if the format lacks the mode."""
    pixels = np.random.default_rng(0).integers(0, 256, (16, 12, 3), dtype=np.uint8)
    file = io.BytesIO()
    image = Image.fromarray(pixels)
    image = Image.new("I;16", image.size, 7) if mode == "I;16" else image.convert(mode)
    try:
        image.save(file, image_format)
    except (OSError, KeyError, ValueError):
        return None
    return file.getvalue()


def mutated(whole: bytes, generator: random.Random) -> bytes:
    """Damage a file at random: truncate it, change bytes or numbers in its header, repeat it."""
    data = bytearray(whole)
    position = generator.randrange(len(whole))
    mutation = generator.choice(
        ["cut", "flip", "flip", "header", "header", "twice", "zero", "insert"]
    )
    if mutation == "cut":
        return bytes(data[:position])
    if mutation == "flip":
        for _ in range(generator.randint(1, 8)):
            data[generator.randrange(len(data))] = generator.randrange(256)
    elif mutation == "header":
        offset = generator.randrange(min(60, max(1, len(data) - 4)))
        wild = generator.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 0x80000000, 65535, 30000])
        data[offset : offset + 4] = struct.pack(generator.choice("<>") + "I", wild)
    elif mutation == "zero":
        data[position:] = bytes(len(data) - position)
    elif mutation == "insert":
        data[position:position] = generator.randbytes(generator.randint(1, 40))
    else:
        data = data * 2
    return bytes(data)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("image_format", FORMATS)
def test_damaged_image_is_decoded_or_named(image_format: str, thorough: bool) -> None:
    """Files of every format and mode are damaged in many ways."""
    generator = random.Random(image_format)
    refused = list[str]()
    whole = [data for mode in MODES if (data := encoded(image_format, mode))]
    assert whole
    for number in range(300 if thorough else 75):
        value = {"bytes": mutated(generator.choice(whole), generator), "path": f"{number}.img"}
        channels = generator.choice([1, 3])
        pixel_format = PixelFormat(channels=channels, image_size=8)
        try:
            pixels = Decoder(SOURCE, "train", pixel_format)(value)
        except UserError as error:
            require_no_own_class(error)
            refused.append(error.message)
            continue
        assert (pixels.shape, pixels.dtype) == ((8, 8, channels), np.uint8)
    assert len(refused) > (20 if thorough else 5)
    assert all(message.startswith("image ") and ".img can't be" in message for message in refused)
    assert not any("\n" in message for message in refused)


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def bomb() -> bytes:
    """Return a small PNG of 4,000 megapixels."""
    header = struct.pack(">IIBBBBB", 64_000, 64_000, 8, 0, 0, 0, 0)
    parts = (b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(bytes(99))))
    return b"".join(parts) + chunk(b"IEND", b"")


def with_file(name: str, content: str | bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        data = content if isinstance(content, bytes) else content.encode()
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)

    return write


def with_other_columns(suffix: str, **changes: str) -> Callable[[Path], None]:
    """Write two files of one split, the second with other column names."""

    def write(folder: Path) -> None:
        columns: dict[str, Any] = dict(sentences(12, 0))
        other = {changes.get(name, name): values for name, values in columns.items()}
        save: Any = write_csv if suffix == "csv" else write_parquet
        save(folder / f"train-1.{suffix}", columns)
        save(folder / f"train-2.{suffix}", other)

    return write


def with_label(values: list[Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        columns = {"sentence": sentences(12, 0)["sentence"], "label": values}
        write_parquet(folder / "train.parquet", columns)

    return write


def with_beside(test: str, name: str = "test.csv") -> Callable[[Path], None]:
    """Write a train split, and beside it a file with this content."""

    def write(folder: Path) -> None:
        write_csv(folder / "train.csv", sentences(12, 0))
        (folder / name).write_text(test)

    return write


def with_other_types(folder: Path) -> None:
    columns = sentences(12, 0)
    write_parquet(folder / "train-1.parquet", columns | {"label": list(range(12))})
    write_parquet(folder / "train-2.parquet", columns)


def beside_a_script(folder: Path) -> None:
    write_csv(folder / "train.csv", sentences(12, 0))
    (folder / f"{folder.name}.py").write_text("raise RuntimeError('this must never run')")


def linked_nowhere(folder: Path) -> None:
    folder.mkdir()
    (folder / "train.csv").symlink_to("nowhere.csv")


def linked_beside(folder: Path) -> None:
    write_csv(folder / "train.csv", sentences(12, 0))
    (folder / "test.csv").symlink_to("nowhere.csv")


TEXTS: dict[str, tuple[Callable[[Path], None], tuple[str, ...] | None]] = {
    "names of columns in csv": (with_other_columns("csv", label="lable"), ("train-2.csv", "lable")),
    "names in parquet": (
        with_other_columns("parquet", label="lable"),
        ("train-2.parquet", "lable"),
    ),
    "types in parquet": (with_other_types, ("train-2.parquet", "label")),
    "no rows": (
        with_beside("sentence,label\n"),
        ("test.csv", "has no rows: add rows to this file, or remove it"),
    ),
    "other columns in test": (
        with_beside("text,label\nx,a\n"),
        ("test.csv", "text", "such as an unlabelled test set, out of the folder"),
    ),
    "a list": (with_label([[1], [2]] * 6), ("is of type List, and --label-column needs text",)),
    "a dictionary": (with_label([{"a": 1}] * 12), ("is of type dict, and --label-column needs",)),
    "bytes": (with_label([b"a", b"b"] * 6), ("label",)),
    "numbers and texts": (
        with_file("train.jsonl", '{"text": "a", "label": 3}\n{"text": "a", "label": "x"}\n' * 6),
        ("values of different types",),
    ),
    "a nested text": (
        with_file(
            "train.jsonl",
            '{"meta": {"text": "a b"}, "label": "x"}\n{"meta": {"text": "c"}, "label": "y"}\n' * 6,
        ),
        ("fields of objects and lists are not read, so make columns of those in meta",),
    ),
    "a nested label": (
        with_file("train.jsonl", '{"text": "a b", "meta": {"label": "x"}}\n' * 12),
        ("make columns of those in meta",),
    ),
    "numbers instead of texts": (
        with_file("train.csv", "size,label\n" + "1,a\n2,b\n" * 6),
        ("no likely column for --text-columns", "copy examples/regression.py"),
    ),
    "a column twice": (
        with_file("train.csv", "text,label,label\n" + "x,a,a\ny,b,b\n" * 6),
        ("train.csv has the name 'label' more than once",),
    ),
    "capitals in test": (
        with_beside("sentence,label\nx,a\n", name="Test.csv"),
        ("Test.csv is not read as data of the split test", "write test in the name"),
    ),
    "capitals in train": (
        with_file("Train-1.csv", "sentence,label\n" + "x,a\ny,b\n" * 6),
        None,
    ),
    "no labels at all": (with_label([None] * 12), ("label",)),
    "true and false": (with_label([True, False] * 6), None),
    "a script of its name": (beside_a_script, ("scripts are no longer supported", "mine.py")),
    "a script alone": (with_file("mine.py", "raise RuntimeError"), ("mine.py",)),
    "no file": (lambda folder: folder.mkdir(), ("mine has no files: put files of a known kind",)),
    "no file in folders": (
        lambda folder: (folder / "train" / "cat").mkdir(parents=True),
        ("mine has no files: put files of a known kind",),
    ),
    "a hidden file": (with_file(".hidden", ""), ("mine has no files: put files of a known kind",)),
    "no file of a known kind": (
        with_file("data.xyz", "text"),
        ("mine has no file of a known kind, only 1 file such as 'data.xyz'", ".jsonl, .parquet"),
    ),
    "a broken link": (linked_nowhere, ("mine", "'train.csv' in data set")),
    "a broken link beside": (linked_beside, ("mine", "'test.csv' in data set")),
    "an empty csv": (with_file("train.csv", ""), ("train.csv", "is empty: remove the file")),
    "an empty test": (with_beside("\n\n"), ("test.csv", "is empty: remove the file")),
    "a ragged row": (
        with_beside("sentence,label\nx,a\ny,b,c,d\n"),
        ("test.csv", "in line 3, saw 4", "give each row as many values"),
    ),
    "no text": (
        with_file("train.csv", b"\xff\xfe\x00a,label\n1,2\n"),
        ("train.csv", "UTF-16", "save the file again"),
    ),
    "an open quote": (
        with_file("train.csv", 'a,label\n1,2\n"3,4\n5,6,7\n'),
        ("train.csv", "EOF", "close each quote"),
    ),
    "half of json": (with_file("train.json", '{"a": '), ("train.json", "JSON")),
    "half a row of json": (
        with_file("train.jsonl", '{"a":1}\n{"a":'),
        ("train.jsonl", "line 2 is not"),
    ),
    "no parquet": (with_file("train.parquet", "text"), ("train.parquet",)),
    "no zip": (with_file("train.zip", b"PK\x03\x04 nonsense"), ("mine", "zip")),
    "no gzip": (with_file("train.csv.gz", b"\x1f\x8b nonsense"), ("train.csv.gz", "compression")),
    "infos that are none": (with_file("dataset_infos.json", "{"), ("mine", "JSON")),
    "a readme that is none": (
        with_file("README.md", "---\nconfigs: [1\n---\n"),
        ("mine", "configs"),
    ),
    "a readme of numbers": (with_file("README.md", "---\nconfigs: 7\n---\n"), ("mine", "configs")),
    "types that are none": (
        with_file("README.md", "---\ndataset_info: {features: 7}\n---\n"),
        ("mine", "TypeError"),
    ),
}


@pytest.mark.parametrize("case", TEXTS)
def test_folder_of_text_is_read_or_named(case: str, tmp_path: Path) -> None:
    """The message names the folder or the data set, and what is wrong."""
    write, words = TEXTS[case]
    folder = tmp_path / "mine"
    if case.startswith(("infos", "a readme", "types that")):
        write_csv(folder / "train.csv", sentences(12, 0))
    write(folder)
    if words is None:
        assert len(text(folder).splits["train"]) > 9
    else:
        message = refusal(lambda: text(folder))
        assert all(word in message for word in words), message
        assert str(folder) in message or "data set mine" in message
        assert "EmptyDatasetError" not in message
        assert "Hub" not in message


@pytest.mark.parametrize("word", [*chain(*SPLIT_KEYWORDS.values())])
@pytest.mark.parametrize("change", [str.capitalize, str.upper, str.lower])
def test_split_with_capitals_is_recognised_where_it_names_a_split(
    word: str, change: Callable[[str], str]
) -> None:
    """A table's own name may be that of a split, and any folder's, but not that of a class."""
    written = change(word)
    expected = None if written == word else written
    for path in (
        f"{written}.csv",
        f"my-{written}_01.csv",
        f"{written}/a.csv",
        f"a/{written} 2/b.csv",
    ):
        assert capital_split_name(path, has_classes=False) == expected, path
    for path in (f"{written}/cat/a.png", f"a/{written}-2/cat/a.png"):
        assert capital_split_name(path, has_classes=True) == expected, path
    for path in (f"{written}/a.png", f"cat/{written}.png", f"train/{written}/a.png"):
        assert capital_split_name(path, has_classes=True) is None, path
    assert capital_split_name(f"x{written}.csv", has_classes=False) is None


def test_images_in_a_split_with_capitals_are_refused(tmp_path: Path) -> None:
    """A class may be called Train, as in pictures of vehicles; a split may not."""
    folder = write_image_folder(tmp_path / "pets", ["Train", "dog"], per_class=12)
    assert images(folder).class_names == ["Train", "dog"]
    (folder / "train").rename(folder / "Val")
    assert "not read as data of the split validation" in refusal(lambda: images(folder))


@pytest.mark.parametrize(
    ("split", "place"),
    [(".", "logo.png"), ("train", "train/logo.png"), ("train", "train/cat/more/logo.png")],
)
def test_image_at_another_depth_is_named(split: str, place: str, tmp_path: Path) -> None:
    """One such image is enough for `datasets` to give no image a label."""
    folder = write_image_folder(tmp_path / "pets", ["cat", "dog"], per_class=12, split=split)
    image = next((folder / split / "cat").glob("*.png"))
    (folder / place).parent.mkdir(exist_ok=True)
    shutil.copy(image, folder / place)
    message = refusal(lambda: images(folder))
    assert f"1 image does not lie as many folders deep as the others, such as '{place}'" in message


@pytest.mark.parametrize("texts", [("label",), ("sentence", "label"), ("sentence", "sentence")])
def test_label_and_repeated_columns_are_no_texts(texts: tuple[str, ...], tmp_path: Path) -> None:
    """A model that reads the label would seem to be perfect."""
    write_csv(tmp_path / "mine" / "train.csv", sentences(24, 0))
    message = refusal(lambda: text(tmp_path / "mine", text_columns=texts))
    expected = "names label, which is the label column" if "label" in texts else "a column twice"
    assert expected in message


JSON_ROW = json.dumps({"sentence": 'a "word"', "label": "b", "more": [1, {"x": None}]})


@pytest.mark.parametrize("line", [1, 2, 7, 301])
@pytest.mark.parametrize("end", [1, len(JSON_ROW) // 2, len(JSON_ROW) - 1])
def test_damaged_line_of_json_is_counted(line: int, end: int, tmp_path: Path) -> None:
    """Wherever a row breaks off, the message has the number of its line, from 1."""
    rows = [JSON_ROW] * 400
    rows[line - 1] = JSON_ROW[:end]
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(rows) + "\n")
    message = refusal(lambda: refuse_damaged_json(str(path), f"file {path}"))
    assert f"file {path} can't be read, because line {line} is not a complete" in message


@pytest.mark.parametrize("line", [3, 7, 40])
def test_damaged_line_of_indented_json_is_named(line: int, tmp_path: Path) -> None:
    """A JSON file may have lines, too, although its rows are no lines."""
    path = tmp_path / "train.json"
    whole = json.dumps([{"sentence": "a", "label": number} for number in range(20)], indent=1)
    lines = whole.split("\n")
    lines[line - 1] += "'"
    path.write_text("\n".join(lines))
    assert f": line {line} column " in refusal(lambda: refuse_damaged_json(str(path), "it"))


@pytest.mark.parametrize(
    "content",
    [
        f"{JSON_ROW}\n\n{JSON_ROW}",
        f"\ufeff{JSON_ROW}\r\n{JSON_ROW}\r\n",
        json.dumps({"sentence": "a\u2028b\x85"}, ensure_ascii=False),
        f"[\n{JSON_ROW},\n{JSON_ROW}\n]",
        json.dumps({"data": [{"a": 1}, {"a": 2}]}, indent=1),
    ],
)
def test_whole_json_is_not_called_damaged(content: str, tmp_path: Path) -> None:
    """`datasets` may refuse such a file for another reason, which its own error names."""
    (tmp_path / "train.json").write_text(content)
    refuse_damaged_json(str(tmp_path / "train.json"), "it")


def test_incomplete_line_of_a_data_set_is_named(tmp_path: Path) -> None:
    """The reader of the data set asks for the line, which `datasets` does not name."""
    rows = [JSON_ROW] * 400
    rows[300] = JSON_ROW[:23]
    with_file("train.jsonl", "\n".join(rows))(tmp_path / "mine")
    message = refusal(lambda: text(tmp_path / "mine"))
    assert "train.jsonl" in message
    assert "line 301 is not a complete JSON object" in message


CONFIGURATIONS = """---
configs:
- {config_name: first, data_files: [{split: train, path: train.csv}]}
- {config_name: second, data_files: [{split: train, path: train.csv}]}
---
"""


@pytest.mark.parametrize(
    ("readme", "configuration", "words"),
    [
        ("", "foo", "has no configurations, but --dataset-config is foo: leave out --dataset-"),
        (CONFIGURATIONS, "foo", "has no configuration foo, only first, second: name one of"),
        (CONFIGURATIONS, None, "several configurations (first, second): choose one of them with"),
        (CONFIGURATIONS, "second", None),
        ("", "default", None),
        ("", None, None),
    ],
)
def test_wrong_configuration_of_a_folder_is_named(
    readme: str, configuration: str | None, words: str | None, tmp_path: Path
) -> None:
    """The flag is at fault, and not the files."""
    folder = tmp_path / "mine"
    write_csv(folder / "train.csv", sentences(12, 0))
    if readme:
        (folder / "README.md").write_text(readme)
    source = find_named(str(folder), configuration)
    if words is None:
        assert open_builder(source).builder.name == "csv"
        return
    message = refusal(lambda: open_builder(source))
    assert words in message
    assert "check the data set's files" not in message


@pytest.mark.parametrize("column", ["path", "file", "filename", "Unnamed"])
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_metadata_without_paths_of_images_is_named(
    suffix: str, column: str, tmp_path: Path
) -> None:
    """The message has the file, the column that it needs, and the columns that it has."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for number in range(4):
        Image.new("L", (8, 8)).save(folder / f"{number}.png")
    columns = {column: [f"{number}.png" for number in range(4)], "label": ["a", "b"] * 2}
    table = pandas.DataFrame(columns)
    file = folder / f"metadata.{suffix}"
    if suffix == "csv":
        table.to_csv(file, index=False)
    elif suffix == "jsonl":
        table.to_json(file, orient="records", lines=True)
    else:
        table.to_parquet(file, index=False)
    message = refusal(lambda: images(folder))
    assert f"{file} of data set {folder} has no column file_name, only {column}, label" in message
    assert "give it a column file_name with the paths of the images beside it" in message


def test_class_missing_from_train_is_noted(tmp_path: Path) -> None:
    """Such a class can't be learned, and often marks rows without a label."""
    with_beside("sentence,label\nx,-1\n")(tmp_path / "mine")
    assert "train has no rows of 1 class: -1" in text(tmp_path / "mine").notes


@pytest.mark.parametrize(("num_classes", "is_noted"), [(12, True), (8, True), (7, False)])
def test_classes_of_one_row_are_noted(num_classes: int, is_noted: bool, tmp_path: Path) -> None:
    """A label column may hold numbers of the rows; a few rare classes are no reason for a note."""
    rows = [f"sentence {row},{min(row, num_classes - 1)}" for row in range(12)]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.csv").write_text("\n".join(["sentence,label", *rows]) + "\n")
    alone = 12 if num_classes == 12 else num_classes - 1
    note = (
        f"{alone} of 12 rows of train have a class of their own: check that label holds the "
        "labels, or pass --label-column"
    )
    assert (note in text(tmp_path / "mine").notes) == is_noted


def replace_value(path: Path, column: str, row: int, value: Any) -> None:
    """Change a value in a Parquet file without a change of types, as a general tool does."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    number = table.column_names.index(column)
    values = table.column(column).to_pylist()
    field = table.schema.field(number)
    values[row] = value
    changed = table.set_column(number, field, pyarrow.array(values, field.type))
    pyarrow.parquet.write_table(changed, path)


def test_class_label_out_of_range_is_named(tmp_path: Path) -> None:
    """The message names the number, the column and the split."""
    folder = tmp_path / "mine"
    splits = {"train": grey_images(12, 0), "test": grey_images(6, 1)}
    write_image_parquet(folder, splits, names="abcde")
    replace_value(folder / "test-00000-of-00001.parquet", "label", 3, 7)
    message = refusal(lambda: images(folder))
    assert "label" in message
    assert "7" in message
    assert "test" in message or "configured num_classes" in message


@pytest.mark.parametrize(
    "path",
    ["../secret.png", "/etc/hostname", "inside/../../secret.png", "~/secret.png", "none.png"],
)
def test_row_with_a_path_elsewhere_is_refused(path: str, tmp_path: Path) -> None:
    """A row of a table may read only files of its own data set."""
    folder = write_image_parquet(tmp_path / "mine", {"train": grey_images(12, 0)})
    Image.new("L", (8, 8)).save(tmp_path / "secret.png")
    value = {"bytes": None, "path": path}
    replace_value(folder / "train-00000-of-00001.parquet", "image", 4, value)
    message = refusal(lambda: images(folder))
    assert path in message
    is_outside = path not in ("~/secret.png", "none.png")
    assert ("is not inside the folder of data set" in message) == is_outside


def test_path_outside_of_a_single_file_has_advice_that_works(tmp_path: Path) -> None:
    """A file alone has no folder for its images. In a folder, the row must name the copy."""
    folder = write_image_parquet(tmp_path / "mine", {"train": grey_images(12, 0)})
    Image.new("L", (8, 8)).save(tmp_path / "secret.png")
    file = folder / "train-00000-of-00001.parquet"
    replace_value(file, "image", 4, {"bytes": None, "path": str(tmp_path / "secret.png")})
    assert "write the path of the copy into the table" in refusal(lambda: images(folder))
    message = refusal(lambda: images(file))
    assert "is not a folder that contains this image" in message
    assert "pass a folder that contains the table and its images as --dataset" in message


def test_row_with_a_path_inside_the_folder_is_read(tmp_path: Path) -> None:
    """Paths are relative to the folder, and the user may have linked a file into it."""
    folder = write_image_parquet(tmp_path / "mine", {"train": grey_images(12, 0)})
    Image.new("L", (8, 8)).save(tmp_path / "kept.png")
    (folder / "more").mkdir(parents=True)
    (folder / "more" / "linked.png").symlink_to(tmp_path / "kept.png")
    for row, path in ((4, "more/linked.png"), (5, None)):
        value = {"bytes": None, "path": path}
        replace_value(folder / "train-00000-of-00001.parquet", "image", row, value)
    data = images(folder, label_column="label", image_column="image")
    assert sum(len(split) for split in data.splits.values()) == 11
    assert any("rows have no image" in note for note in data.notes)


@pytest.mark.parametrize("content", [bomb(), b"", b"\x89PNG\r\n\x1a\n", bytes(500)])
@pytest.mark.filterwarnings("ignore")
def test_image_in_a_folder_that_cannot_be_decoded_is_named(content: bytes, tmp_path: Path) -> None:
    """The message names an image that can't be decoded, or that would fill the memory."""
    folder = write_image_folder(tmp_path / "pets", ["cat", "dog"], 4)
    (folder / "train" / "dog" / "002.png").write_bytes(content)
    message = refusal(lambda: images(folder))
    assert str(folder / "train" / "dog" / "002.png") in message


NAMES = [
    "",
    "a b",
    "a/b/c",
    "../x/y",
    "x" * 300,
    "~nobody-here/x",
    "../owner/..x",
    "\udcff",
    "a\0b",
    *("-", "a//b", "owner/näme", "owner/", "/", "--", "owner/na\nme", "https://hub/x", "a" * 97),
    "mnist/",
    "org/data.git",
    "datasets--x--y",
    "%2e%2e/x",
    "C:\\data",
    "$HOME",
    "owner/x?y#z",
]


@pytest.mark.parametrize("name", NAMES)
def test_impossible_data_set_name_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a name is neither asked of a server nor looked up on the machine."""
    monkeypatch.chdir(tmp_path)
    if name == "/":
        monkeypatch.setattr("common.data.sources.fingerprint_of_folder", lambda folder: "")
        find_named(name, None)
        return
    with pytest.raises(UserError) as error:
        find_named(name, None)
    assert "--dataset" in error.value.message
    assert len(error.value.message) < 1500


def test_folder_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that can't be listed is an error, so that its files are not left out silently."""
    folder = write_image_folder(tmp_path / "pets", ["cat", "dog"], 4)
    scan = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("dog"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr("os.scandir", refuse)
    message = refusal(lambda: images(folder))
    assert "Permission denied" in message
    assert str(folder / "train" / "dog") in message


@pytest.mark.parametrize("split", ["train", "test"])
def test_only_an_empty_split_for_evaluation_can_be_left_out(split: str) -> None:
    """Without its files, a run would be refused because it has no split to train on."""
    advice = empty_split_error("mine", split).advice
    assert ("or remove these files" in advice) == (split != "train")
    assert "pass another --dataset or --dataset-config" in advice
