"""A made-up training: observed runs in memory whose digests depend only on the update."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from common.tools.prove.records.observed_run import AnyObservedRecord, ObservedProcess, ObservedRun
from common.tools.prove.records.run_records import SavedState
from tests.unit.tools.prove.made_up_records import evaluated, micro_batch, recorded, started

UPDATES = 6
EPOCH = 3  # updates of an epoch
SAMPLES = 4  # samples in a micro-batch


def parts_at(step: int) -> dict[str, str]:
    return {"model": f"model-{step}", "optimizer": f"optimizer-{step}"}


def generators_at(step: int) -> dict[str, str]:
    return {"torch": f"torch-{step}", "numpy": "numpy"}


def saved(step: int) -> SavedState:
    return SavedState(step=step, part_digests=parts_at(step), generator_digests=generators_at(step))


def records_of_update(step: int) -> list[AnyObservedRecord]:
    """Return the records of an update, which has one micro-batch."""
    return [
        micro_batch(
            step,
            samples=range(step, step + SAMPLES),
            epoch=step // EPOCH,
            generators=generators_at(step),
            batch=f"batch-{step}",
            parts=parts_at(step),
        ),
        recorded(
            step,
            loss=1 / (step + 1),
            metrics={"accuracy": (float(step), SAMPLES)},
            generators=generators_at(step + 1),
            clock=float(step),
        ),
    ]


def launch(number: int, first: int = 0, end: int = UPDATES, rank: int = 0) -> ObservedProcess:
    """Return a launch that makes the updates from `first` to `end` - 1."""
    start = started(step=first, total_steps=UPDATES, updates_per_epoch=EPOCH)
    records: list[AnyObservedRecord] = [start]
    for step in range(first, end):
        records += records_of_update(step)
        if (step + 1) % EPOCH == 0:
            records += [evaluated({"accuracy": step / UPDATES}, step + 1), saved(step + 1)]
    return ObservedProcess(number, rank, tuple(records))


def run(*processes: ObservedProcess) -> ObservedRun:
    return ObservedRun("run", Path("nowhere"), processes, 1.0, "python recipe.py")


def changed(
    source: ObservedProcess, position: int, **values: object
) -> tuple[ObservedProcess, AnyObservedRecord]:
    """Return a launch with changed values in one of its records, and this record."""
    record = source.records[position].model_copy(update=values)
    records = (*source.records[:position], record, *source.records[position + 1 :])
    return replace(source, records=records), record
