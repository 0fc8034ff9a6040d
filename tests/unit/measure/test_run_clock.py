"""The clock of a run over its attempts, on one machine and on another."""

import pytest

from common.measure.run_clock import RunClock


@pytest.mark.parametrize(
    ("boot_of_resume", "seconds"),
    [("first boot", 50.0 + 1000.0 + 20.0 + 3.0), ("another boot", 50.0 + 20.0 + 3.0)],
)
def test_start_of_a_resume_counts(
    monkeypatch: pytest.MonkeyPatch, boot_of_resume: str, seconds: float
) -> None:
    """The time between the attempts counts on one machine, and a resume's start counts on any."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("common.measure.run_clock.boot_id", lambda: "first boot")
    first = RunClock()
    now[0] += 50.0
    state = first.state_dict()
    now[0] += 1000.0  # between the attempts
    monkeypatch.setattr("common.measure.run_clock.boot_id", lambda: boot_of_resume)
    resumed = RunClock()
    now[0] += 20.0  # its start
    resumed.load_state_dict(state)
    now[0] += 3.0
    assert resumed.seconds == seconds
