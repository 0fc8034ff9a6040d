"""Finds the reason in the output of a failed training. This module imports no library."""

from __future__ import annotations

import re

TRACEBACK = "Traceback (most recent call last):"
RANK_PREFIX = re.compile(r"^(\[rank\d+\]): ?")
EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(: .*)?$")  # a name, and perhaps a message
# The launcher's own, which only say that a process failed.
LAUNCHERS = ("ChildFailedError", "CalledProcessError", "ProcessRaisedException")
# What recipes and the C++ runtime print instead of a traceback.
OTHER_REASONS = re.compile(r"^error: |what\(\): |Signal \d+ \(SIG\w+\)|Segmentation fault")


def exception_line(output: str) -> str:
    """Return the line of the exception that ended a training.

    Each process of a distributed training prints a traceback, and so does the launcher. The first
    process that printed one failed first. Of chained exceptions, the last one is the reason.

    Args:
        output: all that the training and its launcher printed.

    Returns:
        A line such as "ValueError: ..."; without a traceback, the line of another reason, or the
        last line with a word.
    """
    by_process = exceptions_by_process(output)
    if by_process:
        return next(iter(by_process.values()))[-1]
    lines = [line.strip() for line in output.splitlines()]
    reasons = [line for line in lines if OTHER_REASONS.search(line)]
    if reasons:
        return reasons[0]
    with_words = [line for line in lines if re.search(r"\w", line)]
    return with_words[-1] if with_words else "no output"


def exceptions_by_process(output: str) -> dict[str, list[str]]:
    """Return the lines of exceptions by the prefix of the process, those of launchers left out."""
    found: dict[str, list[str]] = {}
    open_tracebacks: set[str] = set()
    for line in output.splitlines():
        prefix = RANK_PREFIX.match(line)
        process = prefix[1] if prefix else ""
        words = line[prefix.end() :] if prefix else line
        if words.strip() == TRACEBACK:
            open_tracebacks.add(process)
        elif process in open_tracebacks and EXCEPTION.match(words):
            open_tracebacks.remove(process)
            if not any(launcher in words for launcher in LAUNCHERS):
                found.setdefault(process, []).append(words.strip())
    return found
