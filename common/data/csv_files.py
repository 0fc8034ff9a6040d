"""How a CSV file is written: its separator and its encoding."""

import codecs
import csv
import io
import re
from typing import NamedTuple

from common.errors import UserError
from common.platforms import quoted, with_posix_command

SEPARATORS = (",", ";", "\t", "|")
SHOWN = {"\t": "tabs"}
# What to do about a file whose rows can't be told apart, or differ in length.
RAGGED_ADVICE = (
    "give each row as many values as the header has names, quote the texts that hold a separator, "
    "and close each quote"
)
# Characters at the beginning of a file by which the separator is told.
SAMPLE = 2**16
BLOCK = 2**20
BYTE_ORDER_MARKS = (  # the longer ones first: that of UTF-32 begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8"),  # pandas passes over the mark
)


class Dialect(NamedTuple):
    separator: str
    encoding: str

    def __str__(self) -> str:
        separator = SHOWN.get(self.separator, repr(self.separator))
        return f"separated by {separator}, in {self.encoding.upper()}"


DEFAULT = Dialect(",", "utf-8")


def find_dialect(path: str) -> Dialect:
    """Tell how a CSV file is written.

    Raises:
        UserError: it is empty, its encoding is not certain, its first line is no header, or the
            header has fewer names than the first row has values.
    """
    encoding = find_encoding(path)
    with open(path, encoding="utf-8-sig" if encoding == "utf-8" else encoding, newline="") as file:
        sample = file.read(SAMPLE)
    is_whole = len(sample) < SAMPLE
    if is_whole and not sample.strip():
        raise UserError(f"{path} is empty: remove it, or write a header and rows into it")
    refuse_separator_line(path, sample)
    separator = find_separator(sample, is_whole)
    refuse_unnamed_columns(path, read_records(sample, separator, is_whole), separator)
    return Dialect(separator, encoding)


def refuse_separator_line(path: str, sample: str) -> None:
    """Raise a `UserError` where the first line tells a spreadsheet the separator, as ``sep=;``."""
    first_line = sample.partition("\n")[0].strip().strip('"')
    if re.fullmatch(r"sep=.?", first_line, re.IGNORECASE):
        raise UserError(
            f"{path} begins with the line {first_line!r}, which is for spreadsheets and would be "
            "read as the header: remove that line"
        )


def refuse_unnamed_columns(path: str, records: list[list[str]], separator: str) -> None:
    """Raise a `UserError` where the first row has more values than the header has names.

    Pandas would take the first values for the names of the rows, so that each value would stand in
    the column of its neighbour. That happens where texts hold separators and are not quoted.
    """
    if len(records) < 2 or len(records[1]) <= len(records[0]):
        return
    names = ", ".join(records[0])
    raise UserError(
        f"{path}: its first row has {len(records[1])} values, and its header only "
        f"{len(records[0])} ({names:.80}): quote the texts that hold a separator "
        f"({SHOWN.get(separator, repr(separator))}), or name each column"
    )


def find_encoding(path: str) -> str:
    """Return the Unicode encoding of a file, all of which is read.

    Raises:
        UserError: it is not Unicode. No other encoding can be told for certain, and one that is
            taken for another makes other words without an error.
    """
    with open(path, "rb") as file:
        head = file.read(BLOCK)
    marked = [encoding for mark, encoding in BYTE_ORDER_MARKS if head.startswith(mark)]
    if not marked and b"\0" in head:
        refuse_stray_zeros(path, head)
        zeros_last = head[1::2].count(0) > head[::2].count(0)
        name = "UTF-16LE" if zeros_last else "UTF-16BE"
        advice = conversion_advice(path, name)
        raise UserError(f"{path} is no UTF-8, likely {name} without a mark: {advice}")
    encoding = marked[0] if marked else "utf-8"
    decoder = codecs.getincrementaldecoder(encoding)()
    decoded_bytes = 0
    with open(path, "rb") as file:
        while True:
            block = file.read(BLOCK)
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as problem:
                place = decoded_bytes + problem.start
                raise UserError(not_decoded(path, encoding, problem, place)) from None
            if not block:
                return encoding
            decoded_bytes += len(block)


def refuse_stray_zeros(path: str, head: bytes) -> None:
    """Raise a `UserError` where the beginning of a file is UTF-8 with a few zero bytes in it.

    Latin letters in UTF-16 are UTF-8, too, but every second byte of them is zero.
    """
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return
    if head.count(0) < len(head) / 8:
        place = head.index(0)
        command = f"tr -d '\\000' < {quoted(path)} > new.csv"
        advice = with_posix_command("remove the zero bytes", command)
        raise UserError(f"{path} holds a zero byte at {place:,}, which is no text: {advice}")


def not_decoded(path: str, encoding: str, problem: UnicodeDecodeError, place: int) -> str:
    """Say where a file is not in its encoding, and what to do."""
    name = encoding.upper()
    if encoding != "utf-8":
        return (
            f"{path} begins as {name}, and can't be decoded at byte {place:,} ({problem.reason}): "
            "save it again, in UTF-8"
        )
    byte = problem.object[problem.start]
    return (
        f"{path} is not in UTF-8 (byte 0x{byte:02X} at {place:,}); of Western languages it is "
        "likely Windows-1252 or Latin-1: "
        f"{conversion_advice(path, 'CP1252')}"
    )


def conversion_advice(path: str, encoding: str) -> str:
    command = f"iconv -f {encoding} -t UTF-8 {quoted(path)} > new.csv"
    return with_posix_command("save it in UTF-8", command)


def find_separator(sample: str, is_whole: bool) -> str:
    """Return what separates the columns of a CSV file, by its first characters."""
    records = {separator: read_records(sample, separator, is_whole) for separator in SEPARATORS}
    columns = {separator: len(rows[0]) if rows else 0 for separator, rows in records.items()}
    candidates = [separator for separator in SEPARATORS if columns[separator] > 1]
    regular = [
        separator
        for separator in candidates
        if all(len(row) == columns[separator] for row in records[separator])
    ]
    return max(regular or candidates or [","], key=lambda separator: columns[separator])


def read_records(sample: str, separator: str, is_whole: bool) -> list[list[str]]:
    """Split the beginning of a CSV file into rows, without the last one if it may be cut off."""
    try:
        rows = [row for row in csv.reader(io.StringIO(sample), delimiter=separator) if row]
    except csv.Error:
        return []
    return rows if is_whole or len(rows) < 2 else rows[:-1]
