"""The course of the rehearsal."""

from __future__ import annotations

from common.training.evaluation.rehearsal import Rehearsal


def test_rehearsal_is_due_once() -> None:
    """It is due from the first batch until recorded, unless a real evaluation is due there."""
    rehearsal = Rehearsal(is_wanted=True)
    rehearsal.make_due(is_replaced=False)
    assert rehearsal.is_due
    rehearsal.begin_evaluation()
    assert (rehearsal.is_due, rehearsal.is_on, rehearsal.is_reading) == (False, True, True)
    rehearsal.end_evaluation()
    assert (rehearsal.is_on, rehearsal.is_reading) == (True, False)
    rehearsal.end()
    rehearsal.make_due(is_replaced=False)
    assert not rehearsal.is_on
    replaced = Rehearsal(is_wanted=True)
    replaced.make_due(is_replaced=True)
    replaced.make_due(is_replaced=False)
    assert not replaced.is_on
