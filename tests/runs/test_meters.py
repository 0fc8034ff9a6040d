"""The meters of real runs agree with independent clocks and known delays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch import REPOSITORY, Finished, Launcher, Runner

TIME_RECORDER = REPOSITORY / "tests" / "record_times.py"
LOG_EVERY = 8
BATCH = 16
STEPS = 24
FLAGS = (
    *("--dataset", "digits", "--batch-size", BATCH, "--max-steps", STEPS, "--log-every", LOG_EVERY),
    *("--hidden-sizes", 48, "--tracker", "none"),
)
Stamps = dict[int, tuple[float, float, float, float]]


def run_stamped(
    runner: Runner, folder: Path, rank: int, data: float, work: float, launcher: Launcher
) -> tuple[Finished, Stamps]:
    """Run the MLP with delays on one rank; return the run and that rank's stamps by update."""
    recipe = REPOSITORY / "recipes" / "mnist_mlp.py"
    run = runner.run(TIME_RECORDER, folder, rank, data, work, recipe, *FLAGS, launcher=launcher)
    lines = (folder / f"rank-{rank}.jsonl").read_text().splitlines()
    return run, {step: tuple(times) for step, *times in map(json.loads, lines)}


def assert_seconds(measured: float, stamps: Stamps, step: int) -> None:
    """Check that the updates of a log line took as long as a clock outside of the meters says.

    An interval begins and ends within two calls of `record` that log. It is therefore at least as
    long as the time between the calls, and at most as long as this time with both calls. The test
    allows another 2 %.
    """
    shortest = stamps[step][0] - stamps[step - LOG_EVERY][1]
    longest = stamps[step][1] - stamps[step - LOG_EVERY][0]
    assert 0.98 * shortest < measured < 1.02 * longest


def test_throughput_with_a_slow_rank(runner: Runner, tmp_path: Path) -> None:
    """The throughput of two ranks is the samples of both over the time of the slower rank."""
    run, stamps = run_stamped(runner, tmp_path / "stamps", 1, 0.0, 0.05, "two forks")
    speeds = run.series("perf/samples_per_second")
    for step in (16, 24):
        seconds = 2 * BATCH * LOG_EVERY / speeds[step]
        assert seconds > LOG_EVERY * 0.05
        assert_seconds(seconds, stamps, step)
        milliseconds = run.series("perf/step_milliseconds")[step]
        assert milliseconds == pytest.approx(1000 * seconds / LOG_EVERY)
        per_device = run.series("perf/samples_per_second_per_device")[step]
        assert per_device == pytest.approx(speeds[step] / 2)


def test_data_wait_with_slow_data(runner: Runner, tmp_path: Path) -> None:
    """The share of time that the loop waits for data agrees with the delay of the data.

    Data come 20 ms late, and each update has 10 ms of work. The test measures the real delays. The
    loop also waits while a batch is gathered, so its wait is at least as long as the delays.
    """
    run, stamps = run_stamped(runner, tmp_path / "stamps", 0, 0.02, 0.01, "fork")
    for step in (16, 24):
        late, waited = (stamps[step][n] - stamps[step - LOG_EVERY][n] for n in (2, 3))
        assert late >= LOG_EVERY * 0.02
        share = run.series("perf/data_wait_fraction")[step]
        seconds = BATCH * LOG_EVERY / run.series("perf/samples_per_second")[step]
        assert_seconds(seconds, stamps, step)
        # A clock around the loader measures from the request for a batch to its delivery.
        assert late < waited
        assert 0.98 * late < share * seconds < 1.02 * waited + 0.001 * LOG_EVERY


def test_model_flops_of_a_real_run(unbroken: Finished) -> None:
    """The rate of an MLP 64-64-48-10 counts 6 operations a weight and sample.

    The first layer does not compute a gradient of its input.
    """
    operations = 6 * (64 * 64 + 64 * 48 + 48 * 10) - 2 * 64 * 64
    speeds = unbroken.series("perf/samples_per_second")
    assert len(speeds) > 10
    for step, speed in speeds.items():
        rate = unbroken.series("perf/tflops_per_device")[step]
        assert rate * 1e12 == pytest.approx(operations * speed, rel=0.02)


def test_gradients_of_two_processes_are_planned_once(distributed_mlp: Finished) -> None:
    """The gradients of DDP lie in its buckets, so the memory plan counts them once."""
    gradients = distributed_mlp.read("memory.json")["gradients"]
    parameters = distributed_mlp.config["architecture"]["parameters"]
    assert gradients["planned_mib"] == pytest.approx(4 * parameters / 2**20, rel=1e-3)
    assert gradients["measured_mib"] == pytest.approx(gradients["planned_mib"], rel=1e-3)
