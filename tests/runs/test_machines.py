"""Runs on two machines: two network namespaces of this one, with a link between them."""

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
from tests.jobs import final_weights, newest_step, rows_without_clock
from tests.launch import CONFIGS, REPOSITORY, Finished, Runner, clean_environment, launch_command

ADDRESSES = ("10.213.7.1", "10.213.7.2")
UPDATE = (
    *("--effective-batch-size", 64, "--batch-size", 16, "--scale-learning-rate", "sqrt"),
    *("--base-batch-size", 16, "--tracker", "none", *SAME_UPDATES),
    *("--epochs", 15),
)
TIMEOUT = 10  # seconds, of `--collective-timeout`

pytestmark = pytest.mark.slow


def ip(*words: object) -> None:
    """Change the network with the command `ip`.

    Raises:
        OSError: `ip` failed.
    """
    command = ["ip", *map(str, words)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if finished.returncode:
        raise OSError(f"{' '.join(command)}: {finished.stderr.strip()}")


class Machines:
    """Two machines that share the file system and nothing else."""

    def __init__(self, runner: Runner, folder: Path) -> None:
        """Make two namespaces and the link between them.

        Raises:
            OSError: this machine does not allow it.
        """
        self.runner = runner
        self.folder = folder
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
        """Start a recipe on both machines, each with a working directory and cache of its own."""
        self.logs = [self.folder / f"{time.monotonic_ns()}-{rank}.log" for rank in range(2)]
        self.started = [
            self.launch(rank, place, flags, log.open("w"))
            for rank, (place, log) in enumerate(zip(places, self.logs, strict=True))
        ]

    def launch(
        self, rank: int, place: str, flags: tuple[object, ...], log: IO[str]
    ) -> subprocess.Popen[str]:
        """Start `accelerate launch` on one machine, as a fork in its network."""
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
        """Wait for both launches and return their exit statuses."""
        deadline = time.monotonic() + timeout
        return [process.wait(max(1, deadline - time.monotonic())) for process in self.started]

    def printed(self) -> list[str]:
        """Return the output of each machine."""
        return [log.read_text() for log in self.logs]

    def close(self) -> None:
        """Kill the processes that still run and delete the namespaces."""
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(30)
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30)


@pytest.fixture
def machines(runner: Runner, tmp_path: Path) -> Iterator[Machines]:
    """Two machines; the test is skipped where network namespaces are not allowed."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` (iproute2)")
    # `close` also deletes what a failed `__init__` has made.
    machines = Machines.__new__(Machines)
    machines.started = []
    machines.names = []
    try:
        machines.__init__(runner, tmp_path)  # type: ignore[misc]
        yield machines
    except OSError as problem:
        if machines.started:
            raise
        pytest.skip(f"network namespaces are not allowed here: {problem}")
    finally:
        machines.close()


def test_two_machines_are_two_processes(
    machines: Machines, runner: Runner, odd_images: Path, tmp_path: Path
) -> None:
    """Two machines give the bits of two processes, also after a resume because of a cut link.

    One process, and one machine that is left of two, accumulate more to make the same updates.
    """
    flags = ("--dataset", odd_images, *UPDATE)
    on_one = runner.run("mnist_mlp", *flags)
    one_thread = {"OMP_NUM_THREADS": "1"}
    on_two = runner.run("mnist_mlp", *flags, launcher="two forks", environment=one_thread)
    runs = (on_one, on_two)
    assert [run.config["config"]["gradient_accumulation_steps"] for run in runs] == [4, 2]
    assert_same_figures(on_one, on_two)

    directory = tmp_path / "run"
    command_line = (*flags, "--output-dir", directory, "--collective-timeout", TIMEOUT)
    command_line += ("--checkpoint-every", 2)
    machines.start(*command_line)
    wait_for_step(machines, directory, 6)
    assert_cut_link_ends_the_run(machines, directory)

    # With one machine left, the same command there accumulates what the other one made.
    alone = shutil.copytree(directory, tmp_path / "alone")
    assert_same_figures(on_one, resumed_on_one(runner, alone))

    machines.connect(True)
    machines.start(*command_line, "--resume", "auto")
    assert machines.end() == [0, 0], machines.printed()
    assert final_weights(directory) == final_weights(on_two.directory)
    assert rows_without_clock(directory) == rows_without_clock(on_two.directory)
    first, second = machines.printed()
    assert "resuming" in first
    assert "epoch" not in second  # one log, one display
    for rank in range(2):  # data are prepared once a machine
        assert len([*tmp_path.glob(f"cache-{rank}/accelerate-recipes/*/facts.json")]) == 1


def assert_cut_link_ends_the_run(machines: Machines, directory: Path) -> None:
    """Cut the link; check that both machines soon fail, and that the run can be resumed."""
    machines.connect(False)
    began = time.monotonic()
    statuses = machines.end()
    assert time.monotonic() - began < 6 * TIMEOUT
    assert all(statuses), machines.printed()
    status = json.loads((directory / "status.json").read_text())
    assert (status["status"], status["resumable"]) == ("failed", True), machines.printed()
    assert status["reason"], status


def resumed_on_one(runner: Runner, directory: Path) -> Finished:
    """Resume a run of two machines on one process, which accumulates twice as much."""
    left = runner.run("mnist_mlp", "--resume", directory, output_directory=False)
    left = replace(left, directory=directory)
    assert left.config["config"]["gradient_accumulation_steps"] == 4
    assert "resuming" in left.output
    assert left.config["environment"]["world_size"] == 1
    return left


def wait_for_step(machines: Machines, directory: Path, step: int) -> None:
    """Wait for a checkpoint of update `step` or a later one."""
    deadline = time.monotonic() + 120
    while newest_step(directory) < step:
        assert all(process.poll() is None for process in machines.started), machines.printed()
        assert time.monotonic() < deadline, machines.printed()
        time.sleep(0.005)


def assert_same_figures(first: Finished, second: Finished) -> None:
    """Check that two runs have the same rates and counts, and the same losses but for rounding."""
    for name in ("train/loss", "val/loss", "train/grad_norm"):
        assert first.series(name) == pytest.approx(second.series(name), rel=2e-4), name
    for name in ("train/learning_rate", "val/count", "progress/samples"):
        assert first.series(name) == second.series(name) != {}, name
    assert max(first.series("train/learning_rate").values()) == pytest.approx(2 * 3e-3)


def test_directory_of_one_machine_is_refused_at_the_start(
    machines: Machines, odd_images: Path, tmp_path: Path
) -> None:
    """A directory that the machines do not share ends the run with one sentence.

    The run is not resumable, so a supervisor does not repeat it.
    """
    flags = ("--dataset", odd_images, *UPDATE, "--output-dir", "run", "--collective-timeout", 4)
    machines.start(*flags, places=("here", "there"))
    assert all(machines.end()), machines.printed()
    first, second = machines.printed()
    assert first.count("is not on a file system that all machines share: rank 1 on") == 1, first
    assert "all machines share" not in second
    assert not json.loads((tmp_path / "here" / "run" / "status.json").read_text())["resumable"]
    assert not [*tmp_path.glob("here/run/.seen-*")]
