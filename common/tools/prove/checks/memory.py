"""Checks that memory does not grow with the updates, nor with evaluations and saves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from common.tools.prove.bench import Bench, Check, Verdict
from common.tools.prove.records.instrument_records import GrowingTensors, MemoryInUse
from common.tools.prove.records.observed_run import ObservedRun
from common.tools.prove.steady import eventful_run, steady_run

MEBIBYTE = 2**20
# The most that each type of memory may grow, in MiB for each update or evaluation. The figures of
# live tensors and of a device's allocator are exact. The process's allocator also counts small
# objects of Python. Resident memory, which grows and shrinks by whole pages, is used only if the
# allocator does not report the memory in use.
MAX_GROWTH = {
    "tensors": 0.0002,
    "device": 0.01,
    "in_use": 0.005,
    "resident": 0.5,
}
# Each evaluation leaves a row behind, and a save may still be in progress.
MAX_GROWTH_OF_EVALUATIONS = {**MAX_GROWTH, "in_use": 0.05}
WORDS = {
    "tensors": "live tensors",
    "device": "the device's memory",
    "in_use": "the process's memory",
    "resident": "the process's resident memory",
}
BYTES_OF_TENSOR = 512  # the Python and C++ objects of a tensor, without its values
MIN_POINTS = 5
MIN_RISING_SHARE = 0.7  # compared with `Growth.rising_share`, which is about a half for noise
ADVICE = (
    "do not keep tensors from update to update, or from evaluations: pass them to run.record, or "
    "keep numbers; call .detach() on a loss that is added up, or its graph of gradients stays"
)


@dataclass(frozen=True)
class Growth:
    """The growth of one type of memory."""

    memory_type: str  # a key of MAX_GROWTH
    slope: float  # the median, in MiB for each update or evaluation
    most: float  # the allowed slope
    rising_share: float  # the share of neighbouring points with more than half of the allowed slope

    @property
    def is_too_much(self) -> bool:
        return self.slope > self.most and self.rising_share >= MIN_RISING_SHARE


def check_memory(bench: Bench) -> Verdict:
    """Measure a run of updates alone, and then one with an evaluation after each update."""
    verdict = verdict_of(steady_run(bench))
    if not verdict.passed:
        return verdict
    eventful = verdict_of(eventful_run(bench), "evaluation", MAX_GROWTH_OF_EVALUATIONS)
    compared = f"{verdict.compared}; with an evaluation after each update: {eventful.compared}"
    return Verdict(eventful.passed, compared, eventful.causes, eventful.advice)


def verdict_of(
    run: ObservedRun, unit: str = "update", most: Mapping[str, float] = MAX_GROWTH
) -> Verdict:
    """Compare the growth of each type of memory with the limit, and name tensors that accumulate.

    Args:
        unit: the event with which memory may grow, for the message: "update" or "evaluation".
        most: the allowed growth of each type of memory, in MiB for each event.
    """
    notes = run.processes[0].of(MemoryInUse)
    notes = notes[len(notes) // 3 :]  # the first third is the warm-up
    if len(notes) < MIN_POINTS:
        return Verdict(None, "the run is too short to tell growth from the warm-up")
    growths = growths_of(notes, most)
    compared = ", ".join(
        f"{WORDS[growth.memory_type]} {growth.slope:+.4f} MiB an {unit} (at most {growth.most})"
        for growth in growths
    )
    causes = [growth_in_words(tensors) for tensors in run.processes[0].of(GrowingTensors)]
    too_much = [growth for growth in growths if growth.is_too_much]
    if not too_much:
        return Verdict(True, f"updates {notes[0].step} to {notes[-1].step}: {compared}")
    for growth in too_much:
        causes.append(
            f"{WORDS[growth.memory_type]} grows by {growth.slope:.4f} MiB an {unit}, and at most "
            f"{growth.most} is usual"
        )
    return Verdict(False, compared, tuple(causes), ADVICE)


def growths_of(notes: Sequence[MemoryInUse], most: Mapping[str, float]) -> list[Growth]:
    """Return the growth of each type of memory that was measured."""
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
    for memory_type, values in measured.items():
        slopes = slopes_between(steps, [value / MEBIBYTE for value in values])
        rising_share = sum(slope > most[memory_type] / 2 for slope in slopes) / len(slopes)
        # Single jumps and drops, such as those at the end of an epoch, don't move the median.
        growths.append(Growth(memory_type, median(slopes), most[memory_type], rising_share))
    return growths


def complete(memory_type: str, sizes: Sequence[int | None]) -> dict[str, list[float]]:
    """Return the sizes of a type of memory under its name; empty if one was not measured."""
    known = [float(size) for size in sizes if size is not None]
    return {memory_type: known} if len(known) == len(sizes) else {}


def slopes_between(steps: Sequence[float], values: Sequence[float]) -> list[float]:
    """Return the slope between each point and the next one."""
    slopes = []
    for (step, value), (next_step, next_value) in pairwise(zip(steps, values, strict=True)):
        slopes.append((next_value - value) / (next_step - step))
    return slopes


def growth_in_words(tensors: GrowingTensors) -> str:
    """Return a sentence about tensors whose number grows, and the variable that holds them."""
    size = " × ".join(str(length) for length in tensors.shape) or "a single value"
    return (
        f"the number of {tensors.dtype} [{size}] tensors grew by {tensors.more} to "
        f"{tensors.count}; they are held by {tensors.holder}"
    )


CHECK = Check(
    "memory", "memory does not grow with the updates, nor with evaluations and saves", check_memory
)
