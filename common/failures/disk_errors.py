"""Errors of a file system: whether the disk is to blame, and what the user can do."""

import errno

from common.system.platforms.messages import error_texts

# The numbers of the errors of a disk that is full or fails, which are not the user's mistake.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
FULL_ON_WINDOWS = "not enough space on the disk"  # Windows' own words, not those of C
# The texts of these errors, to recognise them in errors of libraries without a number.
DISK_ERROR_TEXTS = (*error_texts(*DISK_ERRORS), FULL_ON_WINDOWS)
# Advice for the user, by the error number.
ADVICE = {
    (errno.ENOSPC, errno.EDQUOT): "free some space",
    (errno.EIO,): "free some space, or look for a failing disk",
    (errno.EACCES, errno.EPERM): "give your user the right to write there",
    (errno.EROFS,): "make this file system writable",
    (
        errno.EEXIST,
        errno.ENOTEMPTY,
        errno.ENOTDIR,
        errno.EISDIR,
    ): "move the file or folder that is already there",
    (errno.ENOENT,): "make the folder, or check its name",
    (errno.ENAMETOOLONG,): "choose a shorter name",
    (errno.EFBIG,): "raise the limit on the size of files (ulimit -f), or shrink the model",
}


def advice_for(problem: str, error_number: int | None) -> str:
    """Return advice on an error of a file system.

    Args:
        problem: the error's text, which is only searched if `error_number` has no advice.
        error_number: the error's `errno`; None if a library raised it without a number.
    """
    for numbers, advice in ADVICE.items():
        if error_number in numbers:
            return advice
    for numbers, advice in ADVICE.items():
        is_full_on_windows = errno.ENOSPC in numbers and FULL_ON_WINDOWS in problem
        if is_full_on_windows or any(text in problem for text in error_texts(*numbers)):
            return advice
    return "check this path and its disk"


def number_of(error: BaseException) -> int | None:
    """Return the `errno` of an error; None for an error without a number."""
    return error.errno if isinstance(error, OSError) else None


def is_disk_error(error: BaseException) -> bool:
    """Whether an error of Python or of a library says that a disk is full or fails."""
    if number_of(error) in DISK_ERRORS:
        return True
    return any(text in str(error) for text in DISK_ERROR_TEXTS)
