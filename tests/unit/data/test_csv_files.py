"""CSV files of any separator, encoding and quoting: read as written, or named."""

from __future__ import annotations

import codecs
import csv
import gzip
import itertools
import zipfile
from pathlib import Path
from typing import Any

import pytest

from common.data.reading.csv_files import Dialect, check_encoding, find_dialect
from common.data.reading.tables import Tables
from common.data.sources import find_named
from common.errors import UserError
from common.system.platforms import current
from tests.unit.data.loading import refusal

ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-32")
QUOTING = (csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC)
TEXTS = (
    'He said "no", twice; then left',
    "tabs\tand | bars",
    "commas, commas, commas",
    "naïve café; Überraschung",
    "two\nlines",
    "plain words",
)


def write(path: Path, separator: str, encoding: str, quoting: Any, labels: list[Any]) -> list[str]:
    """Write a table of texts and labels; return the texts."""
    texts = [f"{TEXTS[row % len(TEXTS)]} {path.stem} {row}" for row in range(12)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding=encoding, newline="") as file:
        writer = csv.writer(file, delimiter=separator, quoting=quoting)
        writer.writerow(["review", "label"])
        writer.writerows((text, labels[row % len(labels)]) for row, text in enumerate(texts))
    return texts


CASES = [*itertools.product(",;\t|", ENCODINGS, QUOTING)]


@pytest.mark.parametrize(("separator", "encoding", "quoting"), CASES)
def test_dialect_is_detected(separator: str, encoding: str, quoting: Any, tmp_path: Path) -> None:
    """Texts and labels may contain other separators."""
    for labels in ([0, 1], ["good", "bad"], ["a;b", "c,d"]):
        path = tmp_path / "train.csv"
        write(path, separator, encoding, quoting, labels)
        assert find_dialect(str(path)) == Dialect(separator, encoding.removesuffix("-sig"))


@pytest.mark.parametrize("number", range(8))
def test_table_is_read_as_it_was_written(number: int, tmp_path: Path) -> None:
    """Each split may be written in its own dialect."""
    labels: list[Any] = [["no", "yes"], [0, 1]][number % 2]
    names = ("train", "validation", "test")[: 1 + number % 3]
    written = {}
    for place, name in enumerate(names):
        case = CASES[(number * 7 + place * 11) % len(CASES)]
        written[name] = write(tmp_path / "mine" / f"{name}.csv", *case, labels)
    table = Tables(find_named(str(tmp_path / "mine"), None), None)
    texts = {name: split["review"][:] for name, split in table.splits.items()}
    if len(names) == 1:  # a part is held out
        assert sorted(texts["train"] + texts["validation"]) == sorted(written["train"])
    else:
        assert texts == written
    assert table.class_names == [str(label) for label in labels]


@pytest.mark.parametrize(
    ("encoding", "advice"),
    [("cp1252", "CP1252"), ("utf-16-le", "UTF-16LE"), ("utf-16-be", "UTF-16BE")],
)
def test_uncertain_encoding_is_refused(encoding: str, advice: str, tmp_path: Path) -> None:
    """A wrong guess would silently change words, so the message has a command that converts the
    file.
    """
    write(tmp_path / "mine" / "train.csv", ";", encoding, csv.QUOTE_ALL, [0, 1])
    message = refusal(lambda: Tables(find_named(str(tmp_path / "mine"), None), None))
    assert "train.csv" in message
    assert f"iconv -f {advice} -t UTF-8" in message


