"""The first difference between two observed runs, for any difference in any record."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.tools.prove.exact_comparison.record_differences import COMPARED_FIELDS, first_difference
from common.tools.prove.records.observed_run import AnyObservedRecord, ObservedProcess
from tests.unit.tools.prove.made_up_records import evaluated
from tests.unit.tools.prove.made_up_training import UPDATES, changed, launch, run, saved

REFERENCE = run(launch(0))
OTHERS = {
    "sample_indices": [99],
    "part_digests": {"model": "other", "optimizer": "other"},
    "generator_digests": {"torch": "other", "numpy": "numpy"},
    "batch_digest": "other",
    "loss": 99.0,
    "metrics": {"accuracy": (99.0, 4)},
    "learning_rates": [99.0],
    "figures": {"accuracy": 99.0},
}


def test_equal_runs_have_no_difference() -> None:
    assert first_difference(REFERENCE, run(launch(0))) is None


@given(st.lists(st.integers(0, UPDATES - 1), max_size=3).map(sorted))
def test_repeated_updates_are_not_a_difference(starts: list[int]) -> None:
    """Each launch resumes from a checkpoint before the update at which the last one was killed."""
    launches = [launch(0, 0, UPDATES if not starts else max(1, starts[0] + 1))]
    for number, first in enumerate(starts, start=1):
        launches.append(launch(number, first))
    assert first_difference(REFERENCE, run(*launches)) is None


@given(data=st.data())
def test_any_change_is_found_at_its_record(data: st.DataObject) -> None:
    """The difference has the launch, the record, the field, and the names of what differs."""
    first = data.draw(st.integers(0, UPDATES - 1))
    resumed = launch(1, first)
    positions = [
        position
        for position, record in enumerate(resumed.records)
        if type(record) in COMPARED_FIELDS
    ]
    position = data.draw(st.sampled_from(positions))
    field = data.draw(st.sampled_from(COMPARED_FIELDS[type(resumed.records[position])]))
    other, record = changed(resumed, position, **{field: OTHERS[field]})
    difference = first_difference(REFERENCE, run(launch(0, 0, first), other))
    assert difference is not None
    assert (difference.launch, difference.rank, difference.field) == (1, 0, field)
    assert difference.step == record.step
    expected = {"part_digests": ("model", "optimizer"), "generator_digests": ("torch",)}
    assert difference.names == expected.get(
        field, ("accuracy",) if field in ("metrics", "figures") else ()
    )


@pytest.mark.parametrize("first_step", [0, UPDATES])
def test_saves_before_and_after_an_evaluation_are_told_apart(first_step: int) -> None:
    """The last update has two saves. A resumed launch may make only the second one."""

    def ending(launch_number: int, first: int, has_first_save: bool) -> ObservedProcess:
        start = launch(launch_number, first)
        before = saved(UPDATES)
        after = before.model_copy(
            update={"part_digests": {**before.part_digests, "best evaluation": "new"}}
        )
        evaluation = evaluated({"accuracy": 1.0}, UPDATES)
        # The made-up launch ends with an evaluation and a save of its own.
        others = [record for record in start.records if record.step < UPDATES]
        saves = [before] if has_first_save else []
        return replace(start, records=(*others, *saves, evaluation, after))

    reference = run(ending(0, 0, has_first_save=True))
    resumed = run(ending(0, first_step, has_first_save=first_step == 0))
    assert first_difference(reference, resumed) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_equals_itself(value: float) -> None:
    twice: list[AnyObservedRecord] = []
    runs = []
    for _ in range(2):
        other, record = changed(launch(0), 2, loss=float(str(value)))
        twice.append(record)
        runs.append(run(other))
    assert twice[0] is not twice[1]
    assert first_difference(*runs) is None


def test_the_earlier_of_two_differences_counts() -> None:
    first, _ = changed(launch(0), 5, batch_digest="other")
    both, _ = changed(first, 2, loss=99.0)
    difference = first_difference(REFERENCE, run(both))
    assert difference is not None
    assert difference.field == "loss"
    assert difference.moment == "in update 1"
