"""Meters of real runs against clocks and delays outside of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch import REPOSITORY, Finished, Launcher, Runner

STAMPED = REPOSITORY / "tests" / "stamped.py"
EVERY, BATCH, STEPS = 8, 16, 24
FLAGS = (
    *("--dataset", "digits", "--batch-size", BATCH, "--max-steps", STEPS, "--log-every", EVERY),
    *("--hidden-sizes", 48, "--tracker", "none"),
)
Stamps = dict[int, tuple[float, float, float, float]]


def run_stamped(
    runner: Runner, folder: Path, rank: int, data: float, work: float, launcher: Launcher
) -> tuple[Finished, Stamps]:
    """Run the MLP with delays on one rank; return it and that rank's stamps by update."""
    recipe = REPOSITORY / "recipes" / "mnist_mlp.py"
    run = runner.run(STAMPED, folder, rank, data, work, recipe, *FLAGS, launcher=launcher)
    lines = (folder / f"rank-{rank}.jsonl").read_text().splitlines()
    return run, {step: tuple(times) for step, *times in map(json.loads, lines)}


def assert_seconds(measured: float, stamps: Stamps, step: int) -> None:
    """See that the updates of a log line took as long as a clock outside of the meters says.

    An interval begins and ends within two calls of `record`, where it logs: no shorter than the
    time between the two, no longer than with both. Besides that, 2 %.
    """
    shortest = stamps[step][0] - stamps[step - EVERY][1]
    longest = stamps[step][1] - stamps[step - EVERY][0]
    assert 0.98 * shortest < measured < 1.02 * longest


def test_throughput_with_a_slow_rank(runner: Runner, tmp_path: Path) -> None:
    """One of two ranks takes 50 ms longer: all ranks' samples over the time of the slower."""
    run, stamps = run_stamped(runner, tmp_path / "stamps", 1, 0.0, 0.05, "two")
    speeds = run.series("perf/samples_per_second")
    for step in (16, 24):
        seconds = 2 * BATCH * EVERY / speeds[step]
        assert seconds > EVERY * 0.05
        assert_seconds(seconds, stamps, step)
        milliseconds = run.series("perf/step_milliseconds")[step]
        assert milliseconds == pytest.approx(1000 * seconds / EVERY)
        per_device = run.series("perf/samples_per_second_per_device")[step]
        assert per_device == pytest.approx(speeds[step] / 2)


def test_data_wait_with_slow_data(runner: Runner, tmp_path: Path) -> None:
    """Data that come 20 ms late, and 10 ms of work: what share of the time the loop waited.

    The delays are measured, so this holds however long the machine makes them: besides them, the
    loop waits for its data as long as they are gathered.
    """
    run, stamps = run_stamped(runner, tmp_path / "stamps", 0, 0.02, 0.01, "python")
    for step in (16, 24):
        late, given = (stamps[step][n] - stamps[step - EVERY][n] for n in (2, 3))
        assert late >= EVERY * 0.02
        share = run.series("perf/data_wait_fraction")[step]
        seconds = BATCH * EVERY / run.series("perf/samples_per_second")[step]
        assert_seconds(seconds, stamps, step)
        # From when the loop asked for a batch to when it had it, by a clock around the loader.
        assert late < given
        assert 0.98 * late < share * seconds < 1.02 * given + 0.001 * EVERY


def test_model_flops_of_a_real_run(unbroken: Finished) -> None:
    """An MLP 64-64-48-10: 6 operations a weight, less the first layer's product for its input."""
    operations = 6 * (64 * 64 + 64 * 48 + 48 * 10) - 2 * 64 * 64
    speeds = unbroken.series("perf/samples_per_second")
    assert len(speeds) > 10
    for step, speed in speeds.items():
        rate = unbroken.series("perf/tflops_per_device")[step]
        assert rate * 1e12 == pytest.approx(operations * speed, rel=0.02)


def test_gradients_of_two_processes_are_planned_once(distributed_mlp: Finished) -> None:
    """They lie in DDP's buckets, which are not there besides them."""
    gradients = distributed_mlp.read("memory.json")["gradients"]
    parameters = distributed_mlp.config["architecture"]["parameters"]
    assert gradients["planned_mib"] == pytest.approx(4 * parameters / 2**20, rel=1e-3)
    assert gradients["measured_mib"] == pytest.approx(gradients["planned_mib"], rel=1e-3)
