"""The Slurm script saves a run and queues it again. Stand-ins replace Slurm's commands."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.harness.ports import free_port
from tests.jobs import CHECKPOINT_EVERY, MLP, final_weights, newest_step
from tests.launch import CONFIGS, REPOSITORY, Finished, Runner, clean_environment

FLAGS = (*MLP, "--epochs", 20)

# Acts as srun: one task for each node; it passes SIGUSR1 on, and SIGTERM kills everything.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
tasks=()
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
  SLURM_NODEID=$node "$@" &
  tasks+=($!)
done
trap 'kill -USR1 "${tasks[@]}"' USR1
trap 'kill -KILL "${tasks[@]}"' TERM
echo $$ > "$FAKES/srun.pid"
worst=0
for task in "${tasks[@]}"; do
  wait "$task"; status=$?
  while kill -0 "$task" 2> /dev/null; do wait "$task"; status=$?; done
  if ((status > worst)); then worst=$status; fi
done
exit "$worst"
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then echo 127.0.0.1; else echo "$@" >> "$FAKES/requeued"; fi
"""


class Cluster:
    """Starts the script as Slurm would, again and again under one job number."""

    def __init__(self, runner: Runner, folder: Path, python: Path, nodes: int = 1) -> None:
        """Make Slurm's commands in `folder`; the script takes `python` and what lies beside it."""
        self.folder = folder
        self.runner = runner
        self.directory = folder / "run"
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.environment = clean_environment(runner.folder) | {
            "PATH": f"{folder}:{python.parent}:{os.environ['PATH']}",
            "FAKES": str(folder),
            "RUN_DIRECTORY": str(self.directory),
            "SLURM_JOB_ID": str(free_port() - 10000),  # of which the port is made
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_JOB_NODELIST": "node[1-2]",
        }

    def start(self, *flags: object) -> None:
        """Start the script in the background."""
        script = str(CONFIGS / "slurm.sh")
        recipe = str(REPOSITORY / "recipes" / "mnist_mlp.py")
        self.log = self.folder / f"{time.monotonic_ns()}.log"
        self.process = subprocess.Popen(
            ["bash", script, recipe, *map(str, flags)],
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def train_until_saved(self) -> None:
        """Wait for the first checkpoint."""
        deadline = time.monotonic() + 120
        while newest_step(self.directory) < CHECKPOINT_EVERY:
            assert self.process.poll() is None, self.printed()
            assert time.monotonic() < deadline, self.printed()
            time.sleep(0.01)

    def end(self) -> int:
        """Wait for the script, check that it left no process running, and return its status."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        status = self.process.wait(120)
        assert not psutil.wait_procs(children, timeout=0)[1], self.printed()
        return status

    def printed(self) -> str:
        """Return what the script printed."""
        return self.log.read_text()

    def status(self) -> dict[str, object]:
        """Return the run's `status.json`."""
        return json.loads((self.directory / "status.json").read_text())

    def requeued(self) -> list[str]:
        """Return the job numbers that were queued again."""
        path = self.folder / "requeued"
        return path.read_text().split("\n")[:-1] if path.exists() else []


@pytest.fixture(scope="session")
def whole(runner: Runner) -> Finished:
    """The run that nothing stops, on all cores: the rounding of a sum depends on the threads."""
    return runner.shared("mnist_mlp", *FLAGS, all_cores=True)


@pytest.fixture
def cluster(runner: Runner, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of one node, whose processes are forks."""
    cluster = Cluster(runner, tmp_path, runner.python)
    yield cluster
    if cluster.process.poll() is None:
        os.killpg(cluster.process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_time_limit_saves_and_queues_again_until_done(cluster: Cluster, whole: Finished) -> None:
    """SIGUSR1 to the script saves and queues the job again once.

    The next start finishes with the bits of the unbroken run and does not queue it again.
    """
    cluster.start(*FLAGS)
    cluster.train_until_saved()
    cluster.process.send_signal(signal.SIGUSR1)
    assert cluster.end() != 0
    status = cluster.status()
    assert status["status"] == "preempted", cluster.printed()
    assert status["global_step"] == newest_step(cluster.directory)
    requeued = [f"requeue {cluster.environment['SLURM_JOB_ID']}"]
    assert cluster.requeued() == requeued
    cluster.start(*FLAGS)
    assert cluster.end() == 0, cluster.printed()
    assert cluster.status()["status"] == "finished"
    assert cluster.requeued() == requeued
    assert final_weights(cluster.directory) == final_weights(whole.directory)
    cluster.start(*FLAGS)
    assert cluster.end() == 0, cluster.printed()
    assert "is finished" in cluster.printed()
    assert cluster.requeued() == requeued


@pytest.mark.slow
def test_two_nodes_are_one_run_and_save_together(runner: Runner, tmp_path: Path) -> None:
    """All ranks of both nodes save when srun gets SIGUSR1 from Slurm and passes it on."""
    cluster = Cluster(runner, tmp_path, runner.python, nodes=2)
    cluster.start(*FLAGS, "--epochs", 2000)
    cluster.train_until_saved()
    os.kill(int((tmp_path / "srun.pid").read_text()), signal.SIGUSR1)
    assert cluster.end() != 0
    status = cluster.status()
    assert status["status"] == "preempted", cluster.printed()
    newest = cluster.directory / "checkpoints" / f"step-{status['global_step']:08d}"
    assert json.loads((newest / "manifest.json").read_text())["world_size"] == 2
    assert len(cluster.requeued()) == 1


@pytest.mark.slow
def test_mistakes_and_cancelled_jobs_are_not_queued_again(cluster: Cluster) -> None:
    """Neither SIGTERM, which scancel sends, nor a bad flag queues the job again.

    SIGTERM saves the run. A bad flag then makes it not resumable.
    """
    cluster.start("--epoochs", 3)
    assert cluster.end() != 0
    assert "--epochs" in cluster.printed()
    assert not cluster.directory.exists()
    cluster.start(*FLAGS, "--epochs", 2000)
    cluster.train_until_saved()
    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.end() != 0
    assert cluster.status()["status"] == "preempted", cluster.printed()
    cluster.start("--epoochs", 3)
    assert cluster.end() != 0
    assert not cluster.status()["resumable"]
    assert cluster.requeued() == []


def test_each_setting_of_slurm_is_explained() -> None:
    """Each `#SBATCH` line has a comment above it."""
    lines = (CONFIGS / "slurm.sh").read_text().splitlines()
    for before, line in itertools.pairwise(lines):
        assert len(line) <= 100
        if line.startswith("#SBATCH"):
            assert before.startswith("# "), line
