"""The time of a run over its attempts."""

import pytest

from common.training.progress import Progress


def test_start_of_a_resume_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run first reads its data and builds its model, and only then its checkpoint."""
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    first = Progress(began=now[0])
    now[0] += 50.0
    state = first.state_dict()
    now[0] += 1000.0  # between the attempts
    resumed = Progress(began=now[0])
    now[0] += 20.0  # its start
    resumed.load_state_dict(state)
    now[0] += 3.0
    assert resumed.seconds == 50.0 + 20.0 + 3.0
