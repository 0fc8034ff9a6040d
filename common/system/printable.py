"""Makes text from outside, such as names, paths and answers of a server, safe to print."""

import codecs
import re

MAX_LINE_LENGTH = 4000  # characters
# Control characters except tab and newline, characters that change the writing direction, and
# surrogates, which stand for bytes that are not text. A terminal would obey or refuse them.
UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
# What an output prints instead of a symbol that its encoding lacks. The encoding of a Windows pipe
# has about 250 characters, and that of an ASCII terminal has fewer.
LOOKALIKES = {
    "×": "x",
    "→": "->",
    "★": "*",
    "✓": "+",
    "✗": "x",
    "…": "...",
    "–": "-",
    "±": "+-",
    "µ": "u",
    "²": "^2",
    "·": ".",
    "─": "-",
    "━": "-",
    "│": "|",
    "╭": "+",
    "╮": "+",
    "╰": "+",
    "╯": "+",
    "╸": "-",
    "╺": "-",
}
# Spinners are made of Braille characters.
FIRST_BRAILLE = "\u2800"
LAST_BRAILLE = "\u28ff"
PLAIN = "lookalikes"  # the name of the error handler, for `open(errors=...)`
LONG_LINE = re.compile(rf"[^\n]{{{MAX_LINE_LENGTH + 1},}}")


def printable(text: str) -> str:
    """Return `text` with unsafe characters escaped and very long lines shortened.

    A shortened line loses its middle, because a message begins with what is wrong and ends with
    what to do.
    """
    shortened = LONG_LINE.sub(shorten, text)
    return UNSAFE.sub(escape, with_restored_letters(shortened))


def with_restored_letters(text: str) -> str:
    """Restore letters that Python decoded to surrogate escapes in a locale limited to ASCII.

    Bytes that are no UTF-8 stay escapes, and so does any other surrogate.
    """
    if text.isascii():
        return text
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    except UnicodeError:
        return text


def replace_by_lookalikes(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that an output's encoding lacks; Python calls it as the handler `PLAIN`.

    Returns:
        The text to write instead, and the position at which the encoder goes on.

    Raises:
        UnicodeError: `error` itself, if it is an error of decoding: bytes have no lookalikes.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    return "".join(map(lookalike_of, characters)), error.end


def lookalike_of(character: str) -> str:
    """Return ASCII text that looks like a character; the character's escape if nothing does."""
    if FIRST_BRAILLE <= character <= LAST_BRAILLE:
        return "*"
    escaped = character.encode("ascii", "backslashreplace").decode("ascii")
    return LOOKALIKES.get(character, escaped)


codecs.register_error(PLAIN, replace_by_lookalikes)


def for_output(text: str, encoding: str) -> str:
    """Return `text` with lookalikes for the characters that an output's encoding lacks.

    A table needs them before it measures its columns, because a lookalike may be longer.
    """
    return text.encode(encoding, PLAIN).decode(encoding)


def escape(match: re.Match[str]) -> str:
    r"""Return the escape of a matched character, such as "\x1b"."""
    return match[0].encode("unicode_escape").decode("ascii")


def shorten(match: re.Match[str]) -> str:
    """Return a matched line without its middle."""
    line = match[0]
    half = MAX_LINE_LENGTH // 2
    return f"{line[:half]} … ({len(line) - 2 * half:,} characters left out) … {line[-half:]}"
