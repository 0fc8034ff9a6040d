"""Names samples in the sentences of the check `samples`."""

from collections.abc import Sequence

MAX_NAMED = 5  # the most samples that a sentence lists


def first_samples(indices: Sequence[int]) -> str:
    """Return the indices of the first samples as text, such as "3, 7, 9"."""
    text = ", ".join(str(index) for index in indices[:MAX_NAMED])
    return f"{text}, …" if len(indices) > MAX_NAMED else text
