"""Two machines, as two network namespaces of this one with an address each and a link between."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from tests.conftest import SAME_UPDATES
from tests.jobs import final_weights, learned, newest_step
from tests.launch import CONFIGS, REPOSITORY, Finished, Runner, clean_environment, launch_command

ADDRESSES = ("10.213.7.1", "10.213.7.2")
UPDATE = (
    *("--effective-batch-size", 64, "--batch-size", 16, "--scale-learning-rate", "sqrt"),
    *("--base-batch-size", 16, "--tracker", "none", *SAME_UPDATES),
    *("--epochs", 15),
)
PATIENCE = 10  # seconds, of `--collective-timeout`

pytestmark = pytest.mark.slow


def ip(*words: object) -> None:
    """Change the network, or raise with what `ip` says."""
    asked = ["ip", *map(str, words)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise OSError(f"{' '.join(asked)}: {done.stderr.strip()}")


class Machines:
    """Two machines that share the file system and nothing else."""

    def __init__(self, runner: Runner, folder: Path) -> None:
        """Make them and the link between; an `OSError` where that is not allowed."""
        self.runner, self.folder = runner, folder
        self.names = [f"recipes-{os.getpid()}-{rank}" for rank in range(2)]
        self.links = [f"link{os.getpid() % 10**6}-{rank}" for rank in range(2)]
        self.started: list[subprocess.Popen[str]] = []
        for name in self.names:
            ip("netns", "add", name)
        peer = ("peer", "name", self.links[1], "netns", self.names[1])
        ip("link", "add", self.links[0], "netns", self.names[0], "type", "veth", *peer)
        for name, link, address in zip(self.names, self.links, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", "lo", "up")
        self.connect(True)

    def connect(self, connected: bool) -> None:
        """Plug the link in, or cut it."""
        for name, link in zip(self.names, self.links, strict=True):
            ip("-n", name, "link", "set", link, "up" if connected else "down")

    def start(self, *flags: object, places: tuple[str, str] = (".", ".")) -> None:
        """Start a recipe on both, in folders of theirs, with a cache each."""
        self.logs = [self.folder / f"{time.monotonic_ns()}-{rank}.log" for rank in range(2)]
        self.started = [
            self.launch(rank, place, flags, log.open("w"))
            for rank, (place, log) in enumerate(zip(places, self.logs, strict=True))
        ]

    def launch(
        self, rank: int, place: str, flags: tuple[object, ...], log: IO[str]
    ) -> subprocess.Popen[str]:
        """Start `accelerate launch` on one of them, as a fork in its network."""
        (self.folder / place).mkdir(exist_ok=True)
        words = ["--config_file", CONFIGS / "multi_node.yaml", "--num_processes", 2]
        words += ["--machine_rank", rank, "--main_process_ip", ADDRESSES[0]]
        words += [REPOSITORY / "recipes" / "mnist_mlp.py", *flags]
        launcher = launch_command("accelerate", self.runner.python)
        inside = ["ip", "netns", "exec", self.names[rank], *launcher]
        cache = {"XDG_CACHE_HOME": str(self.folder / f"cache-{rank}"), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [*inside, *map(str, words)],
            env=clean_environment(self.runner.folder) | cache,
            cwd=self.folder / place,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
        )

    def end(self, timeout: float = 150) -> list[int]:
        """Wait for both, and return their statuses."""
        deadline = time.monotonic() + timeout
        return [one.wait(max(1, deadline - time.monotonic())) for one in self.started]

    def said(self) -> list[str]:
        """Return what each printed."""
        return [log.read_text() for log in self.logs]

    def close(self) -> None:
        """End what still runs, and take the machines away."""
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(30)
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30)


@pytest.fixture
def machines(runner: Runner, tmp_path: Path) -> Iterator[Machines]:
    """Two of them, or a skipped test where this one does not allow it."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` (iproute2)")
    made = Machines.__new__(Machines)
    made.started, made.names = [], []
    try:
        made.__init__(runner, tmp_path)  # type: ignore[misc]
        yield made
    except OSError as problem:
        if made.started:
            raise
        pytest.skip(f"network namespaces are not allowed here: {problem}")
    finally:
        made.close()


