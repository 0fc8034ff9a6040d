"""Checks that the loop does not wait for the device between log lines."""

import linecache
from collections import defaultdict
from pathlib import Path

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
    """Name each line that waits between log lines."""
    updates_by_place: defaultdict[tuple[str, int, str], set[int]] = defaultdict(set)
    for _, wait in run.all(Wait):
        if wait.step >= FIRST and not wait.is_logged:
            updates_by_place[wait.file, wait.line, wait.operation].add(wait.step)
    # Updates FIRST to UPDATES - 1, without those that end with a log line.
    watched = sum(1 for step in range(FIRST, UPDATES) if (step + 1) % LOG_EVERY)
    causes = []
    for (file, line, operation), updates in sorted(updates_by_place.items()):
        text = linecache.getline(file, line).strip()
        causes.append(
            f"{Path(file).name}, line {line}, waits for the device by {operation}, in "
            f"{len(updates)} of {watched} updates: {text}"
        )
    compared = f"each operation of the loop in {watched} updates without a log line"
    return Verdict(not causes, compared, tuple(causes), ADVICE if causes else "")


CHECK = Check(
    "waits",
    "the loop does not wait for the device between log lines",
    answer,
)
