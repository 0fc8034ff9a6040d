"""The stopwatch: what it counts and leaves out, its throughput, and its state in a checkpoint."""

import json

import pytest
import torch

from common.data.samples import Work
from common.measure.flops import TrainingFlops
from common.measure.stopwatch import FIRST_UPDATES, Interval, Stopwatch, throughput


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def train(stopwatch: Stopwatch, clock: Clock, updates: int, seconds: float) -> None:
    """Count updates of two micro-batches of 8 samples, each update of so many seconds."""
    for _ in range(updates):
        for is_update in (False, True):
            clock.now += seconds / 2
            stopwatch.count(Work(8, 80, 800), 0.1 * seconds / 2, is_update)


def test_throughput_leaves_out_the_first_updates() -> None:
    """Slow first updates and time outside training do not count, and all later samples do."""
    clock = Clock()
    stopwatch = Stopwatch(lambda: None, clock, energy=lambda: 0.0)
    stopwatch.start()
    train(stopwatch, clock, FIRST_UPDATES, seconds=30)
    train(stopwatch, clock, 10, seconds=0.5)
    stopwatch.stop()
    clock.now += 1000  # an evaluation
    stopwatch.start()
    train(stopwatch, clock, 10, seconds=0.5)
    lap = stopwatch.lap()
    assert lap.updates == 20
    whole = stopwatch.steady_interval
    assert (whole.updates, whole.samples, whole.tokens) == (20, 320, 3200)
    assert whole.seconds == pytest.approx(10)
    assert whole.wait_seconds == pytest.approx(1)
    assert stopwatch.total.seconds == pytest.approx(10 + 30 * FIRST_UPDATES)


def test_short_run_has_a_throughput() -> None:
    """A run with no more than the first updates counts all of them."""
    clock = Clock()
    stopwatch = Stopwatch(lambda: None, clock, energy=lambda: 0.0)
    stopwatch.start()
    train(stopwatch, clock, FIRST_UPDATES - 1, seconds=2)
    stopwatch.lap()
    assert stopwatch.steady_interval.samples == 16 * (FIRST_UPDATES - 1)
    assert stopwatch.steady_interval.seconds == pytest.approx(2 * (FIRST_UPDATES - 1))


@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_each_interval_has_its_samples_and_seconds(every: int) -> None:
    """Each log line has the throughput of its own updates, even the first ones."""
    clock = Clock()
    stopwatch = Stopwatch(lambda: None, clock, energy=lambda: 0.0)
    stopwatch.start()
    for _ in range(4):
        train(stopwatch, clock, every, seconds=0.5)
        lap = stopwatch.lap()
        assert lap.seconds > 0
        assert lap.samples / lap.seconds == pytest.approx(32)
    assert stopwatch.total.seconds == pytest.approx(0.5 * 4 * every)


def test_throughput_covers_all_ranks() -> None:
    """Samples add up over ranks, the slowest rank's time counts, and updates do not add up."""
    fast = Interval(seconds=2.0, wait_seconds=0.2, updates=10, samples=100, tokens=1000)
    slow = Interval(seconds=4.0, wait_seconds=2.0, updates=10, samples=100, tokens=3000)
    rows = torch.tensor([[*vars(fast).values()], [*vars(slow).values()]], dtype=torch.float64)
    assert throughput(rows, flops=None, peak=0.0) == pytest.approx(
        {
            "perf/samples_per_second": 50,
            "perf/samples_per_second_per_device": 25,
            "perf/step_milliseconds": 400,
            "perf/data_wait_fraction": 0.5,
            "perf/tokens_per_second": 1000,
        }
    )
    rows[:, 5] = 0
    assert "perf/tokens_per_second" not in throughput(rows, flops=None, peak=0.0)


def test_flops_and_energy_count_real_samples_and_tokens() -> None:
    """FLOP/s are per device, and energy is per sample of all ranks."""
    interval = Interval(
        2.0, 0.0, joules=30.0, updates=10, samples=100, tokens=1e3, squared_tokens=1e4
    )
    rows = torch.tensor([[*vars(interval).values()]] * 2, dtype=torch.float64)
    flops = TrainingFlops(per_sample=1e9, per_token=1e8, per_squared_token=1e7)
    values = throughput(rows, flops, peak=1.5)
    assert values["perf/tflops_per_device"] == pytest.approx((100e9 + 100e9 + 100e9) / 2 / 1e12)
    assert values["perf/mfu"] == pytest.approx(0.1)
    assert values["perf/joules_per_sample"] == pytest.approx(60 / 200)


