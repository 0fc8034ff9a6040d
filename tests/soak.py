"""Stop runs at random moments, over and over: a script, not collected by pytest.

python tests/soak.py --minutes 15
python tests/soak.py --minutes 1 --seed 7

Each run has a random recipe, number of processes, of loader workers and of accumulated batches.
It is killed, terminated, interrupted or frozen and killed, at random moments and during saves,
and resumed with ``--resume auto`` until it is done. Then each sample of each micro-batch, each
row of `metrics.jsonl` and the final weights must be, bit for bit, those of the same run without
a stop, which is made once. The first difference ends the script with status 1; it names the seed
and leaves the files.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[0] = str(REPOSITORY)

import psutil  # noqa: E402

from tests.jobs import RECORDED, Job, final_weights, learned, newest_step, recorded  # noqa: E402
from tests.launch import Launcher, Runner  # noqa: E402

STOPS = ("SIGKILL", "SIGKILL", "one rank killed", "SIGTERM", "SIGINT", "SIGSTOP")
COMMON = ("--log-every", 1, "--tracker", "none")
RECIPES: dict[str, tuple[object, ...]] = {
    "mnist_mlp": (
        *("--dataset", "digits", "--epochs", 25, "--dropout", 0.2, "--hidden-sizes", 64, 48),
        *("--checkpoint-every", 5),
    ),
    "resnet": ("--dataset", "digits", "--epochs", 2, "--checkpoint-every", 2),
    "bert": (
        *("--dataset", "docstrings", "--model", "scratch", "--epochs", 1, "--max-length", 48),
        *("--checkpoint-every", 3),
    ),
}
MOST_STARTS = 30  # of one run: if it is not done by then, it goes round in circles


@dataclass(frozen=True)
class Setting:
    """What a run is made of: what may change how it is stored, not only what it learns."""

    recipe: str
    launcher: Launcher
    workers: int
    accumulation: int

    def flags(self) -> tuple[object, ...]:
        """Return the recipe's flags; an update has 128 samples, whatever the setting."""
        processes = 2 if self.launcher in ("two", "multi_cpu") else 1
        placement = ("--data-placement", "workers", "--num-workers", self.workers)
        return (
            *(*RECIPES[self.recipe], *COMMON, *placement),
            *("--gradient-accumulation-steps", self.accumulation),
            *("--batch-size", 128 // processes // self.accumulation),
        )


@dataclass
class Soak:
    """The runs made so far, and what they must be compared with."""

    folder: Path
    chance: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    whole: dict[Setting, float] = field(default_factory=dict)  # seconds that it took

    def __post_init__(self) -> None:
        self.runner = Runner(self.folder)

    def start(self, setting: Setting, directory: Path) -> Job:
        """Start a run, or go on with it, as a supervisor does: by the same command."""
        recipe = REPOSITORY / "recipes" / f"{setting.recipe}.py"
        flags = (*setting.flags(), "--output-dir", directory, "--resume", "auto")
        record = directory.with_name(f"{directory.name}-samples")
        return Job(self.runner, RECORDED, record, recipe, *flags, directory=directory,
                   launcher=setting.launcher)  # fmt: skip

    def choose(self) -> Setting:
        """Return a random setting."""
        return Setting(
            self.chance.choice(list(RECIPES)),
            self.chance.choice(("python", "fresh", "accelerate", "two", "multi_cpu")),
            self.chance.choice((0, 2)),
            self.chance.choice((1, 2)),
        )

    def unbroken(self, setting: Setting) -> Path:
        """Return the directory of the run without a stop, made the first time."""
        names = (setting.recipe, setting.launcher, setting.workers, setting.accumulation)
        directory = self.folder / "-".join(["whole", *map(str, names)])
        if setting not in self.whole:
            began = time.monotonic()
            job = self.start(setting, directory)
            assert job.end(600) == 0, job.said()[-4000:]
            self.whole[setting] = time.monotonic() - began
        return directory

    def broken(self, setting: Setting, directory: Path, deadline: float) -> bool:
        """Make a run that is stopped again and again; return whether it was done in time."""
        for _ in range(MOST_STARTS):
            if time.monotonic() > deadline:
                return False
            before = newest_step(directory)
            job = self.start(setting, directory)
            if self.stop(job, setting):
                self.counts["runs"] += 1
                return True
            self.counts["stops"] += 1
            self.counts["starts that saved nothing"] += newest_step(directory) <= before
        raise AssertionError(f"not done after {MOST_STARTS} starts:\n{job.said()[-4000:]}")

    def stop(self, job: Job, setting: Setting) -> bool:
        """Stop a job in some way at some moment; return whether it was done before."""
        name = self.chance.choice(STOPS)
        saves = self.chance.random() < 0.3
        # Most of a start is imports: wait for the training, and then a part of its time.
        first = newest_step(job.directory)
        training = (lambda: newest_step(job.directory) > first, lambda: True)
        ready = training[self.chance.random() < 0.1]
        pause = self.chance.random() ** 2 * 0.5 * self.whole[setting]
        unfinished = job.directory / "checkpoints"
        while not ready() and job.process.poll() is None:
            time.sleep(0.002)
        until = time.monotonic() + pause
        while time.monotonic() < until and job.process.poll() is None:
            time.sleep(0.002)
        while saves and job.process.poll() is None and not any(unfinished.glob("*.unfinished/*")):
            time.sleep(0.0005)
        job.all_started()  # so that what outlives its launcher is known
        with contextlib.suppress(psutil.NoSuchProcess):
            self.send(job, name)
        job.end(90)
        said: dict[str, object] = {"status": "running"}
        if (job.directory / "status.json").exists():
            said = job.read("status.json")
        if said["status"] == "finished":  # a launcher may have been stopped all the same
            return True
        assert said.get("resumable", True), f"{said}\n{job.said()[-4000:]}"
        self.counts[f"{name}{' during a save' if saves else ''}"] += 1
        return False

    def send(self, job: Job, name: str) -> None:
        """Send a signal: to all processes, to the launcher, or to one rank, which then freezes."""
        workers = job.workers()
        if not workers:  # all ranks have just ended
            return
        if name == "SIGKILL":
            job.kill()
        elif name == "one rank killed":
            self.chance.choice(workers).kill()
        elif name == "SIGSTOP":
            self.chance.choice(workers).send_signal(signal.SIGSTOP)
            time.sleep(0.5)
            job.kill()
        else:
            psutil.Process(job.process.pid).send_signal(signal.Signals[name])

    def compare(self, setting: Setting, directory: Path) -> None:
        """Raise an `AssertionError` unless a run is the same as the one without a stop."""
        whole = self.unbroken(setting)
        expected, _, updates = recorded(whole.with_name(f"{whole.name}-samples"))
        record, beginnings, total = recorded(directory.with_name(f"{directory.name}-samples"))
        assert record == expected, "other samples"
        assert learned(directory) == learned(whole), "other rows in metrics.jsonl"
        assert final_weights(directory) == final_weights(whole), "other weights"
        per_epoch = 1 + max(update for _, update, _, _ in record)
        self.counts["resumed from a checkpoint"] += sum(start != (0, 0) for start in beginnings)
        self.counts["resumed in the middle of an epoch"] += sum(
            update % per_epoch != 0 for _, update in beginnings
        )
        self.counts["updates"] += updates
        self.counts["updates made again"] += total - updates


def main() -> int:
    """Soak for some minutes, and print what was done."""
    parser = argparse.ArgumentParser(description="Stop runs at random moments, over and over.")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=None)
    asked = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if asked.seed is None else asked.seed
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    soak = Soak(folder, random.Random(seed))
    deadline = time.monotonic() + 60 * asked.minutes
    print(f"seed {seed}, files in {folder}", flush=True)
    number = 0
    while time.monotonic() < deadline:
        number += 1
        setting, directory = soak.choose(), folder / f"run-{number:04d}"
        try:
            soak.unbroken(setting)
            done = soak.broken(setting, directory, deadline)
            if done:
                soak.compare(setting, directory)
        except AssertionError as difference:
            print(f"run {number}, {setting}: {difference}\nseed {seed}; kept: {directory}")
            print_counts(soak)
            return 1
        if done:
            print(f"run {number}: {setting}: the same", flush=True)
        for path in folder.glob(f"{directory.name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(folder)
    print_counts(soak)
    return 0


def print_counts(soak: Soak) -> None:
    """Print what was done so far."""
    print(f"{len(soak.whole):6} runs without a stop, to compare with")
    for name, count in soak.counts.items():
        print(f"{count:6} {name}")


if __name__ == "__main__":
    sys.exit(main())
