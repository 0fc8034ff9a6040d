"""Checks that the loop does not wait for the device between log lines."""

import linecache
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from common.tools.prove.checks.base import Check
from common.tools.prove.proof_runs.bench import Bench, RunSpec
from common.tools.prove.proof_runs.recipe_flags import as_words
from common.tools.prove.records.instrument_records import Wait
from common.tools.prove.records.observed_run import ObservedRun
from common.tools.prove.verdicts import Verdict

UPDATES = 12
LOG_EVERY = 4
# The number of updates that are left out first. In these, code may do work that it does only once.
FIRST_CHECKED = 2
ADVICE = (
    "pass tensors to run.record(loss, {...}), which reads them only at log lines; on the device, "
    "use torch.where instead of `if`, and (values * mask).sum() / mask.sum().clamp(min=1) instead "
    "of values[mask].mean(); if the loop must read the value, as an action in reinforcement "
    "learning, pass --skip waits"
)


def judge_waits(bench: Bench) -> Verdict:
    """Launch a run whose waits are observed, and look for waits between its log lines."""
    spec = RunSpec(
        "waits",
        as_words(
            max_steps=UPDATES,
            epochs=1000,
            log_every=LOG_EVERY,
            gradient_accumulation_steps=1,
            compile=False,
        ),
        instruments=("common.tools.prove.instruments.waits",),
        reads_tensors=False,
    )
    return verdict_of(bench.run(spec))


def verdict_of(run: ObservedRun) -> Verdict:
    """Return a verdict that names each line that waits between log lines.

    A wait in an installed package is named, but is not a failure, because the user can't edit it.
    """
    updates_by_line: defaultdict[WaitingLine, set[int]] = defaultdict(set)
    for _, wait in run.all(Wait):
        if wait.step >= FIRST_CHECKED and not wait.is_update_logged:
            updates_by_line[waiting_line_of(wait)].add(wait.step)
    # The checked updates are those without a log line at their end.
    checked = sum(1 for step in range(FIRST_CHECKED, UPDATES) if (step + 1) % LOG_EVERY)
    causes: list[str] = []
    waits_of_packages: list[str] = []
    for waiting_line, updates in sorted(updates_by_line.items()):
        sentence = wait_in_words(waiting_line, len(updates), checked)
        if waiting_line.is_in_installed_package:
            waits_of_packages.append(sentence)
        else:
            causes.append(sentence)
    compared = f"each operation of the loop in {checked} updates without a log line"
    if waits_of_packages:
        compared += f"; installed packages wait as well: {'; '.join(waits_of_packages)}"
    return Verdict(not causes, compared, tuple(causes), ADVICE if causes else "")


class WaitingLine(NamedTuple):
    """A line that waits for the device, and the line of the user's code that led to it.

    Its fields are those of a `Wait` that do not depend on the update.
    """

    file: str
    line: int
    operation: str
    caller_file: str
    caller_line: int
    is_in_installed_package: bool


def waiting_line_of(wait: Wait) -> WaitingLine:
    return WaitingLine(
        wait.file,
        wait.line,
        wait.operation,
        wait.caller_file,
        wait.caller_line,
        wait.is_in_installed_package,
    )


def wait_in_words(waiting_line: WaitingLine, waiting_updates: int, checked_updates: int) -> str:
    """Return a sentence about a line that waits for the device, and about the line that called it.

    Args:
        waiting_updates: the number of updates in which the line waited.
        checked_updates: the number of updates that were checked.
    """
    text = linecache.getline(waiting_line.file, waiting_line.line).strip()
    sentence = (
        f"{Path(waiting_line.file).name}, line {waiting_line.line}, waits for the device by "
        f"{waiting_line.operation}, in {waiting_updates} of {checked_updates} updates: {text}"
    )
    is_same_file = waiting_line.caller_file == waiting_line.file
    is_own_caller = is_same_file and waiting_line.caller_line == waiting_line.line
    if is_own_caller:
        return sentence
    caller_text = linecache.getline(waiting_line.caller_file, waiting_line.caller_line).strip()
    caller = f"{Path(waiting_line.caller_file).name}, line {waiting_line.caller_line}"
    return f"{sentence} (called by {caller}: {caller_text})"


CHECK = Check(
    "waits",
    "the loop does not wait for the device between log lines",
    judge_waits,
)
