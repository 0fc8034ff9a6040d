"""The separator and the encoding of a CSV file, found from its contents."""

import codecs
import csv
import io
from typing import NamedTuple

from common.errors import UserError

SEPARATORS = (",", ";", "\t", "|")
SHOWN = {"\t": "tabs"}
SAMPLE = 2**16  # characters at the beginning of a file from which the separator is found
BLOCK = 2**20  # bytes that are read at once
BYTE_ORDER_MARKS = (  # the longer ones first: that of UTF-32 begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8"),  # pandas skips the mark
)


class Dialect(NamedTuple):
    separator: str
    encoding: str

    def __str__(self) -> str:
        separator = SHOWN.get(self.separator, repr(self.separator))
        return f"separated by {separator}, in {self.encoding.upper()}"


DEFAULT = Dialect(",", "utf-8")


def find_dialect(path: str) -> Dialect:
    """Return the dialect of a CSV file; raise a `UserError` if its encoding is not certain."""
    encoding = find_encoding(path)
    with open(path, encoding="utf-8-sig" if encoding == "utf-8" else encoding, newline="") as file:
        sample = file.read(SAMPLE)
    return Dialect(find_separator(sample, is_whole=len(sample) < SAMPLE), encoding)


def find_encoding(path: str) -> str:
    """Return the Unicode encoding of a file; the whole file is read.

    Raises:
        UserError: the file is not in Unicode. No other encoding can be recognised for certain, and
            a wrong one would change the words without an error.
    """
    with open(path, "rb") as file:
        head = file.read(BLOCK)
    marked = [encoding for mark, encoding in BYTE_ORDER_MARKS if head.startswith(mark)]
    if not marked and b"\0" in head:
        zeros_last = head[1::2].count(0) > head[::2].count(0)
        name = "UTF-16LE" if zeros_last else "UTF-16BE"
        raise UserError(f"{path} is no UTF-8, likely {name} without a mark: {advice(path, name)}")
    encoding = marked[0] if marked else "utf-8"
    decoder = codecs.getincrementaldecoder(encoding)()
    decoded_bytes = 0
    with open(path, "rb") as file:
        while True:
            block = file.read(BLOCK)
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as problem:
                position = decoded_bytes + problem.start
                raise UserError(not_decoded(path, encoding, problem, position)) from None
            if not block:
                return encoding
            decoded_bytes += len(block)


def not_decoded(path: str, encoding: str, problem: UnicodeDecodeError, position: int) -> str:
    """Return the message for a file that can't be decoded at a byte position."""
    name = encoding.upper()
    if encoding != "utf-8":
        return (
            f"{path} begins as {name}, and can't be decoded at byte {position:,} "
            f"({problem.reason}): save it again, in UTF-8"
        )
    byte = problem.object[problem.start]
    return (
        f"{path} is not in UTF-8 (byte 0x{byte:02X} at {position:,}); of Western languages it is "
        f"likely Windows-1252 or Latin-1: {advice(path, 'CP1252')}"
    )


def advice(path: str, encoding: str) -> str:
    return f"save it in UTF-8, as by iconv -f {encoding} -t UTF-8 {path} > new.csv"


def find_separator(sample: str, is_whole: bool) -> str:
    """Return the separator of a CSV file, found from its first characters.

    A separator that splits all rows into the same number of columns is preferred, and then the one
    that makes the most columns.
    """
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
    """Split the beginning of a CSV file into rows; drop the last row if it may be cut off."""
    try:
        rows = [row for row in csv.reader(io.StringIO(sample), delimiter=separator) if row]
    except csv.Error:
        return []
    return rows if is_whole or len(rows) < 2 else rows[:-1]
