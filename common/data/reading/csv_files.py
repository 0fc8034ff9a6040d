"""Finds the separator and the encoding of a CSV file, so that pandas reads it correctly.

A file whose encoding or columns are not certain is refused. A wrong guess would change its words or
columns without an error.
"""

import codecs
import csv
import io
import re
from collections import Counter
from typing import NamedTuple

from common.errors import UserError
from common.system.platforms.commands import quoted, with_posix_command
from common.system.wording import counted

SEPARATORS = (",", ";", "\t", "|")
SEPARATOR_NAMES = {"\t": "tabs"}  # for messages; other separators are shown as they are
# The advice for a file whose rows can't be told apart or differ in length. `damaged_tables` uses it
# if pandas can't read a file.
RAGGED_ADVICE = (
    "give each row as many values as the header has names, put texts that contain a separator into "
    "quotes, and close each quote"
)
SAMPLE = 2**16  # characters at the beginning of a file, from which the separator is inferred
BLOCK = 2**20  # bytes that are decoded at a time
# The longer marks come first, because the mark of UTF-32 begins with that of UTF-16.
BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8"),  # pandas skips the mark
)
# By the first bytes of an archive: its name in the message, and the message's advice.
ARCHIVES = {
    b"PK\x03\x04": ("a zip archive or an Excel file", "export the table as CSV"),
    b"\x1f\x8b": ("a gzip archive", "unpack the file"),
}
MIN_ZEROS = 1 / 8  # the least share of zeros among the bytes of a text in UTF-16
MAX_LOW_ZEROS = 1 / 10  # the largest share of low bytes among these zeros


class Dialect(NamedTuple):
    """The separator and the encoding of a CSV file."""

    separator: str
    encoding: str  # Python's name, in lower case

    def __str__(self) -> str:
        return f"separated by {separator_name(self.separator)}, in {self.encoding.upper()}"


DEFAULT = Dialect(",", "utf-8")


def separator_name(separator: str) -> str:
    """Return the text by which messages call a separator."""
    return SEPARATOR_NAMES.get(separator, repr(separator))


def find_dialect(path: str) -> Dialect:
    """Return the separator and the encoding of a CSV file.

    The separator is inferred from the beginning of the file. The encoding is checked on the whole
    file.

    Raises:
        UserError: the file is empty, its encoding is not certain, its first line is meant for
            spreadsheets, the header has fewer names than the first row has values, or the header
            has a name twice.
        OSError: the file can't be read.
    """
    encoding = find_encoding(path)
    # "utf-8-sig" is UTF-8 that skips a byte order mark.
    with open(path, encoding="utf-8-sig" if encoding == "utf-8" else encoding, newline="") as file:
        sample = file.read(SAMPLE)
    is_whole = len(sample) < SAMPLE
    if is_whole and not sample.strip():
        raise UserError(
            f"{path} is empty", advice="remove the file, or write a header and rows into it"
        )
    refuse_separator_line(path, sample)
    separator = find_separator(sample, is_whole)
    records = split_into_rows(sample, separator, is_whole)
    refuse_unnamed_columns(path, records, separator)
    refuse_repeated_names(path, records)
    return Dialect(separator, encoding)


def refuse_separator_line(path: str, sample: str) -> None:
    """Raise a `UserError` if the first line only tells spreadsheets the separator, as in ``sep=;``.

    Without this check, pandas would read that line as the header.
    """
    first_line = sample.partition("\n")[0].strip().strip('"')
    if re.fullmatch(r"sep=.?", first_line, re.IGNORECASE):
        raise UserError(
            (
                f"{path} begins with the line {first_line!r}, which is for spreadsheets and "
                "would be read as the header"
            ),
            advice="remove this line from the file",
        )


def refuse_unnamed_columns(path: str, records: list[list[str]], separator: str) -> None:
    """Raise a `UserError` if the first row has more values than the header has names.

    Texts with separators that are not in quotes are a usual cause. Without this check, pandas would
    take the first values of all rows for the names of the rows, and put all other values into wrong
    columns.

    Args:
        records: the header and the first rows, split at the separator.
    """
    if len(records) < 2 or len(records[1]) <= len(records[0]):
        return
    names = ", ".join(records[0])
    raise UserError(
        (
            f"the first row of {path} has {len(records[1])} values, but the header has only "
            f"{counted(len(records[0]), 'name')} ({names:.80})"
        ),
        advice=(
            f"put texts that contain a separator ({separator_name(separator)}) into quotes, or "
            "give each column a name in the header"
        ),
    )


def refuse_repeated_names(path: str, records: list[list[str]]) -> None:
    """Raise a `UserError` if two columns have the same name.

    Without this check, pandas would rename the second one. A copy of the label column, named
    category.1, could then become a text that the model reads.

    Args:
        records: the header and the first rows, split at the separator.
    """
    header = records[0] if records else []
    counts = Counter(name for name in header if name)
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise UserError(
            f"the header of {path} has the name {repeated[0]!r} more than once",
            advice="give each column a name of its own",
        )


def find_encoding(path: str) -> str:
    """Read a whole file, and return its Unicode encoding.

    Raises:
        UserError: the file is not in Unicode. Other encodings can't be told apart for certain, and
            a wrong one gives wrong words without an error.
    """
    with open(path, "rb") as file:
        head = file.read(BLOCK)
    marked_encodings = [encoding for mark, encoding in BYTE_ORDER_MARKS if head.startswith(mark)]
    if not marked_encodings and b"\0" in head:  # text in UTF-8 has no zero bytes
        raise zeros_error(path, head)
    encoding = marked_encodings[0] if marked_encodings else "utf-8"
    check_encoding(path, encoding)
    return encoding


