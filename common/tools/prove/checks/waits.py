"""Checks that the loop does not wait for the device between log lines."""

import linecache
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from common.tools.prove.bench import Bench, Check, RunSpec, Verdict
from common.tools.prove.notes import Wait
from common.tools.prove.observation import ObservedRun

UPDATES = 12
LOG_EVERY = 4
FIRST = 2  # updates in which code may do what it does once
ADVICE = (
    "hand tensors to run.record(loss, {...}), which reads them at log lines alone; on the device, "
    "torch.where and masks that are multiplied take the place of `if` and of selected rows"
)


def answer(bench: Bench) -> Verdict:
    spec = RunSpec(
        "waits",
        (
            *("--max-steps", str(UPDATES), "--epochs", "1000", "--log-every", str(LOG_EVERY)),
            *("--gradient-accumulation-steps", "1", "--no-compile"),
        ),
        instruments=("common.tools.prove.instruments.waits",),
        is_observed=False,
    )
    return verdict_of(bench.run(spec))


def verdict_of(run: ObservedRun) -> Verdict:
    """Name each line that waits between log lines.

    A wait in an installed package is named without a failure, because the user can't edit it.
    """
    updates_by_place: defaultdict[Place, set[int]] = defaultdict(set)
    for _, wait in run.all(Wait):
        if wait.step >= FIRST and not wait.is_logged:
            updates_by_place[place_of(wait)].add(wait.step)
    # Updates FIRST to UPDATES - 1, without those that end with a log line.
    watched = sum(1 for step in range(FIRST, UPDATES) if (step + 1) % LOG_EVERY)
    causes: list[str] = []
    waits_of_packages: list[str] = []
    for place, updates in sorted(updates_by_place.items()):
        sentence = in_words(place, f"in {len(updates)} of {watched} updates")
        (waits_of_packages if place.is_installed else causes).append(sentence)
    compared = f"each operation of the loop in {watched} updates without a log line"
    if waits_of_packages:
        compared += f"; installed packages wait as well: {'; '.join(waits_of_packages)}"
    return Verdict(not causes, compared, tuple(causes), ADVICE if causes else "")


class Place(NamedTuple):
    """Where the loop waits, and the line of the user's code that led there."""

    file: str
    line: int
    operation: str
    caller_file: str
    caller_line: int
    is_installed: bool


def place_of(wait: Wait) -> Place:
    return Place(
        wait.file,
        wait.line,
        wait.operation,
        wait.caller_file,
        wait.caller_line,
        wait.is_installed,
    )


def in_words(place: Place, updates: str) -> str:
    """Return where the loop waits, in which updates, and who has called that line."""
    text = linecache.getline(place.file, place.line).strip()
    sentence = (
        f"{Path(place.file).name}, line {place.line}, waits for the device by {place.operation}, "
        f"{updates}: {text}"
    )
    if (place.caller_file, place.caller_line) == (place.file, place.line):
        return sentence
    caller_text = linecache.getline(place.caller_file, place.caller_line).strip()
    caller = f"{Path(place.caller_file).name}, line {place.caller_line}"
    return f"{sentence} (called by {caller}: {caller_text})"


CHECK = Check(
    "waits",
    "the loop does not wait for the device between log lines",
    answer,
)
