"""Made-up records of observed runs, and runs of them, for tests without any training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from common.tools.prove.records.base import ObservedRecord, Phase
from common.tools.prove.records.instrument_records import OptimizerStep, SampleMixing
from common.tools.prove.records.observed_run import AnyObservedRecord, ObservedProcess, ObservedRun
from common.tools.prove.records.run_records import (
    EvaluationBatch,
    EvaluationFigures,
    MicroBatch,
    RecordedMicroBatch,
    RunStart,
)


def started(
    *,
    step: int = 0,
    accumulation: int = 1,
    batch_size: int = 4,
    world_size: int = 1,
    total_steps: int = 4,
    updates_per_epoch: int = 2,
    training_samples: int = 10,
    evaluation_samples: int = 5,
) -> RunStart:
    """Return the record of a run that has started, at a step above 0 if it was resumed."""
    return RunStart(
        step=step,
        world_size=world_size,
        total_steps=total_steps,
        updates_per_epoch=updates_per_epoch,
        samples_per_update=batch_size * accumulation * world_size,
        batch_size=batch_size,
        accumulation=accumulation,
        device="cpu",
        precision="no",
        split_sizes={"train": training_samples, "validation": evaluation_samples},
        validation_split="validation",
        test_split="validation",
        worker_count=0,
        kept_part_names=["model"],
    )


def micro_batch(
    step: int,
    number: int = 0,
    samples: Sequence[int] = (0, 1, 2, 3),
    epoch: int = 0,
    generators: Mapping[str, str] | None = None,
    batch: str = "b",
    parts: Mapping[str, str] | None = None,
) -> MicroBatch:
    """Return the record of a micro-batch. Digests may be any text."""
    return MicroBatch(
        step=step,
        micro_batch=number,
        epoch=epoch,
        sample_indices=[*samples],
        batch_digest=batch,
        generator_digests=dict(generators or {"torch": "t"}),
        part_digests=dict(parts or {}),
        value_digests={},
        unreachable_paths=[],
        descriptions={},
    )


def recorded(
    step: int,
    number: int = 0,
    loss: float = 1.0,
    *,
    is_update: bool = True,
    metrics: Mapping[str, tuple[float, int]] | None = None,
    generators: Mapping[str, str] | None = None,
    clock: float = 0.0,
) -> RecordedMicroBatch:
    return RecordedMicroBatch(
        step=step,
        micro_batch=number,
        is_update=is_update,
        loss=loss,
        metrics=dict(metrics or {}),
        generator_digests=dict(generators or {"torch": "t"}),
        learning_rates=[0.1],
        clock_seconds=clock,
    )


def optimizer_step(step: int, norm: float = 2.0, rate: float = 0.1) -> OptimizerStep:
    return OptimizerStep(step=step, optimizer_number=0, gradient_norm=norm, learning_rates=[rate])


def sample_mixing(*layers: str, couples_samples: bool = False) -> SampleMixing:
    return SampleMixing(step=0, batch_norms=[*layers], couples_samples=couples_samples)


def evaluation_batch(
    samples: Sequence[int], step: int = 2, phase: Phase = "validation"
) -> EvaluationBatch:
    return EvaluationBatch(
        step=step,
        phase=phase,
        split="validation",
        sample_indices=[*samples],
        batch_digest="b",
        generator_digests={},
    )


def evaluated(
    figures: Mapping[str, float], step: int = 2, phase: Phase = "validation"
) -> EvaluationFigures:
    return EvaluationFigures(
        step=step, phase=phase, split="validation", sample_count=100, figures=dict(figures)
    )


def run_with(
    *ranks: Sequence[ObservedRecord],
    directory: Path = Path("nowhere"),
    later: Sequence[Sequence[ObservedRecord]] = (),
    rows: Sequence[Mapping[str, float]] | None = None,
    summary: Mapping[str, float] | None = None,
) -> ObservedRun:
    """Return a run of these records.

    Args:
        ranks: the records of each rank in the first launch.
        later: the records of each rank in the second launch.
        rows: the rows of `metrics.jsonl`, which is written into `directory`.
        summary: the contents of `summary.json`, which is written into `directory` with the status
            of a finished run.
    """
    processes = []
    for number, records_of_ranks in enumerate((ranks, later)):
        for rank, records in enumerate(records_of_ranks):
            observed = cast("tuple[AnyObservedRecord, ...]", tuple(records))
            processes.append(ObservedProcess(number, rank, observed))
    if rows is not None:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / "metrics.jsonl").write_text(text)
    if summary is not None:
        (directory / "summary.json").write_text(json.dumps(summary))
        (directory / "status.json").write_text('{"status": "finished"}')
    return ObservedRun("made up", directory, tuple(processes), 1.0, "python train.py")