def test_two_machines_are_two_processes(
    machines: Machines, runner: Runner, odd_images: Path, tmp_path: Path
) -> None:
    """The same bits, also after the link was cut; one process, or one left, accumulates as much."""
    flags = ("--dataset", odd_images, *UPDATE)
    one = runner.run("mnist_mlp", *flags)
    two = runner.run("mnist_mlp", *flags, launcher="two", environment={"OMP_NUM_THREADS": "1"})
    assert [run.config["config"]["gradient_accumulation_steps"] for run in (one, two)] == [4, 2]
    assert_same_figures(one, two)

    directory = tmp_path / "run"
    asked = (*flags, "--output-dir", directory, "--collective-timeout", PATIENCE)
    asked += ("--checkpoint-every", 2)
    machines.start(*asked)
    wait_for_step(machines, directory, 6)
    machines.connect(False)
    began = time.monotonic()
    statuses = machines.end()
    assert time.monotonic() - began < 6 * PATIENCE
    assert all(statuses), machines.said()
    status = json.loads((directory / "status.json").read_text())
    assert (status["status"], status["resumable"]) == ("failed", True), machines.said()
    assert status["reason"], status

    # With one machine left, the same command there accumulates what the other one made.
    alone = shutil.copytree(directory, tmp_path / "alone")
    left = runner.run("mnist_mlp", "--resume", alone, output_directory=False)
    left = replace(left, directory=alone)
    assert left.config["config"]["gradient_accumulation_steps"] == 4
    assert "resuming" in left.output
    assert left.config["environment"]["world_size"] == 1
    assert_same_figures(one, left)

    machines.connect(True)
    machines.start(*asked, "--resume", "auto")
    assert machines.end() == [0, 0], machines.said()
    assert final_weights(directory) == final_weights(two.directory)
    assert learned(directory) == learned(two.directory)
    first, second = machines.said()
    assert "resuming" in first
    assert "epoch" not in second  # one log, one display
    for rank in range(2):  # data are prepared once a machine
        assert len([*tmp_path.glob(f"cache-{rank}/accelerate-recipes/*/facts.json")]) == 1


def wait_for_step(machines: Machines, directory: Path, step: int) -> None:
    """Wait for a checkpoint."""
    deadline = time.monotonic() + 120
    while newest_step(directory) < step:
        assert all(one.poll() is None for one in machines.started), machines.said()
        assert time.monotonic() < deadline, machines.said()
        time.sleep(0.005)


def assert_same_figures(one: Finished, two: Finished) -> None:
    """Check losses within rounding, rates and counts exactly."""
    for name in ("train/loss", "val/loss", "train/grad_norm"):
        assert one.series(name) == pytest.approx(two.series(name), rel=2e-4), name
    for name in ("train/learning_rate", "val/count", "progress/samples"):
        assert one.series(name) == two.series(name) != {}, name
    assert max(one.series("train/learning_rate").values()) == pytest.approx(2 * 3e-3)


def test_directory_of_one_machine_is_refused_at_the_start(
    machines: Machines, odd_images: Path, tmp_path: Path
) -> None:
    """A relative one in other folders: one sentence, and no run that a supervisor would repeat."""
    flags = ("--dataset", odd_images, *UPDATE, "--output-dir", "run", "--collective-timeout", 4)
    machines.start(*flags, places=("here", "there"))
    assert all(machines.end()), machines.said()
    first, second = machines.said()
    assert first.count("is not on a file system that all machines share: rank 1 on") == 1, first
    assert "all machines share" not in second
    assert not json.loads((tmp_path / "here" / "run" / "status.json").read_text())["resumable"]
    assert not [*tmp_path.glob("here/run/.seen-*")]
