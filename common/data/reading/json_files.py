"""Finds the damaged line of a JSON or JSON Lines file, because `datasets` does not name it."""

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from common.errors import UserError

ENCODING = "utf-8-sig"  # UTF-8, with or without a byte order mark
REMEDY = "correct this line, or copy the file again from where it came, or remove it"


def refuse_damaged_json(path: str, where: str) -> None:
    """Raise a `UserError` that names the damaged line of a JSON or JSON Lines file.

    The function returns normally if it finds no damage, or if the file is not a text in UTF-8.

    Args:
        where: the file in words, the first words of the message.

    Raises:
        UserError: the file is damaged.
    """
    try:
        if has_json_lines(path):
            refuse_damaged_line(path, where)
        else:
            json.loads(Path(path).read_text(encoding=ENCODING))
    except json.JSONDecodeError as error:  # its text has the number of the line
        raise UserError(f"{where} can't be read as JSON ({error})", advice=REMEDY) from None
    except (OSError, UnicodeDecodeError):  # for example a compressed file
        return


def has_json_lines(path: str) -> bool:
    """Whether each line of a file should be an object, because the first or the second line is one.

    The first line alone would not show it, because it may be the damaged one. Empty lines do not
    count.
    """
    with open(path, encoding=ENCODING) as lines:
        first_lines = [*islice(filter(str.strip, lines), 2)]
    if first_lines and first_lines[0].lstrip().startswith("["):  # a list of objects
        return False
    return any(is_object(line) for line in first_lines)


def refuse_damaged_line(path: str, where: str) -> None:
    """Raise a `UserError` that names the first damaged line of a JSON Lines file, if there is one.

    The arguments are those of `refuse_damaged_json`.
    """
    with open(path, encoding=ENCODING) as lines:
        number = damaged_line(lines)
    if number is not None:
        raise UserError(
            f"{where} can't be read, because line {number:,} is not a complete JSON object",
            advice=REMEDY,
        )


def damaged_line(lines: Iterable[str]) -> int | None:
    """Return the number of the first line that is no complete JSON object, from 1; None if all are.

    Empty lines do not count as damaged.
    """
    for number, line in enumerate(lines, start=1):
        if line.strip() and not is_object(line):
            return number
    return None


def is_object(line: str) -> bool:
    """Whether a line is a complete JSON object."""
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
