"""Compares the flags that a run has saved with those of a command."""

import os


def has_moved(before: object, now: object) -> bool:
    """Whether a user has moved a data set, so that a resume may read it from another path.

    The old path, which is absolute, no longer exists, and the new one does. Values that are no
    paths, such as the names of data sets, have not moved.
    """
    is_gone = isinstance(before, str) and os.path.isabs(before) and not os.path.exists(before)
    return is_gone and isinstance(now, str) and os.path.exists(now)
