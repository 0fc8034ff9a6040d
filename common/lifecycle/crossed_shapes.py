"""Makes errors of torch's warnings about losses that compare samples with others' targets."""

import re
import warnings
from typing import Any, cast

ALL_ONES = r"1(?:, 1)*\]"
# A warning of torch's losses for predictions and targets of the same shape, except that one of them
# has a further dimension of size 1 at its end, such as predictions [n, 1] and targets [n] with n
# above 1. Such a loss compares each prediction with the targets of other samples. If all sizes are
# 1, there is only one target.
CROSSED_SHAPES = (
    rf"Using a target size \(torch\.Size\(\[(?!{ALL_ONES})(.+)\]\)\) that is different to the "
    r"input size \(torch\.Size\(\[\1, 1\]\)\)",
    rf"Using a target size \(torch\.Size\(\[(?!{ALL_ONES})(.+), 1\]\)\) that is different to the "
    r"input size \(torch\.Size\(\[\1\]\)\)",
)


def refuse_crossed_shapes() -> None:
    """Let torch's losses raise their warning of `CROSSED_SHAPES`, nearly always a mistake."""
    for message in CROSSED_SHAPES:
        warnings.filterwarnings("error", message=message)


def allow_crossed_shapes() -> None:
    """Remove the warning filters of `refuse_crossed_shapes` from the process."""
    refusals = [("error", re.compile(message, re.IGNORECASE)) for message in CROSSED_SHAPES]
    filters = cast("list[tuple[Any, ...]]", warnings.filters)
    filters[:] = [entry for entry in filters if entry[:2] not in refusals]
