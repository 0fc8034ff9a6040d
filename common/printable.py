"""Text from outside, such as names, paths and answers of a server, made safe to print."""

import re

LONGEST_LINE = 4000  # characters
# Control characters but tab and newline, those that turn the direction of writing, and what stands
# for bytes that are no text: a terminal would obey or refuse them.
UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
LONG_LINE = re.compile(rf"[^\n]{{{LONGEST_LINE + 1},}}")


def printable(text: str) -> str:
    """Return `text` with escapes for what a terminal would obey, and its longest lines shortened.

    Their middle is left out: the beginning names what is wrong, and the end says what to do.
    """
    shortened = LONG_LINE.sub(shorten, text)
    return UNSAFE.sub(escape, with_letters(shortened))


def with_letters(text: str) -> str:
    """Return text with the letters that a locale of ASCII alone has left as single bytes."""
    if text.isascii():
        return text
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    except UnicodeError:
        return text


def escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def shorten(match: re.Match[str]) -> str:
    line, half = match[0], LONGEST_LINE // 2
    return f"{line[:half]} … ({len(line) - 2 * half:,} characters left out) … {line[-half:]}"
