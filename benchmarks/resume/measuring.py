"""Compares a killed training with the uninterrupted one of the same contestant."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks import REPOSITORY
from benchmarks.resume.contestants import Contestant
from benchmarks.resume.counting import (
    count_other_batches,
    count_repeated_orders,
    count_rows,
    count_samples,
    final_trajectory,
)
from benchmarks.resume.digest import digest_of_measurement
from benchmarks.resume.kills import Kill
from benchmarks.resume.results import Result
from benchmarks.resume.schedule import EPOCHS, TRAIN_SAMPLES
from benchmarks.resume.training import Outcome

# Files that no measurement depends on: they change while one is under way.
NOT_MEASURED = ("benchmarks/results", "docs", "*.md")
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Reference:
    """The uninterrupted training."""

    outcome: Outcome
    weights: Weights

    @classmethod
    def of(cls, outcome: Outcome) -> Reference:
        """Read the weights of a training that was not killed."""
        assert outcome.weights is not None
        return cls(outcome, read_weights(outcome.weights))


def read_weights(file: Path) -> Weights:
    """Return the weights of a file by name."""
    weights: Weights = torch.load(file, weights_only=True)
    return weights


def largest_difference(weights: Weights, reference: Weights) -> float:
    """Return the largest difference of a weight."""
    return max(float((weights[name] - tensor).abs().max()) for name, tensor in reference.items())


def same_bits(weights: Weights, reference: Weights) -> bool:
    """Whether both have the same names and bit for bit the same tensors."""
    return weights.keys() == reference.keys() and all(
        torch.equal(weights[name].view(torch.int32), tensor.view(torch.int32))
        for name, tensor in reference.items()
    )


def compare(
    contestant: Contestant, kill: Kill, processes: int, outcome: Outcome, reference: Reference
) -> Result:
    """Return what a kill did."""
    trajectory = final_trajectory(outcome.attempts)
    expected = final_trajectory(reference.outcome.attempts)
    counts = count_samples(trajectory, TRAIN_SAMPLES, range(EPOCHS))
    weights = None if outcome.weights is None else read_weights(outcome.weights)
    rows_lost, rows_doubled = count_rows(outcome.logged_steps, reference.outcome.logged_steps)
    starts = [updates[0].number for updates in outcome.attempts[1:] if updates]
    return Result(
        contestant=contestant.name,
        processes=processes,
        kill=kill.label,
        moment=kill.moment,
        updates=len(trajectory),
        resumed_at=starts,
        repeated=counts.all_repeated,
        lost=counts.all_lost,
        repeated_by_epoch=without_zeros(counts.repeated),
        lost_by_epoch=without_zeros(counts.lost),
        other_batches=count_other_batches(trajectory, expected),
        repeated_orders=count_repeated_orders(trajectory),
        same_bits=weights is not None and same_bits(weights, reference.weights),
        largest_difference=(
            None if weights is None else largest_difference(weights, reference.weights)
        ),
        rows_lost=rows_lost,
        rows_doubled=rows_doubled,
        removed=outcome.removed,
        is_finished=outcome.weights is not None,
        failures=outcome.failures,
        written_shares=outcome.written_shares,
        repeat=repeating_command(contestant, kill, processes),
        code=digest_of_measurement(contestant),
        retried=outcome.retried,
        commit=measured_commit(),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def measured_commit() -> str | None:
    """Return the commit of this checkout, with "-changed" if files differ from it; None without."""
    git = ["git", "-C", str(REPOSITORY)]
    excluded = [f":(exclude){pattern}" for pattern in NOT_MEASURED]
    try:
        answer = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, encoding="utf-8")
        changes = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", *excluded])
    except OSError:
        return None
    commit = answer.stdout.strip()
    if not commit:
        return None
    return f"{commit}-changed" if changes.returncode != 0 else commit


def without_zeros(counts: dict[int, int]) -> dict[str, int]:
    """Return the counts of those epochs that have any, with names for JSON."""
    return {str(epoch): count for epoch, count in counts.items() if count}


def repeating_command(contestant: Contestant, kill: Kill, processes: int) -> str:
    """Return the command that repeats a kill and shows what it does."""
    words = ["python", "benchmarks/resume_peers.py", "--contestants", contestant.name]
    words += ["--kills", kill.label, "--processes", str(processes), "--again"]
    return shlex.join(words)
