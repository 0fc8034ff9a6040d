"""`--profile` on real runs: the verdict is right, and its files and figures are complete."""

from __future__ import annotations

import csv
import gzip
import json

import pytest

from common.measure.stopwatch import FIRST_UPDATES
from common.profile.verdict import DATA
from tests.launch import REPOSITORY, Finished, Runner
from tests.wandb_file import records

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def data_bound(runner: Runner) -> Finished:
    """An MLP whose images take two milliseconds each to transform."""
    script = REPOSITORY / "tests" / "slow_data.py"
    flags = ("--dataset", "digits", "--batch-size", 32, "--max-steps", 30, "--log-every", 1)
    return runner.shared(
        *(script, 2, REPOSITORY / "recipes" / "mnist_mlp.py", *flags, "--profile"),
        launcher="fork",
    )


@pytest.fixture(scope="session")
def compute_bound(runner: Runner) -> Finished:
    """ResNet-18 on random images that already lie in memory."""
    flags = ("--dataset", "synthetic", "--image-size", 16, "--batch-size", 16, "--max-steps", 12)
    flags = (*flags, "--mixed-precision", "no", "--tracker", "none", "--profile")
    return runner.shared("resnet", *flags)


def test_slow_transform_is_data_bound(data_bound: Finished) -> None:
    """The verdict on a slow transform is data-bound, with the time share and a flag that helps."""
    verdict = data_bound.read("profile/verdict.json")
    assert verdict["verdict"] == "data-bound"
    milliseconds = verdict["milliseconds_per_update"]
    # 32 samples that sleep for two milliseconds each, at the least.
    assert milliseconds["data"] >= 64
    assert milliseconds["data"] == pytest.approx(verdict["shares"]["data"] * milliseconds["total"])
    assert "profile data-bound: of" in data_bound.output
    assert "--num-workers" in data_bound.output


def test_resnet_is_compute_bound(compute_bound: Finished) -> None:
    """The verdict on a ResNet is compute-bound, as convolutions take most of an update."""
    verdict = compute_bound.read("profile/verdict.json")
    assert verdict["verdict"] == "compute-bound"
    milliseconds = verdict["milliseconds_per_update"]
    assert milliseconds["compute"] > milliseconds["memory"]
    assert "profile compute-bound: of" in compute_bound.output


def test_profiles_name_what_was_run(data_bound: Finished, compute_bound: Finished) -> None:
    """The trace and the tables contain the operations of the recipe."""
    for run, operation in ((data_bound, "aten::addmm"), (compute_bound, "aten::convolution")):
        folder = run.directory / "profile"
        with gzip.open(folder / "rank0.pt.trace.json.gz", "rt") as file:
            names = [item.get("name") for item in json.load(file)["traceEvents"]]
        assert {operation, DATA} <= set(names)
        # The trace has the recorded updates, without those that warm the profiler up.
        steps = [n for n in names if n and n.startswith("ProfilerStep")]
        assert len(set(steps)) in (1, 2, 5, 10)
        with (folder / "top_operations.csv").open() as file:
            assert operation in {row["name"] for row in csv.DictReader(file)}
        assert operation in (folder / "top_operations.txt").read_text()
        assert (folder / "memory.png").stat().st_size > 1000


def test_profiled_updates_are_not_in_the_figures(data_bound: Finished) -> None:
    """Profiled updates have no speed in the log; the run names them and times all others."""
    speeds = data_bound.series("perf/samples_per_second")
    assert set(data_bound.series("train/loss")) == set(range(1, 31))
    assert set(range(1, 31)) - set(speeds) == set(range(14, 26))
    assert "updates 14 to 25 are left out of perf/" in data_bound.output
    assert data_bound.output.count("profiling") == 12


def test_profile_is_kept_at_wandb(data_bound: Finished) -> None:
    """W&B gets the profile's files as an artifact, its picture as a panel, and the verdict."""
    recorded = records(data_bound)
    (artifact,) = recorded["artifact"]["profile"]
    names = {entry["path"] for entry in artifact["manifest"]["contents"]}
    files = {"rank0.pt.trace.json.gz", "top_operations.txt", "top_operations.csv", "memory.png"}
    assert names == files | {"verdict.json"}
    assert any("profile/memory._type" in row for row in recorded["history"])
    assert recorded["summary"]["profile/verdict"] == "data-bound"
    # The profile replaced none of the other rows.
    steps = [row["progress/global_step"] for row in recorded["history"] if "train/loss" in row]
    assert steps == list(range(1, 31))


def test_a_profile_on_two_processes_leaves_out_its_updates_alone(runner: Runner) -> None:
    """One of two processes profiles; both leave the same updates out and time all others."""
    flags = ("--dataset", "digits", "--batch-size", 32, "--max-steps", 33, "--log-every", 1)
    run = runner.run("mnist_mlp", *flags, "--profile", "--tracker", "none", launcher="two forks")
    timed = set(run.series("perf/step_milliseconds"))
    left_out = sorted(set(range(1, 34)) - timed)
    assert left_out == list(range(left_out[0], left_out[-1] + 1))
    assert left_out[0] > FIRST_UPDATES + 1
    assert left_out[-1] < 33
    assert "waiting for other processes" in run.read("profile/verdict.json")["evidence"]
