"""Checks that memory does not grow with the updates, nor with evaluations and saves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from common.tools.prove.checks.base import Check
from common.tools.prove.instruments.holders import NO_HOLDER
from common.tools.prove.proof_runs.bench import Bench
from common.tools.prove.proof_runs.measured_runs import eventful_run, steady_run
from common.tools.prove.records.instrument_records import (
    GrowingContainer,
    GrowingGraph,
    GrowingTensors,
    MemoryInUse,
)
from common.tools.prove.records.observed_run import ObservedRun
from common.tools.prove.verdicts import Verdict

MEBIBYTE = 2**20
# The most that each type of memory may grow, in MiB for each update or evaluation. The figures of
# live tensors, of arrays and of a device's allocator are exact. The process's allocator also counts
# small objects of Python. Resident memory, which grows and shrinks by whole pages, is used only if
# the allocator does not report the memory in use.
MAX_GROWTH = {
    "tensors": 0.0002,
    "new_tensors": 0.0002,
    "arrays": 0.0002,
    "device": 0.01,
    "allocator": 0.005,
    "resident": 0.5,
}
# Each evaluation leaves a row behind, and a save may still be in progress.
MAX_GROWTH_OF_EVALUATIONS = {**MAX_GROWTH, "allocator": 0.05}
WORDS = {
    "tensors": "live tensors",
    "new_tensors": "live tensors of the current update",
    "arrays": "NumPy arrays in the recipe's variables",
    "device": "the device's memory",
    "allocator": "the process's memory",
    "resident": "the process's resident memory",
}
BYTES_OF_TENSOR = 512  # the Python and C++ objects of a tensor, without its values
MIN_POINTS = 5  # the fewest measurements after the warm-up
# Growth is steady if the slope is large between this share of neighbouring measurements. For noise,
# the share is about a half.
MIN_RISING_SHARE = 0.7
# Growth in steps, such as once an epoch, also counts if there are so many steps. Fewer may be a
# cache that is filled.
MIN_STEPS = 3
ADVICE = (
    "do not keep tensors or arrays from update to update, or from evaluations: pass them to "
    "run.record, or keep numbers; call .detach() on a loss that is added up, or its graph of "
    "gradients stays"
)


@dataclass(frozen=True)
class Growth:
    """The growth of one type of memory."""

    memory_type: str  # a key of MAX_GROWTH
    slope: float  # in MiB for each update or evaluation
    limit: float  # the largest allowed slope
    is_noise: bool  # whether the memory goes up and down, so that the slope is due to chance

    @property
    def is_too_much(self) -> bool:
        return self.slope > self.limit and not self.is_noise

    def in_words(self, unit: str) -> str:
        """Return the slope and its limit, and whether a larger slope is only noise.

        Args:
            unit: the event with which memory may grow, "update" or "evaluation".
        """
        remark = "; it goes up and down" if self.slope > self.limit and self.is_noise else ""
        name = WORDS[self.memory_type]
        return f"{name} {self.slope:+.4f} MiB an {unit} (at most {self.limit}{remark})"


def judge_memory(bench: Bench) -> Verdict:
    """Measure a run of updates alone, and then one with an evaluation after each update."""
    verdict = verdict_of(steady_run(bench))
    if not verdict.passed:
        return verdict
    eventful = verdict_of(eventful_run(bench), "evaluation", MAX_GROWTH_OF_EVALUATIONS)
    compared = f"{verdict.compared}; with an evaluation after each update: {eventful.compared}"
    return Verdict(eventful.passed, compared, eventful.causes, eventful.advice)


def verdict_of(
    run: ObservedRun, unit: str = "update", limits: Mapping[str, float] = MAX_GROWTH
) -> Verdict:
    """Compare the growth of each type of memory with the limit, and name what accumulates.

    Args:
        unit: the event with which memory may grow, for the message: "update" or "evaluation".
        limits: the allowed growth of each type of memory, in MiB for each event.
    """
    all_measurements = run.processes[0].of(MemoryInUse)
    measurements = all_measurements[len(all_measurements) // 3 :]  # the first third is the warm-up
    if len(measurements) < MIN_POINTS:
        return Verdict(None, "the run is too short to tell growth from the warm-up")
    growths = growths_of(measurements, limits)
    compared = ", ".join(growth.in_words(unit) for growth in growths)
    too_much = [growth for growth in growths if growth.is_too_much]
    if not too_much:
        first_step = measurements[0].step
        last_step = measurements[-1].step
        return Verdict(True, f"updates {first_step} to {last_step}: {compared}")
    causes = growing_values_in_words(run)
    for growth in too_much:
        causes.append(
            f"{WORDS[growth.memory_type]} grows by {growth.slope:.4f} MiB an {unit}, and at most "
            f"{growth.limit} is usual"
        )
    return Verdict(False, compared, tuple(causes), ADVICE)


def growing_values_in_words(run: ObservedRun) -> list[str]:
    """Return a sentence about each value that grows, those that help most to find it first."""
    process = run.processes[0]
    sentences = [growing_graph_in_words(graph) for graph in process.of(GrowingGraph)]
    sentences_without_holder = []
    for tensors in process.of(GrowingTensors):
        sentence = growing_tensors_in_words(tensors)
        if tensors.holder == NO_HOLDER:
            sentences_without_holder.append(sentence)
        else:
            sentences.append(sentence)
    return [*sentences, *growing_containers_in_words(run), *sentences_without_holder]


def growths_of(measurements: Sequence[MemoryInUse], limits: Mapping[str, float]) -> list[Growth]:
    """Return the growth of each type of memory that was measured."""
    steps = [float(measurement.step) for measurement in measurements]
    # A size that rises several times and never falls is not noise.
    exact_sizes = {
        "tensors": [measurement.tensor_count for measurement in measurements],
        "arrays": [measurement.array_bytes for measurement in measurements],
    }
    growths = []
    for memory_type, sizes in sizes_by_type(measurements).items():
        limit = limits[memory_type]
        slopes = slopes_between(steps, [size / MEBIBYTE for size in sizes])
        # Single jumps and drops, such as those at the end of an epoch, don't move the median.
        slope = median(slopes)
        rising_share = sum(slope > limit / 2 for slope in slopes) / len(slopes)
        is_noise = rising_share < MIN_RISING_SHARE
        if memory_type == "new_tensors":
            # They go up and down with the batches, so a few rises in a row may be chance.
            is_noise = rising_share < 1 or batches_grow(measurements)
        if memory_type in exact_sizes and grows_in_steps(exact_sizes[memory_type]):
            slope = max(slope, fmean(slopes))
            is_noise = False
        growths.append(Growth(memory_type, slope, limit, is_noise))
    return growths


def batches_grow(measurements: Sequence[MemoryInUse]) -> bool:
    """Whether each batch is larger than the one before, so that its tensors must be larger, too.

    Batches may be padded to different lengths. The tensors of an update, such as its logits, then
    go up and down with them. A tensor to which each update adds, as in
    `history = torch.cat([history, logits])`, also grows while batches shrink.
    """
    sizes = [measurement.batch_bytes for measurement in measurements]
    return all(later > earlier for earlier, later in pairwise(sizes))


def grows_in_steps(sizes: Sequence[int]) -> bool:
    """Whether an exact size rises several times and never falls.

    Tensors and arrays may be added less often than memory is measured, such as once an epoch. The
    number of tensors and the bytes of arrays are exact, so they need no margin for noise.
    """
    changes = [later - earlier for earlier, later in pairwise(sizes)]
    rises = sum(change > 0 for change in changes)
    return rises >= MIN_STEPS and min(changes) >= 0


def sizes_by_type(measurements: Sequence[MemoryInUse]) -> dict[str, list[float]]:
    """Return the bytes at each measurement, by type of memory (a key of MAX_GROWTH).

    A type is left out if a measurement lacks it. Resident memory is left out if the allocator
    reports the memory in use.
    """
    sizes = {
        "tensors": [
            float(measurement.tensor_bytes + measurement.tensor_count * BYTES_OF_TENSOR)
            for measurement in measurements
        ],
        "new_tensors": [float(measurement.new_tensor_bytes) for measurement in measurements],
        "arrays": [float(measurement.array_bytes) for measurement in measurements],
    }
    device_sizes = [measurement.device_bytes for measurement in measurements]
    allocator_sizes = [measurement.allocator_bytes for measurement in measurements]
    if None not in device_sizes:
        sizes["device"] = [float(size) for size in device_sizes if size is not None]
    if allocator_sizes[0] is None:
        sizes["resident"] = [float(measurement.resident_bytes) for measurement in measurements]
    elif None not in allocator_sizes:
        sizes["allocator"] = [float(size) for size in allocator_sizes if size is not None]
    return sizes


def slopes_between(steps: Sequence[float], values: Sequence[float]) -> list[float]:
    """Return the slope between each point and the next one."""
    slopes = []
    for (step, value), (next_step, next_value) in pairwise(zip(steps, values, strict=True)):
        slopes.append((next_value - value) / (next_step - step))
    return slopes


def growing_graph_in_words(graph: GrowingGraph) -> str:
    """Return a sentence about a variable that keeps the graphs of earlier updates."""
    return (
        f"{graph.variable} holds a graph of gradients that grew by {graph.growth:,} to "
        f"{graph.operation_count:,} operations"
    )


def growing_tensors_in_words(tensors: GrowingTensors) -> str:
    """Return a sentence about tensors whose number grows, and the variable that holds them."""
    size = " × ".join(str(length) for length in tensors.shape) or "a single value"
    return (
        f"the number of {tensors.dtype} [{size}] tensors grew by {tensors.growth} to "
        f"{tensors.tensor_count}; they are held by {tensors.holder}"
    )


def growing_containers_in_words(run: ObservedRun) -> list[str]:
    """Return a sentence about each container that grows, those with the most bytes first.

    Containers that are named as the holders of tensors are left out.
    """
    process = run.processes[0]
    holders = {tensors.holder for tensors in process.of(GrowingTensors)}
    containers = [
        container for container in process.of(GrowingContainer) if container.variable not in holders
    ]
    containers.sort(key=lambda container: container.growth * container.item_bytes, reverse=True)
    return [
        f"{container.variable} grew by {container.growth:,} to {container.item_count:,} items"
        for container in containers
    ]


CHECK = Check(
    "memory", "memory does not grow with the updates, nor with evaluations and saves", judge_memory
)
