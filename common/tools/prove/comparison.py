"""Compares two runs that make the same updates in different ways, within a tolerance.

Sums in another order round differently. So the losses, the gradients and the weights of such runs
agree within a tolerance, and learning rates exactly. Dropout is off in these runs.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from safetensors.torch import load_file

from common.tools.prove.bench import Bench, Interruption, RunSpec
from common.tools.prove.instruments.updates import (
    COMPARED_UPDATE,
    FIRST_WEIGHTS,
    LATER_WEIGHTS,
)
from common.tools.prove.notes import OptimizerStep, SampleMixing
from common.tools.prove.observation import (
    MicroBatch,
    ObservedEvaluation,
    ObservedRun,
    Recorded,
    differing,
)

INSTRUMENTS = tuple(
    f"common.tools.prove.instruments.{name}"
    for name in ("without_dropout", "updates", "outcomes", "rows_used")
)
UPDATES = 6  # that are compared
# Tolerances. All but the last are relative.
LOSS = 1e-3
GRADIENTS = 1e-2
RATES = 1e-6
FIGURES = 1e-2  # of an evaluation; a figure may also differ by that of `FLIPPED` samples
FLIPPED = 2
WEIGHTS = 2e-2  # of the distance that the weights have moved up to the update `COMPARED_UPDATE`
# Absolute differences that are always allowed.
SMALL_LOSS = 1e-5
SMALL_NORM = 1e-6
SMALL_RATE = 1e-12
TOLERANCES = (
    f"tolerance: losses {LOSS:.1%}, gradients {GRADIENTS:.0%}, weights {WEIGHTS:.0%} of the "
    f"distance that they moved up to update {COMPARED_UPDATE}"
)


@dataclass(frozen=True)
class UpdateLayout:
    """How an update is divided: micro-batch size, accumulation, processes."""

    batch_size: int
    accumulation: int
    processes: int = 1

    def __str__(self) -> str:
        ranks = f" on {self.processes} processes" if self.processes > 1 else ""
        return f"{self.accumulation} × {self.batch_size}{ranks}"


@dataclass(frozen=True)
class UpdateLayouts:
    """Three ways of making the same updates."""

    whole: UpdateLayout
    divided: UpdateLayout
    distributed: UpdateLayout


def update_layouts(bench: Bench) -> UpdateLayouts:
    """Return three ways of making updates of about as many samples as those of the proof."""
    half = max(1, bench.batch_size * bench.accumulation // 2)
    return UpdateLayouts(UpdateLayout(2 * half, 1), UpdateLayout(half, 2), UpdateLayout(half, 1, processes=2))


def run_with_layout(
    bench: Bench,
    name: str,
    way: UpdateLayout,
    *,
    interruptions: tuple[Interruption, ...] = (),
    resumed_processes: int | None = None,
    environment: tuple[tuple[str, str], ...] = (),
) -> ObservedRun:
    """Return a run of an epoch that makes its updates in a way, in fp32 and without dropout.

    The epoch is whole, so that the check of samples sees all of it on several processes.
    """
    effective_batch = way.batch_size * way.accumulation * way.processes
    updates = max(UPDATES, bench.flags.training_samples // effective_batch)
    flags = (
        *("--batch-size", str(way.batch_size)),
        *("--gradient-accumulation-steps", str(way.accumulation)),
        *("--max-steps", str(updates), "--log-every", "1"),
        *("--mixed-precision", "no"),
    )
    spec = RunSpec(
        name,
        flags,
        processes=way.processes,
        instruments=INSTRUMENTS,
        interruptions=interruptions,
        resumed_processes=resumed_processes,
        environment=environment,
    )
    return bench.run(spec)


@dataclass(frozen=True)
class Update:
    """One update of a run, over all ranks."""

    micro_batches: int  # of each rank
    loss: float  # mean over micro-batches and ranks
    gradient_norms: tuple[float, ...]  # of each optimizer that made an update, in order
    learning_rates: tuple[float, ...]  # of all groups of these optimizers


@dataclass(frozen=True)
class UpdateDifference:
    """The first quantity in which the updates of two runs differ."""

    update: int  # its number, from 1
    # "optimizers" is the number of optimizer steps in an update.
    quantity: Literal["optimizers", "learning rate", "loss", "gradients"]
    first: float
    second: float

    @property
    def ratio(self) -> float:
        """The second value divided by the first."""
        return self.second / self.first if self.first else math.inf


def last_launches(run: ObservedRun) -> dict[int, int]:
    """Return for each update, by the number of updates before it, the launch that made it last."""
    launches: dict[int, int] = {}
    for launch, record in run.all(Recorded):
        if record.is_update:
            launches[record.step] = max(launch.launch, launches.get(record.step, 0))
    return launches


def updates_of(run: ObservedRun) -> dict[int, Update]:
    """Return the first `UPDATES` updates of a run by number, from 1.

    Rounding moves the weights of later ones further apart.

    If a resume repeated an update, its last execution counts. Gradients and learning rates are
    those of rank 0.
    """
    last_launch = last_launches(run)
    losses: defaultdict[int, list[float]] = defaultdict(list)
    micro_batches: defaultdict[int, int] = defaultdict(int)
    norms: defaultdict[int, list[float]] = defaultdict(list)
    rates: defaultdict[int, list[float]] = defaultdict(list)
    for launch, record in run.all(Recorded):
        if last_launch.get(record.step) == launch.launch:
            losses[record.step].append(record.loss)
            micro_batches[record.step] += launch.rank == 0
    for launch, optimizer_step in run.all(OptimizerStep):
        step = optimizer_step.step
        if launch.rank == 0 and last_launch.get(step) == launch.launch:
            norms[step].append(optimizer_step.gradient_norm)
            rates[step] += optimizer_step.learning_rates
    return {
        step + 1: Update(
            micro_batches[step],
            math.fsum(losses[step]) / len(losses[step]),
            tuple(norms[step]),
            tuple(rates[step]),
        )
        for step in sorted(last_launch)
        if step < UPDATES
    }


def first_differing_update(
    first: Mapping[int, Update], second: Mapping[int, Update]
) -> UpdateDifference | None:
    """Return the first quantity in which the updates of two runs differ beyond the tolerance."""
    for number in sorted(first.keys() & second.keys()):
        difference = differing_quantity(number, first[number], second[number])
        if difference is not None:
            return difference
    return None


def differing_quantity(number: int, first: Update, second: Update) -> UpdateDifference | None:
    """Return the first quantity in which two updates differ beyond the tolerance.

    Args:
        number: of the update, from 1.
    """
    steps = float(len(first.gradient_norms))
    other_steps = float(len(second.gradient_norms))
    if steps != other_steps:
        return UpdateDifference(number, "optimizers", steps, other_steps)
    for rate, other_rate in zip(first.learning_rates, second.learning_rates, strict=False):
        if not math.isclose(rate, other_rate, rel_tol=RATES, abs_tol=SMALL_RATE):
            return UpdateDifference(number, "learning rate", rate, other_rate)
    if not math.isclose(first.loss, second.loss, rel_tol=LOSS, abs_tol=SMALL_LOSS):
        return UpdateDifference(number, "loss", first.loss, second.loss)
    for norm, other_norm in zip(first.gradient_norms, second.gradient_norms, strict=True):
        if not math.isclose(norm, other_norm, rel_tol=GRADIENTS, abs_tol=SMALL_NORM):
            return UpdateDifference(number, "gradients", norm, other_norm)
    return None


@dataclass(frozen=True)
class Distance:
    """How far the weights of two runs are apart after the update `COMPARED_UPDATE`."""

    share: float  # of the distance that the weights have moved in the first run
    name: str  # the parameter that differs most


def weight_distance(first: ObservedRun, second: ObservedRun) -> Distance | None:
    """Return how far the weights of two runs are apart; None if a run has not come that far."""
    paths = [
        first.directory / FIRST_WEIGHTS,
        first.directory / LATER_WEIGHTS,
        second.directory / LATER_WEIGHTS,
    ]
    if not all(path.exists() for path in paths):
        return None
    start, end, other_end = [load_file(path) for path in paths]
    moved = 0.0
    apart = 0.0
    largest = 0.0
    largest_name = ""
    for name, values in end.items():
        moved += float((values.double() - start[name].double()).square().sum())
        difference = float((values.double() - other_end[name].double()).square().sum())
        apart += difference
        if difference > largest:
            largest = difference
            largest_name = name
    if not apart:
        return Distance(0.0, "")
    share = math.sqrt(apart / moved) if moved else math.inf
    return Distance(share, largest_name)


def differing_figure(first: ObservedRun, second: ObservedRun) -> tuple[str, float, float] | None:
    """Return the name and values of an evaluation's figure that differs beyond the tolerance."""
    evaluations = evaluations_of(first)
    for key, figures in evaluations_of(second).items():
        for name, value in figures.items():
            before = evaluations.get(key, {}).get(name)
            if before is None:
                continue
            flipped = FLIPPED / max(1.0, figures.get("count", 1.0))
            if abs(value - before) > FIGURES * max(abs(value), abs(before)) + flipped:
                return f"{name} of the {key[1]} evaluation after update {key[0]}", before, value
    return None


def evaluations_of(run: ObservedRun) -> dict[tuple[int, str], dict[str, float]]:
    """Return the figures of each evaluation of rank 0, by update and phase."""
    return {
        (record.step, record.phase): record.figures
        for launch, record in run.all(ObservedEvaluation)
        if launch.rank == 0
    }


def drawn_generators(run: ObservedRun) -> list[str]:
    """Return the random generators from which the loop draws between two batches."""
    names: set[str] = set()
    for launch in run.launches:
        before: MicroBatch | None = None
        for record in launch.records:
            if isinstance(record, MicroBatch):
                before = record
            elif isinstance(record, Recorded) and before is not None:
                names |= {*differing(before.generators, record.generators)}
    return sorted(names)


def sample_mixing_of(run: ObservedRun) -> SampleMixing:
    """Return what mixes the samples of a micro-batch in a run."""
    for _, mixers in run.all(SampleMixing):
        return mixers
    return SampleMixing(step=0, layers=[], couples_samples=False)
