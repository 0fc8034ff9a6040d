"""The stopwatch: the time that it leaves out, and its state in a checkpoint."""

import json

import pytest
import torch

from common.data.samples import Work
from common.measure.flops import TrainingFlops
from common.measure.stopwatch import FIRST_UPDATES, Interval, Stopwatch, throughput


def test_stopped_stopwatch_counts_nothing() -> None:
    """Profiled updates count neither time nor samples, and an evaluation does not restart it."""
    now = [0.0]
    stopwatch = Stopwatch(lambda: None, lambda: now[0], energy=lambda: 0.0)

    def train(updates: int, seconds: float) -> None:
        for _ in range(updates):
            now[0] += seconds
            stopwatch.count(Work(8), 0.1 * seconds, True)

    stopwatch.start()
    train(FIRST_UPDATES + 5, 1)
    stopwatch.stop()
    train(4, 50)
    with stopwatch.stopped():  # as around an evaluation
        now[0] += 50
    train(4, 50)
    assert stopwatch.lap().updates == 5
    train(1, 50)
    assert stopwatch.lap().updates == 0
    stopwatch.start()
    train(5, 1)
    assert stopwatch.lap().updates == 5
    whole = stopwatch.whole_run
    assert (whole.updates, whole.samples, whole.seconds) == (10, 80, 10)


@pytest.mark.parametrize("updates", [1, FIRST_UPDATES, FIRST_UPDATES + 4])
def test_stopwatch_continues_from_a_checkpoint(updates: int) -> None:
    """A restored stopwatch counts like an uninterrupted one, and its state is plain JSON."""
    now = [0.0]
    whole = Stopwatch(lambda: None, lambda: now[0], energy=lambda: 2 * now[0])

    def train(stopwatch: Stopwatch, updates: int) -> None:
        for number in range(updates):
            now[0] += 1 + number
            stopwatch.count(Work(8, 80, 800), 0.25, True)

    whole.start()
    train(whole, updates)
    whole.stop()
    half = Stopwatch(lambda: None, lambda: now[0], energy=lambda: 2 * now[0])
    half.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    results = []
    for stopwatch in (whole, half):
        stopwatch.start()
        train(stopwatch, 5)
        lap = stopwatch.lap()
        results.append((lap, stopwatch.whole_run, stopwatch.total.seconds))
        assert stopwatch.useful_seconds > 0
    assert results[0] == results[1]
    assert results[0][1].joules == 2 * results[0][1].seconds


def test_unknown_peak_gives_no_mfu() -> None:
    """Operations a second are still reported."""
    rows = torch.tensor([[*vars(Interval(seconds=2.0, updates=4, samples=8)).values()]])
    values = throughput(rows.double(), TrainingFlops(1e12), peak=0.0)
    assert values["perf/tflops_per_device"] == pytest.approx(4)
    assert "perf/mfu" not in values