@pytest.mark.parametrize("is_windows", [False, True])
@pytest.mark.parametrize("content", [b"review,label\ncaf\xe9,b\n", b"review,label\na b\0c,b\n"])
def test_advice_names_only_commands_of_the_system(
    content: bytes, is_windows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command can be pasted, whatever characters the path has."""
    monkeypatch.setattr(current, "IS_WINDOWS", is_windows)
    path = tmp_path / "my reviews.csv"
    path.write_bytes(content)
    message = refusal(lambda: find_dialect(str(path)))
    assert ("> new.csv" in message) != is_windows
    assert is_windows or f"'{path}' > new.csv" in message
    assert ("save the file in UTF-8" in message) or ("remove the zero bytes" in message)


def test_invalid_utf8_is_found_far_into_a_file(tmp_path: Path) -> None:
    """The message gives its position."""
    path = tmp_path / "train.csv"
    path.write_bytes(codecs.BOM_UTF8 + b"review,label\n" + b"a,b\n" * 600_000 + b"\xe9,b\n")
    assert "byte 2,400,016 is" in refusal(lambda: find_dialect(str(path)))


@pytest.mark.parametrize("block", range(1, 12))
def test_invalid_byte_has_its_place_wherever_blocks_end(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block may end within a character, whose bytes the decoder keeps for the next block."""
    monkeypatch.setattr("common.data.reading.csv_files.BLOCK", block)
    path = tmp_path / "table.csv"
    path.write_bytes("aé€😀".encode() + b"\xff,1\n")
    with pytest.raises(UserError, match="byte 10 is 0xFF"):
        check_encoding(str(path), "utf-8")


@pytest.mark.parametrize(
    ("separator", "text"), [(",", "well, good"), (";", "well; good"), ("\t", "well\tgood")]
)
@pytest.mark.parametrize("others", [[], ["web"], ["web", "2024"]])
def test_rows_longer_than_the_header_are_refused(
    separator: str, text: str, others: list[str], tmp_path: Path
) -> None:
    """Unquoted separators in texts would move each value into the next column."""
    path = tmp_path / "train.csv"
    header = ["review", *others, "label"]
    rows = [[f"{text} {row}", *others, "good"] for row in range(20)]
    path.write_text("\n".join(separator.join(row) for row in [header, *rows]))
    message = refusal(lambda: find_dialect(str(path)))
    assert f"{len(header) + 1} values, but the header has only {len(header)} names" in message
    assert "put texts that contain a separator" in message
    path.write_text("\n".join(separator.join(row) for row in [["first", *header], *rows]))
    assert find_dialect(str(path)).separator == separator


def test_unknown_separator_is_refused(tmp_path: Path) -> None:
    """An unknown separator is refused, because the header would be read as a single column."""
    path = tmp_path / "train.csv"
    path.write_text("review:label\n" + "good, as it was:yes\n" * 20)
    assert "but the header has only 1 name (review:label)" in refusal(
        lambda: find_dialect(str(path))
    )


@pytest.mark.parametrize("line", ["sep=;", '"sep=;"', "SEP=,\r"])
def test_separator_line_for_spreadsheets_is_refused(line: str, tmp_path: Path) -> None:
    """It is no header, and the message says to remove it."""
    path = tmp_path / "train.csv"
    path.write_text(f"{line}\nreview;label\n" + "good;yes\n" * 20)
    assert "remove this line" in refusal(lambda: find_dialect(str(path)))


def test_zero_byte_is_no_sign_of_another_encoding(tmp_path: Path) -> None:
    """The message gives its position instead of another encoding."""
    path = tmp_path / "train.csv"
    path.write_bytes(b"review,label\n" + b"a caf\xc3\xa9,b\n" * 50 + b"a\0b,b\n")
    message = refusal(lambda: find_dialect(str(path)))
    assert "byte 514 is zero" in message
    assert "iconv" not in message


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("zeros", [1, 2, 9])
@pytest.mark.parametrize("shift", [0, 1])
def test_only_many_zeros_at_every_second_place_suggest_utf16(
    encoding: str, zeros: int, shift: int, tmp_path: Path
) -> None:
    """A few zeros may all be at even or at odd places, and those of UTF-32 are at both."""
    path = tmp_path / "train.csv"
    two_rows = "a café,b\n" * 2  # an even number of bytes in each encoding
    rows = two_rows.replace("a", "\0", 1) * zeros + two_rows * (25 - zeros)
    path.write_text("review,label" + "s" * shift + "\n" + rows, encoding=encoding)
    message = refusal(lambda: find_dialect(str(path)))
    assert "is not a text file, because byte" in message
    assert "iconv" not in message
    assert ("remove the zero bytes" in message) == (encoding == "utf-8")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("text", ["rather good", "naïve Āā", "было очень хорошо", "ωραία ταινία"])
def test_utf16_is_recognised_in_several_scripts(encoding: str, text: str, tmp_path: Path) -> None:
    """Separators and spaces have a byte that is zero, even if letters do not."""
    path = tmp_path / "train.csv"
    path.write_text("review,label\n" + f"{text},good\n" * 20, encoding=encoding)
    name = encoding.upper().replace("16-", "16")
    assert f"probably in {name} without" in refusal(lambda: find_dialect(str(path)))


@pytest.mark.parametrize("rows", [1, 50, 5000])
def test_archive_is_named(rows: int, tmp_path: Path) -> None:
    """An Excel file is a zip archive."""
    path = tmp_path / "train.csv"
    table = b"".join(b"review %d,label\n" % row for row in range(rows))
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(path, "w", compression) as archive:
            archive.writestr("xl/sheet1.xml", table)
        message = refusal(lambda: find_dialect(str(path)))
        assert "is not a CSV file, but a zip archive or an Excel file: export the table" in message
    path.write_bytes(gzip.compress(table))
    message = refusal(lambda: find_dialect(str(path)))
    assert "is not a CSV file, but a gzip archive: unpack the file" in message


# Single files as data sets, and columns without a telling name.


def test_single_file_is_a_data_set(tmp_path: Path) -> None:
    """Files beside it are ignored. A column of two values beside free text holds the labels."""
    path = tmp_path / "reviews.csv"
    texts = [f"a review of some words, number {row}" for row in range(30)]
    rows = "".join(f'"{text}",{"good" if n % 2 else "bad"}\n' for n, text in enumerate(texts))
    path.write_text("review,sentiment\n" + rows)
    (tmp_path / "test.csv").write_text("other\n1\n")
    source = find_named(str(path), None)
    assert (source.name, source.location) == ("reviews", str(path))
    table = Tables(source, None)
    assert table.class_names == ["bad", "good"]
    assert table.columns.find_texts("--text-columns", (), table.label_column) == ["review"]
    assert sum(len(split) for split in table.splits.values()) == 30
    assert any("labels from sentiment" in note for note in table.notes)


@pytest.mark.parametrize("name", ["id", "ID", "idx", "Index", "Unnamed: 0"])
def test_column_that_numbers_the_rows_is_no_text(name: str, tmp_path: Path) -> None:
    """Such a column may hold strings."""
    path = tmp_path / "reviews.csv"
    rows = "".join(f"r{row},a review,{row % 2}\n" for row in range(30))
    path.write_text(f"{name},review,label\n{rows}")
    table = Tables(find_named(str(path), None), None)
    assert table.columns.find_texts("--text-columns", (), table.label_column) == ["review"]


@pytest.mark.parametrize("suffix", ["tsv", "json", "jsonl", "parquet"])
def test_file_of_any_format_is_a_data_set(suffix: str, tmp_path: Path) -> None:
    """A single file has its classes and rows, with some held out."""
    import pandas

    path = tmp_path / f"reviews.{suffix}"
    frame = pandas.DataFrame({"text": [f"text {n}" for n in range(12)], "label": [0, 1, 2] * 4})
    if suffix == "tsv":
        frame.to_csv(path, sep="\t", index=False)
    elif suffix == "parquet":
        frame.to_parquet(path)
    else:
        frame.to_json(path, orient="records", lines=suffix == "jsonl")
    table = Tables(find_named(str(path), None), None)
    assert table.class_names == ["0", "1", "2"]
    assert sum(len(split) for split in table.splits.values()) == 12


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"mood": ["glad", "sad"]}, ("sentiment", "mood")),  # two of few values
        # Numbers may be meant, too.
        ({"price": [n * 1.5 for n in range(30)]}, ("no likely column",)),
    ],
)
def test_ambiguous_label_columns_need_a_flag(
    others: dict[str, list[Any]], words: tuple[str, ...], tmp_path: Path
) -> None:
    """The message names the flag and the candidates."""
    columns = {
        "review": [f"a review, number {row}" for row in range(30)],
        "sentiment": ["good", "bad"] * 15,
    }
    for name, values in others.items():
        columns[name] = [values[row % len(values)] for row in range(30)]
    with (tmp_path / "reviews.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    source = find_named(str(tmp_path / "reviews.csv"), None)
    message = refusal(lambda: Tables(source, None))
    assert all(word in message for word in ("--label-column", *words))
    assert Tables(source, "sentiment").class_names == ["bad", "good"]


def test_only_other_names_are_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A correct name that is not available has no suggestion."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reviews.csv").write_text("text,label\n")
    assert "if you meant that" not in refusal(lambda: find_named("sst2", None))
    assert "pass sst2 if you meant that, " in refusal(lambda: find_named("sst-2", None))
    assert "pass reviews.csv if you meant that, " in refusal(lambda: find_named("review.csv", None))
