"""Checks that memory does not grow with the updates, nor with evaluations and saves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from common.tools.prove.bench import Bench, Check, Verdict
from common.tools.prove.notes import GrowingTensors, MemoryInUse
from common.tools.prove.observation import ObservedRun
from common.tools.prove.steady import eventful_run, steady_run

MEBIBYTE = 2**20
# The most that memory may grow by, in MiB an update or an evaluation. Live tensors and a device's
# allocator are exact. The process's allocator also has small objects of Python. Resident memory,
# which is only used where the allocator does not tell, grows and shrinks by whole pages.
MOST = {
    "tensors": 0.0002,
    "device": 0.01,
    "in_use": 0.005,
    "resident": 0.5,
}
# Each evaluation leaves a row and some facts behind, and a save may still be written.
MOST_OF_EVALUATIONS = {**MOST, "in_use": 0.05}
WORDS = {
    "tensors": "live tensors",
    "device": "the device's memory",
    "in_use": "the process's memory",
    "resident": "the process's resident memory",
}
BYTES_OF_TENSOR = 512  # besides its values: the objects of Python and C++
LEAST_POINTS = 5
LEAST_RISES = 0.7  # share of the neighbouring points between which memory rises; noise has half
ADVICE = (
    "keep no tensors from update to update, or of evaluations: hand them to run.record, or keep "
    "numbers; `.detach()` a loss that is added up, whose graph of gradients would stay"
)


@dataclass(frozen=True)
class Growth:
    """How much one kind of memory grows."""

    kind: str
    slope: float  # MiB an update
    most: float  # that is allowed
    rises: float  # share of neighbouring points with a rise of at least half of what is allowed

    @property
    def is_too_much(self) -> bool:
        return self.slope > self.most and self.rises >= LEAST_RISES


def answer(bench: Bench) -> Verdict:
    """Measure a run of updates alone, and then one with an evaluation after each update."""
    verdict = verdict_of(steady_run(bench))
    if not verdict.passed:
        return verdict
    later = verdict_of(eventful_run(bench), "evaluation", MOST_OF_EVALUATIONS)
    compared = f"{verdict.compared}; with an evaluation after each update: {later.compared}"
    return Verdict(later.passed, compared, later.causes, later.advice)


def verdict_of(run: ObservedRun, unit: str = "update", most: Mapping[str, float] = MOST) -> Verdict:
    """Judge the growth of each kind of memory, and name the tensors that grow in number.

    Args:
        unit: what memory may grow with.
        most: the allowed growth of each kind, in MiB a unit.
    """
    notes = run.launches[0].of(MemoryInUse)
    notes = notes[len(notes) // 3 :]  # the first third is warming up
    if len(notes) < LEAST_POINTS:
        return Verdict(None, "the run is too short to tell growth from warming up")
    growths = growths_of(notes, most)
    compared = ", ".join(
        f"{WORDS[growth.kind]} {growth.slope:+.4f} MiB an {unit} (at most {growth.most})"
        for growth in growths
    )
    causes = [growth_in_words(tensors) for tensors in run.launches[0].of(GrowingTensors)]
    too_much = [growth for growth in growths if growth.is_too_much]
    if not too_much:
        return Verdict(True, f"updates {notes[0].step} to {notes[-1].step}: {compared}")
    for growth in too_much:
        causes.append(
            f"{WORDS[growth.kind]} grows by {growth.slope:.4f} MiB an {unit}, and at most "
            f"{growth.most} is usual"
        )
    return Verdict(False, compared, tuple(causes), ADVICE)


def growths_of(notes: Sequence[MemoryInUse], most: Mapping[str, float]) -> list[Growth]:
    """Return the growth of each kind of memory that was measured."""
    measured: dict[str, list[float]] = {
        "tensors": [note.tensor_bytes + note.tensors * BYTES_OF_TENSOR for note in notes]
    }
    measured |= complete("device", [note.device for note in notes])
    if notes[0].in_use is None:
        measured["resident"] = [note.resident for note in notes]
    else:
        measured |= complete("in_use", [note.in_use for note in notes])
    steps = [float(note.step) for note in notes]
    growths = []
    for kind, values in measured.items():
        slopes = slopes_between(steps, [value / MEBIBYTE for value in values])
        rises = sum(rise > most[kind] / 2 for rise in slopes) / len(slopes)
        # Single jumps and drops, such as those at the end of an epoch, don't move the median.
        growths.append(Growth(kind, median(slopes), most[kind], rises))
    return growths


def complete(kind: str, sizes: Sequence[int | None]) -> dict[str, list[float]]:
    """Return the sizes of a kind of memory under its name; nothing if one was not measured."""
    known = [float(size) for size in sizes if size is not None]
    return {kind: known} if len(known) == len(sizes) else {}


def slopes_between(places: Sequence[float], values: Sequence[float]) -> list[float]:
    """Return the slope between each point and the next one."""
    points = zip(places, values, strict=True)
    return [
        (value - value_before) / (place - place_before)
        for (place_before, value_before), (place, value) in pairwise(points)
    ]


def growth_in_words(tensors: GrowingTensors) -> str:
    """Return which tensors become more, by how much, and who holds them."""
    size = " × ".join(str(length) for length in tensors.shape) or "a single value"
    return (
        f"tensors of {tensors.dtype} [{size}] became more by {tensors.more}, to {tensors.count}, "
        f"held by {tensors.holder}"
    )


CHECK = Check(
    "memory", "memory does not grow with the updates, nor with evaluations and saves", answer
)
