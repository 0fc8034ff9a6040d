"""Stops runs at random moments, over and over. A script, not collected by pytest.

python tests/soak.py --minutes 15
python tests/soak.py --minutes 1 --seed 7

For each run, the recipe and the numbers of processes, loader workers and accumulated batches are
random. The script kills, terminates, interrupts or freezes the run at random moments and during
saves, and resumes it with ``--resume auto`` until it is finished. Then each sample of each
micro-batch, each row of `metrics.jsonl` and the final weights must equal, bit for bit, those of the
same run without a stop, which is made once. On the first difference, the script prints the seed,
keeps the files, and ends with status 1.
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

from tests.jobs import (  # noqa: E402
    SAMPLE_RECORDER,
    Job,
    final_weights,
    newest_step,
    recorded_samples,
    rows_without_clock,
)
from tests.launch import LAUNCHES, Launcher, Runner  # noqa: E402

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
MAX_STARTS = 30  # of one run; a run that is not finished by then makes no progress


@dataclass(frozen=True)
class Setting:
    """The random choices of a run."""

    recipe: str
    launcher: Launcher
    workers: int
    accumulation: int

    def flags(self) -> tuple[object, ...]:
        """Return the recipe's flags; an update has 128 samples, whatever the setting."""
        processes = LAUNCHES[self.launcher].ranks
        placement = ("--data-placement", "workers", "--num-workers", self.workers)
        return (
            *RECIPES[self.recipe],
            *COMMON,
            *placement,
            *("--gradient-accumulation-steps", self.accumulation),
            *("--batch-size", 128 // processes // self.accumulation),
        )


@dataclass
class Soak:
    """Counts of what happened so far, and the runs without a stop to compare with."""

    folder: Path
    chance: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    whole: dict[Setting, float] = field(default_factory=dict)  # seconds of the run without a stop

    def __post_init__(self) -> None:
        self.runner = Runner(self.folder)

    def start(self, setting: Setting, directory: Path) -> Job:
        """Start or resume a run by the same command, as a supervisor does."""
        recipe = REPOSITORY / "recipes" / f"{setting.recipe}.py"
        flags = (*setting.flags(), "--output-dir", directory, "--resume", "auto")
        record = directory.with_name(f"{directory.name}-samples")
        return Job(self.runner, SAMPLE_RECORDER, record, recipe, *flags, directory=directory,
                   launcher=setting.launcher)  # fmt: skip

    def choose(self) -> Setting:
        """Return a random setting."""
        return Setting(
            self.chance.choice(list(RECIPES)),
            self.chance.choice(("fork", "plain python", "accelerate", "two forks", "multi_cpu")),
            self.chance.choice((0, 2)),
            self.chance.choice((1, 2)),
        )

    def unbroken(self, setting: Setting) -> Path:
        """Return the directory of the run without a stop; the first call makes it."""
        names = (setting.recipe, setting.launcher, setting.workers, setting.accumulation)
        directory = self.folder / "-".join(["whole", *map(str, names)])
        if setting not in self.whole:
            began = time.monotonic()
            job = self.start(setting, directory)
            assert job.end(600) == 0, job.printed()[-4000:]
            self.whole[setting] = time.monotonic() - began
        return directory

    def broken(self, setting: Setting, directory: Path, deadline: float) -> bool:
        """Make a run that is stopped again and again; return whether it finished in time."""
        for _ in range(MAX_STARTS):
            if time.monotonic() > deadline:
                return False
            before = newest_step(directory)
            job = self.start(setting, directory)
            if self.stop(job, setting):
                self.counts["runs"] += 1
                return True
            self.counts["stops"] += 1
            self.counts["starts that saved nothing"] += newest_step(directory) <= before
        raise AssertionError(f"not finished after {MAX_STARTS} starts:\n{job.printed()[-4000:]}")

    def stop(self, job: Job, setting: Setting) -> bool:
        """Stop a job in a random way at a random moment; return whether it had finished before."""
        name = self.chance.choice(STOPS)
        saves = self.chance.random() < 0.3
        # Most of a start is imports: wait for the training, and then a part of its time.
        first = newest_step(job.directory)
        is_early = self.chance.random() < 0.1  # perhaps a stop during the imports
        pause = self.chance.random() ** 2 * 0.5 * self.whole[setting]
        unfinished = job.directory / "checkpoints"
        while not is_early and newest_step(job.directory) <= first and job.process.poll() is None:
            time.sleep(0.002)
        until = time.monotonic() + pause
        while time.monotonic() < until and job.process.poll() is None:
            time.sleep(0.002)
        while saves and job.process.poll() is None and not any(unfinished.glob("*.unfinished/*")):
            time.sleep(0.0005)
        job.all_started()  # remembers processes that may outlive the launcher
        with contextlib.suppress(psutil.NoSuchProcess):
            self.send(job, name)
        job.end(90)
        status: dict[str, object] = {"status": "running"}
        if (job.directory / "status.json").exists():
            status = job.read("status.json")
        if status["status"] == "finished":  # even if the signal then stopped the launcher
            return True
        assert status.get("resumable", True), f"{status}\n{job.printed()[-4000:]}"
        self.counts[f"{name}{' during a save' if saves else ''}"] += 1
        return False

    def send(self, job: Job, name: str) -> None:
        """Stop the whole job, one rank, or the launcher, in the way that is named."""
        ranks = job.ranks()
        if not ranks:  # all ranks have just ended
            return
        if name == "SIGKILL":
            job.kill()
        elif name == "one rank killed":
            self.chance.choice(ranks).kill()
        elif name == "SIGSTOP":
            self.chance.choice(ranks).send_signal(signal.SIGSTOP)
            time.sleep(0.5)
            job.kill()
        else:
            psutil.Process(job.process.pid).send_signal(signal.Signals[name])

    def compare(self, setting: Setting, directory: Path) -> None:
        """Raise an `AssertionError` unless a run equals the one without a stop."""
        whole = self.unbroken(setting)
        expected, _, updates = recorded_samples(whole.with_name(f"{whole.name}-samples"))
        record, beginnings, total = recorded_samples(
            directory.with_name(f"{directory.name}-samples")
        )
        assert record == expected, "other samples"
        assert rows_without_clock(directory) == rows_without_clock(whole), (
            "other rows in metrics.jsonl"
        )
        assert final_weights(directory) == final_weights(whole), "other weights"
        per_epoch = 1 + max(update for _, update, _, _ in record)
        self.counts["resumed from a checkpoint"] += sum(start != (0, 0) for start in beginnings)
        self.counts["resumed in the middle of an epoch"] += sum(
            update % per_epoch != 0 for _, update in beginnings
        )
        self.counts["updates"] += updates
        self.counts["updates made again"] += total - updates


def main() -> int:
    """Make runs for the stated minutes, and print counts."""
    parser = argparse.ArgumentParser(description="Stop runs at random moments, over and over.")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    soak = Soak(folder, random.Random(seed))
    deadline = time.monotonic() + 60 * options.minutes
    print(f"seed {seed}, files in {folder}", flush=True)
    number = 0
    while time.monotonic() < deadline:
        number += 1
        setting = soak.choose()
        directory = folder / f"run-{number:04d}"
        try:
            soak.unbroken(setting)
            is_finished = soak.broken(setting, directory, deadline)
            if is_finished:
                soak.compare(setting, directory)
        except AssertionError as difference:
            print(f"run {number}, {setting}: {difference}\nseed {seed}; kept: {directory}")
            print_counts(soak)
            return 1
        if is_finished:
            print(f"run {number}: {setting}: the same", flush=True)
        for path in folder.glob(f"{directory.name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(folder)
    print_counts(soak)
    return 0


def print_counts(soak: Soak) -> None:
    """Print what happened so far."""
    print(f"{len(soak.whole):6} runs without a stop, to compare with")
    for name, count in soak.counts.items():
        print(f"{count:6} {name}")


if __name__ == "__main__":
    sys.exit(main())
