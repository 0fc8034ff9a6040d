"""Finds the values that a resumed run lacks, although they have changed during training."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from common.tools.prove.exact_comparison.record_differences import Difference
from common.tools.prove.records.observed_run import (
    ObservedProcess,
    ObservedRun,
    differing_common_keys,
)
from common.tools.prove.records.run_records import LoopPass, MicroBatch, ValueDescription

# The description of a value without one.
UNDESCRIBED = ValueDescription(type="other", text="value")


@dataclass
class LostValues:
    """The values, by path, that changed during training and that a resume did not restore.

    Lasting values are still wrong one update later. Temporary values are right again by then and do
    no harm: the loop sets them in each update, such as the last loss. If a launch makes only one
    update, all its lost values count as lasting.
    """

    lasting: dict[str, ValueDescription]
    temporary: dict[str, ValueDescription]


def lost_values(reference: ObservedRun, other: ObservedRun) -> LostValues:
    """Return the values that the launches of a resumed run have lost."""
    lost = LostValues({}, {})
    for uninterrupted, process in resumed_processes(reference, other):
        steps = steps_of(process)
        lost_at_first = lost_at_start(uninterrupted, process, steps[0])
        still_lost = lost_at_first
        if len(steps) > 1:
            still_lost = lost_before_update(uninterrupted, process, steps[1])
        for path in lost_at_first:
            group = lost.lasting if path in still_lost else lost.temporary
            group.setdefault(path, uninterrupted.descriptions.get(path, UNDESCRIBED))
    return lost


def resumed_processes(
    reference: ObservedRun, other: ObservedRun
) -> Iterator[tuple[ObservedProcess, ObservedProcess]]:
    """Yield each resumed process that trained, after the uninterrupted process of its rank."""
    for process in other.processes:
        uninterrupted = reference_process(reference, process.rank)
        if process.launch > 0 and uninterrupted is not None and process.micro_batches:
            yield uninterrupted, process


def steps_of(process: ObservedProcess) -> list[int]:
    """Return, for each update that a launch makes, the number of updates before it."""
    return [step for step, micro_batch in process.micro_batches if micro_batch == 0]


def reference_process(reference: ObservedRun, rank: int) -> ObservedProcess | None:
    """Return the reference run's process of a rank; None if the reference run has fewer ranks."""
    processes = [process for process in reference.processes_of_launch(0) if process.rank == rank]
    return processes[0] if processes else None


def lost_at_start(uninterrupted: ObservedProcess, resumed: ObservedProcess, step: int) -> list[str]:
    """Return the paths of the values that a resumed process lacks before its first update.

    A variable that the loop sets does not exist yet in the resumed process. It is lost if a pass
    reads it before setting it, because the value is then that of an earlier pass.

    Args:
        step: the number of updates before the first one of the resumed process.
    """
    paths = lost_before_update(uninterrupted, resumed, step)
    expected = uninterrupted.micro_batches.get((step, 0))
    if expected is None:
        return paths
    carried = {
        name for loop_pass in uninterrupted.of(LoopPass) for name in loop_pass.carried_variables
    }
    resumed_state = resumed.micro_batches[step, 0].value_digests
    for path in expected.value_digests:
        if variable_of(path) in carried and path not in resumed_state:
            paths.append(path)
    return paths


def variable_of(path: str) -> str:
    """Return the name with which a path begins, such as `ema` of `ema.decay`."""
    return re.split(r"[.\[]", path)[0]


def targets_begun_anew(
    reference: ObservedRun, other: ObservedRun, difference: Difference | None
) -> dict[str, ValueDescription]:
    """Return the variables of the loop's `for` statement that a resume did not restore, by name.

    They differ in the first pass after a resume. An example is the number of the pass that
    `enumerate` counts. A variable of a pass that follows the first difference is left out, because
    its iterator may depend on what differs.

    Args:
        difference: the first difference; None if only the results differ.
    """
    begun_anew: dict[str, ValueDescription] = {}
    for uninterrupted, process in resumed_processes(reference, other):
        step = steps_of(process)[0]
        expected = targets_of_update(uninterrupted, step)
        if difference is not None and is_before_pass(difference, process.launch, step):
            continue
        for loop_pass in process.of(LoopPass)[:1]:
            for name in differing_common_keys(loop_pass.target_digests, expected):
                begun_anew.setdefault(name, loop_pass.descriptions[name])
    return begun_anew


def targets_of_update(process: ObservedProcess, step: int) -> dict[str, str]:
    """Return the digests of the targets of an update's first pass that change during training."""
    passes = process.of(LoopPass)
    for loop_pass in passes:
        if (loop_pass.step, loop_pass.micro_batch) == (step, 0):
            changed = differing_common_keys(loop_pass.target_digests, passes[0].target_digests)
            return {name: loop_pass.target_digests[name] for name in changed}
    return {}


def is_before_pass(difference: Difference, launch: int, step: int) -> bool:
    """Whether a difference comes before the loop uses the first batch of an update."""
    if difference.launch != launch:
        return difference.launch < launch
    record = difference.record
    is_in_batch = isinstance(record, MicroBatch) and record.micro_batch == 0
    return difference.step < step or (difference.step == step and is_in_batch)


def lost_before_update(
    uninterrupted: ObservedProcess, resumed: ObservedProcess, step: int
) -> list[str]:
    """Return the paths of the values that a resumed process lacks before one of its updates.

    Such a value has appeared or changed in the uninterrupted process since its first micro-batch,
    and the resumed process has a different value at the same update. If the uninterrupted process
    does not make this update, the list is empty.

    Args:
        step: the number of updates before the one whose first micro-batch is compared.
    """
    expected = uninterrupted.micro_batches.get((step, 0))
    if expected is None:
        return []
    resumed_state = resumed.micro_batches[step, 0].value_digests
    initial_state = uninterrupted.of(MicroBatch)[0].value_digests
    paths = []
    for path, digest in expected.value_digests.items():
        has_changed = initial_state.get(path) != digest
        # A path that the resumed process can't reach says nothing about its value.
        is_wrong = path in resumed_state and resumed_state[path] != digest
        if has_changed and is_wrong:
            paths.append(path)
    return paths


def recovered_values(reference: ObservedRun, other: ObservedRun) -> set[str]:
    """Return the paths of values that a resumed launch lacks at first, and has again later."""
    recovered: set[str] = set()
    for uninterrupted, process in resumed_processes(reference, other):
        first, *later = steps_of(process)
        lost_at_first = set(lost_at_start(uninterrupted, process, first))
        for step in later:
            recovered |= lost_at_first.difference(lost_before_update(uninterrupted, process, step))
    return recovered
