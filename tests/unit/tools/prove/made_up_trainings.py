"""Makes observed runs in memory, like those of a small training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from common.tools.prove.records.observed_run import AnyObservedRecord, ObservedProcess, ObservedRun
from common.tools.prove.records.run_records import (
    Description,
    MicroBatch,
    ObservedEvaluation,
    Recorded,
    Saved,
    Started,
)

UPDATES = 6
SAMPLES = 4  # samples in a micro-batch


def started(step: int = 0) -> Started:
    return Started(
        step=step,
        world_size=1,
        total_steps=UPDATES,
        updates_per_epoch=3,
        samples_per_update=SAMPLES,
        batch_size=SAMPLES,
        accumulation=1,
        device="cpu",
        precision="no",
        split_sizes={"train": 14, "validation": 9},
        validation_split="validation",
        test_split="validation",
        parts=["model", "optimizer"],
        modules={"Linear": 2},
    )


def micro_batch(step: int, state: dict[str, str] | None = None) -> MicroBatch:
    """Return the record of a micro-batch whose digests depend only on the update."""
    described = Description(type="other", text="int, local variable of main()")
    return MicroBatch(
        step=step,
        micro_batch=0,
        epoch=step // 3,
        samples=[*range(step, step + SAMPLES)],
        batch=f"batch-{step}",
        generators={"torch": f"torch-{step}", "numpy": "numpy"},
        parts={"model": f"model-{step}", "optimizer": f"optimizer-{step}"},
        state=state or {},
        gone=[],
        described=dict.fromkeys(state or {}, described),
    )


def recorded(step: int) -> Recorded:
    return Recorded(
        step=step,
        micro_batch=0,
        is_update=True,
        loss=1 / (step + 1),
        metrics={"accuracy": (float(step), SAMPLES)},
        generators={"torch": f"torch-{step + 1}", "numpy": "numpy"},
        learning_rates=[0.1],
        clock=float(step),
    )


def evaluated(step: int, accuracy: float, phase: str = "validation") -> ObservedEvaluation:
    return ObservedEvaluation.model_validate(
        {
            "step": step,
            "phase": phase,
            "split": "validation",
            "samples": 100,
            "figures": {"accuracy": accuracy},
        }
    )


def saved(step: int) -> Saved:
    return Saved(
        step=step,
        parts={"model": f"model-{step}", "optimizer": f"optimizer-{step}"},
        generators={"torch": f"torch-{step}", "numpy": "numpy"},
    )


def launch(number: int, first: int = 0, end: int = UPDATES, rank: int = 0) -> ObservedProcess:
    """Return a launch that makes the updates from `first` to `end` - 1."""
    records: list[AnyObservedRecord] = [started(first)]
    for step in range(first, end):
        records += [micro_batch(step), recorded(step)]
        if (step + 1) % 3 == 0:
            records += [evaluated(step + 1, step / UPDATES), saved(step + 1)]
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
