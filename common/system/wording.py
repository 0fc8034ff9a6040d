"""Shortens, lists and counts things in the words of a sentence."""

from collections.abc import Sequence

MAX_ITEM_LENGTH = 200  # characters of an item of a list in a sentence
MAX_ITEMS = 5  # items of a list that a sentence repeats


def shortened(text: str, most_characters: int) -> str:
    """Return a text, with an ellipsis instead of what follows its first `most_characters`."""
    return text if len(text) <= most_characters else f"{text[:most_characters]}…"


def without_middle(text: str, most_characters: int) -> str:
    """Return a text, with an ellipsis instead of its middle if it has more characters."""
    if len(text) <= most_characters:
        return text
    half = most_characters // 2
    return f"{text[:half]} … {text[-half:]}"


def listed(items: Sequence[str]) -> str:
    """Return items as a phrase for a message: the first few, cut if long, and how many more."""
    shown = [shortened(text, MAX_ITEM_LENGTH) for text in items[:MAX_ITEMS]]
    count_left_out = len(items) - len(shown)
    return ", ".join(shown) + (f", and {count_left_out} more" if count_left_out else "")


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with what it counts, such as "1 run" and "1,200 runs".

    Args:
        noun: what is counted, in the singular.
        plural: the noun's plural; empty if that is the noun with an s.
    """
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {plural or noun + 's'}"
