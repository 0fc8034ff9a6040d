"""Makes text from outside, such as names, paths and answers of a server, safe to print."""

import codecs
import re
from collections.abc import Collection, Sequence

MAX_LINE_LENGTH = 4000  # characters
MAX_ITEM_LENGTH = 200  # characters of an item of a list in a sentence
MAX_ITEMS = 5  # items of a list that a sentence repeats
# Control characters except tab and newline, characters that change the writing direction, and
# surrogates, which stand for bytes that are not text. A terminal would obey or refuse them.
UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
# What an output prints in place of a symbol that its encoding lacks. The encoding of a Windows pipe
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
# Matches what looks like a token of the Hub, of W&B or of GitHub.
TOKEN = re.compile(r"hf_[A-Za-z0-9]{30,}|wandb_v\d_\w{20,}|gh[pousr]_\w{30,}|github_pat_\w{20,}")
# Matches a password or token before a host: https://user:TOKEN@host, https://TOKEN@host,
# user:TOKEN@host.
SECRET_OF_ADDRESS = re.compile(r":(//)?[^/\s]*@")
# Matches a value that source code assigns to a name such as `api_key`.
ASSIGNED_SECRET = re.compile(
    r"""((?:api_?key|secret|password|passwd|credential|(?:access|auth|hf|hub|bearer)_?token)\w*"""
    r"""["']?\s*[:=]\s*[a-z]{0,2}["'])([^"'\s]{8,})(?=["'])""",
    re.IGNORECASE,
)
# Matches a key of W&B in source code: a number of 40 digits, as in `wandb.login(key="...")`.
KEY_ARGUMENT = re.compile(r"""(\bkey["']?\s*[:=]\s*["'])([0-9a-f]{40})(?=["'])""")
USER_OF_ADDRESS = re.compile(r"""(://)([^/\s"'@]+)(?=@)""")
PRIVATE_KEY = "PRIVATE KEY-----"  # the end of the first line of a private key's file
PLAIN = "lookalikes"  # the name of the error handler, for `open(errors=...)`
LONG_LINE = re.compile(rf"[^\n]{{{MAX_LINE_LENGTH + 1},}}")


def printable(text: str) -> str:
    """Return `text` with unsafe characters escaped and very long lines shortened.

    A shortened line loses its middle, because a message begins with what is wrong and ends with
    what to do.
    """
    shortened = LONG_LINE.sub(shorten, text)
    return UNSAFE.sub(escape, with_letters(shortened))


def has_secret(text: str) -> bool:
    """Whether a text contains a token, or an address that contains a user's name or password."""
    return SECRET_OF_ADDRESS.search(text) is not None or TOKEN.search(text) is not None


def without_tokens(text: str) -> str:
    """Return a text with *** in place of each token, for a file that others may read."""
    return TOKEN.sub("***", text)


def without_secrets(text: str, values: Collection[str]) -> str:
    """Return source code with *** in place of what looks like a secret.

    The secrets are tokens, values that are assigned to names such as `api_key`, and users and
    passwords in addresses. A text is hidden as a whole if it has a private key.

    Args:
        values: known secrets, such as those in the environment.
    """
    if PRIVATE_KEY in text:
        return "***"
    text = without_tokens(text)
    for pattern in (ASSIGNED_SECRET, KEY_ARGUMENT, USER_OF_ADDRESS):
        text = pattern.sub(r"\1***", text)
    for value in values:
        text = text.replace(value, "***")
    return text


def with_letters(text: str) -> str:
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
    """Replace characters that an output does not have: the error handler registered as `PLAIN`.

    Returns:
        The text to write instead, and the position at which the encoder goes on.

    Raises:
        UnicodeError: `error` itself, if it is not from encoding, because then no character is there
            to be replaced.
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
    """Return `text` with lookalikes for the characters that an output's encoding lacks."""
    return text.encode(encoding, PLAIN).decode(encoding)


def escape(match: re.Match[str]) -> str:
    r"""Return the escape of a matched character, such as "\x1b"."""
    return match[0].encode("unicode_escape").decode("ascii")


def shorten(match: re.Match[str]) -> str:
    """Return a matched line without its middle."""
    line = match[0]
    half = MAX_LINE_LENGTH // 2
    return f"{line[:half]} … ({len(line) - 2 * half:,} characters left out) … {line[-half:]}"


def shortened(text: str, most_characters: int) -> str:
    """Return a text, with an ellipsis in place of what follows its first `most_characters`."""
    return text if len(text) <= most_characters else f"{text[:most_characters]}…"


def listed(items: Sequence[str]) -> str:
    """Return items as a phrase for a message: the first few, cut if long, and how many more."""
    shown = [shortened(text, MAX_ITEM_LENGTH) for text in items[:MAX_ITEMS]]
    count_left_out = len(items) - len(shown)
    return ", ".join(shown) + (f", and {count_left_out} more" if count_left_out else "")