def check_encoding(path: str, encoding: str) -> None:
    """Decode a whole file in blocks; raise a `UserError` at the first byte that is invalid."""
    decoder = codecs.getincrementaldecoder(encoding)()
    decoded_bytes = 0
    with open(path, "rb") as file:
        while True:
            block = file.read(BLOCK)
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                # If a character began in the previous block, `error.object` begins with its bytes.
                # This block follows them.
                bytes_carried_over = len(error.object) - len(block)
                place = decoded_bytes - bytes_carried_over + error.start
                raise decoding_error(path, encoding, error, place) from None
            if not block:
                return
            decoded_bytes += len(block)


def zeros_error(path: str, head: bytes) -> UserError:
    """Return the error for a file with zero bytes and no byte order mark.

    The file may be an archive, a text in UTF-16, a text with a few zero bytes, or not a text.

    Args:
        head: the beginning of the file, with at least one zero byte.
    """
    for mark, (description, archive_advice) in ARCHIVES.items():
        if head.startswith(mark):
            problem = f"{path} is not a CSV file, but {description}"
            return UserError(problem, advice=archive_advice)
    encoding = likely_utf16(head)
    if encoding is not None:
        return UserError(
            f"{path} is not in UTF-8, but probably in {encoding} without a byte order mark",
            advice=conversion_advice(path, encoding),
        )
    advice = "save the table as CSV in UTF-8"
    # A text in UTF-8 with a few stray zero bytes can be read without these bytes.
    if has_few_zeros(head) and is_beginning_of_utf8(head):
        command = f"tr -d '\\000' < {quoted(path)} > new.csv"
        advice = with_posix_command("remove the zero bytes", command)
    place = head.index(0)
    return UserError(f"{path} is not a text file, because byte {place:,} is zero", advice=advice)


def likely_utf16(head: bytes) -> str | None:
    """Return the likely encoding of a text in UTF-16 without a mark; None for other contents.

    In UTF-16, the high byte of a Latin letter or a separator is zero. So zeros are frequent in a
    table. Nearly all of them are at even places in UTF-16BE, and at odd places in UTF-16LE.

    Args:
        head: the beginning of the file, with at least one zero byte.
    """
    if has_few_zeros(head):
        return None
    zeros_at_even = head[::2].count(0)
    zeros_at_odd = head[1::2].count(0)
    if min(zeros_at_even, zeros_at_odd) > MAX_LOW_ZEROS * (zeros_at_even + zeros_at_odd):
        return None
    return "UTF-16LE" if zeros_at_odd > zeros_at_even else "UTF-16BE"


def has_few_zeros(head: bytes) -> bool:
    """Whether bytes have fewer zeros than a text in UTF-16 would have."""
    return head.count(0) < len(head) * MIN_ZEROS


def is_beginning_of_utf8(head: bytes) -> bool:
    """Whether bytes are in UTF-8; the last character may be cut off."""
    try:
        # An incremental decoder accepts a last character that is cut off.
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def decoding_error(path: str, encoding: str, error: UnicodeDecodeError, place: int) -> UserError:
    """Return the `UserError` for a file that can't be decoded in its apparent encoding.

    Args:
        encoding: the encoding that the byte order mark states; "utf-8" without a mark.
        error: the error of the decoder.
        place: the position in the file of the first byte that is invalid, from 0.
    """
    name = encoding.upper()
    if encoding != "utf-8":
        return UserError(
            f"{path} begins like a file in encoding {name}, but byte {place:,} can't be decoded "
            f"({error.reason})",
            advice="save the file again in UTF-8",
        )
    byte = error.object[error.start]
    return UserError(
        f"{path} is not in UTF-8 (byte {place:,} is 0x{byte:02X}), but probably in Windows-1252 or "
        "Latin-1, if the text is in a Western language",
        advice=conversion_advice(path, "CP1252"),
    )


def conversion_advice(path: str, encoding: str) -> str:
    """Return the advice to convert a file from its likely encoding, with a command to run."""
    command = f"iconv -f {encoding} -t UTF-8 {quoted(path)} > new.csv"
    return with_posix_command("save the file in UTF-8", command)


def find_separator(sample: str, is_whole: bool) -> str:
    """Infer the separator of the columns from the first characters of a CSV file.

    A separator that gives all rows the same number of columns is preferred to any other. Among
    several of these, or else among all, the separator that gives the most columns is chosen. If no
    separator gives two columns, the file has only one column, and can be read with a comma.

    Args:
        is_whole: whether `sample` is the whole file.
    """
    column_counts: dict[str, int] = {}
    regular_separators: list[str] = []  # these give all rows the same number of columns
    for separator in SEPARATORS:
        rows = split_into_rows(sample, separator, is_whole)
        if not rows or len(rows[0]) < 2:
            continue
        column_counts[separator] = len(rows[0])
        if all(len(row) == len(rows[0]) for row in rows):
            regular_separators.append(separator)
    candidates = regular_separators or list(column_counts)
    return max(candidates, key=lambda separator: column_counts[separator], default=",")


def split_into_rows(sample: str, separator: str, is_whole: bool) -> list[list[str]]:
    """Split the beginning of a CSV file into rows, the header included, without empty rows.

    The last row is left out if it may be cut off, unless it is the only one. The list is empty if
    `csv` can't read the rows.

    Args:
        is_whole: whether `sample` is the whole file.
    """
    try:
        rows = [row for row in csv.reader(io.StringIO(sample), delimiter=separator) if row]
    except csv.Error:
        return []
    if is_whole or len(rows) == 1:
        return rows
    return rows[:-1]