def test_useful_time_leaves_out_compilation() -> None:
    """The first updates count as long as later ones take."""
    clock = Clock()
    stopwatch = Stopwatch(lambda: None, clock, energy=lambda: 0.0)
    stopwatch.start()
    train(stopwatch, clock, FIRST_UPDATES, seconds=30)
    assert stopwatch.useful_seconds == 0
    train(stopwatch, clock, 10, seconds=0.5)
    stopwatch.lap()
    assert stopwatch.useful_seconds == pytest.approx(0.5 * (10 + FIRST_UPDATES))


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
    whole = stopwatch.steady_interval
    assert (whole.updates, whole.samples, whole.seconds) == (10, 80, 10)


@pytest.mark.parametrize("updates", [0, 1, FIRST_UPDATES, FIRST_UPDATES + 4])
@pytest.mark.parametrize("has_lap", [False, True])
def test_resumed_run_leaves_out_its_own_first_updates(updates: int, has_lap: bool) -> None:
    """Each attempt compiles and warms up again, so the speed is that of its other updates."""
    clock = Clock()

    def energy() -> float:
        return 2 * clock.now

    whole = Stopwatch(lambda: None, clock, energy)
    whole.start()
    for number in range(updates):
        train(whole, clock, 1, seconds=60 if number < FIRST_UPDATES else 0.5)
    if has_lap:
        whole.lap()
    whole.stop()
    resumed = Stopwatch(lambda: None, clock, energy)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert resumed.total == whole.total
    resumed.start()
    train(resumed, clock, FIRST_UPDATES, seconds=30)
    train(resumed, clock, 6, seconds=0.5)
    lap = resumed.lap()
    steady = resumed.steady_interval
    steady_before = max(updates - FIRST_UPDATES, 0)
    assert steady.updates == 6 + steady_before
    assert lap.updates == (6 if has_lap else steady.updates)
    for interval in (lap, steady):
        assert interval.seconds == pytest.approx(0.5 * interval.updates)
        assert interval.samples == 16 * interval.updates
        assert interval.joules == pytest.approx(2 * interval.seconds)
    assert resumed.useful_seconds == pytest.approx(0.5 * (updates + FIRST_UPDATES + 6))
    assert resumed.total.updates == updates + FIRST_UPDATES + 6
    assert not resumed.has_unlogged_updates


def test_attempts_of_few_updates_have_a_speed() -> None:
    """If each attempt ends within its first updates, all of them count."""
    clock = Clock()
    state = Stopwatch(lambda: None, clock, energy=lambda: 0.0).state_dict()
    for _ in range(3):
        stopwatch = Stopwatch(lambda: None, clock, energy=lambda: 0.0)
        stopwatch.load_state_dict(state)
        stopwatch.start()
        train(stopwatch, clock, FIRST_UPDATES - 1, seconds=2)
        assert stopwatch.has_unlogged_updates
        stopwatch.lap()
        state = stopwatch.state_dict()
    whole = stopwatch.steady_interval
    assert whole.updates == 3 * (FIRST_UPDATES - 1)
    assert whole.seconds == pytest.approx(2 * whole.updates)


def test_resume_on_other_ranks_keeps_the_times_alone() -> None:
    """The time of training and goodput go on, and the speed is that of the new ranks."""
    clock = Clock()
    state = Stopwatch(lambda: None, clock, energy=lambda: 0.0).state_dict()
    for _ in range(3):
        stopwatch = Stopwatch(lambda: None, clock, energy=lambda: 0.0)
        stopwatch.load_times(json.loads(json.dumps(state)))
        stopwatch.start()
        train(stopwatch, clock, FIRST_UPDATES, seconds=30)
        train(stopwatch, clock, 10, seconds=0.5)
        lap = stopwatch.lap()
        state = stopwatch.state_dict()
    assert (lap.updates, lap.seconds) == (10, pytest.approx(5))
    assert stopwatch.steady_interval == lap
    assert stopwatch.training_seconds == pytest.approx(3 * (30 * FIRST_UPDATES + 5))
    assert stopwatch.useful_seconds == pytest.approx(3 * 0.5 * (FIRST_UPDATES + 10))
    same_ranks = Stopwatch(lambda: None, clock, energy=lambda: 0.0)
    same_ranks.load_state_dict(state)
    assert same_ranks.training_seconds == stopwatch.training_seconds
    assert same_ranks.useful_seconds == stopwatch.useful_seconds


def test_unknown_peak_gives_no_mfu() -> None:
    """Operations a second are still reported."""
    rows = torch.tensor([[*vars(Interval(seconds=2.0, updates=4, samples=8)).values()]])
    values = throughput(rows.double(), TrainingFlops(1e12), peak=0.0)
    assert values["perf/tflops_per_device"] == pytest.approx(4)
    assert "perf/mfu" not in values
