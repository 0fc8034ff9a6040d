"""Divides the words of a command line into flags and their values."""

from collections.abc import Sequence

from common.errors import UserError


def flags_with_values(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each flag on a command line, spelled as in ``--batch-size``, with its values.

    The flags are in the order of the command line. A flag that occurs twice is there twice. A
    switch has no values.

    Raises:
        UserError: the first word is a value without a flag.
    """
    flags: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")  # without "=", the values are the next words
            flags.append((flag.replace("_", "-"), [value] if equals else []))
        elif flags:
            _, values = flags[-1]
            values.append(word)
        else:
            raise UserError(f"{word} is a value without a flag", advice="write its flag before it")
    return flags
