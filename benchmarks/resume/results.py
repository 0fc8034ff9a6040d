"""The file of results: what each kill did to each contestant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import read_results, write_results
from benchmarks.resume.contestants import CONTESTANTS
from benchmarks.resume.kills import MOMENTS, Kill
from benchmarks.resume.schedule import (
    BATCH,
    EPOCHS,
    SAVE_EVERY,
    SEED,
    TRAIN_SAMPLES,
    UPDATES,
    UPDATES_PER_EPOCH,
)

Key = tuple[str, int, str]  # contestant, processes, the kill's label
Facts = dict[str, Any]  # a JSON object
TASK = {
    "data": "scikit-learn's digits",
    "training_samples": TRAIN_SAMPLES,
    "batch": BATCH,
    "updates_per_epoch": UPDATES_PER_EPOCH,
    "epochs": EPOCHS,
    "updates": UPDATES,
    "save_every": SAVE_EVERY,
    "seed": SEED,
}
DEFINITIONS = {
    "repeated": "uses of a sample in an epoch beyond its first, summed over epochs; only updates "
    "that the final weights have had count, so those that were rolled back do not",
    "lost": "samples that an epoch did not use, summed over epochs",
    "other_batches": "updates whose samples differ from those of the uninterrupted training",
    "repeated_orders": "epochs with the order of an earlier epoch",
    "same_bits": "whether the final weights are bit for bit those of the uninterrupted training",
    "rows_lost": "logged rows of the uninterrupted training that the killed one lacks",
    "rows_doubled": "logged rows beyond the first of each step",
    "written_shares": "bytes of the checkpoint that were on the disk at a kill in a save, as a "
    "share of all; if the kill names another share, it missed and does not count",
    "failures": "the line of the exception for each resume that failed",
    "retried": "failed resumes that were repeated from the same files; one before each removal",
    "commit": "that was measured; -changed: with changes that are not in it; null: unknown",
    "code": "digest of the code that a result depends on",
    "removed": "checkpoints that had to be removed by hand before the training could be resumed",
}


@dataclass(frozen=True)
class Result:
    """What a kill did to a contestant; `DEFINITIONS` explains the figures."""

    contestant: str
    processes: int
    kill: str  # its label
    moment: str
    updates: int  # that the final weights have had
    resumed_at: list[int]  # the first update of each resumed attempt
    repeated: int
    lost: int
    repeated_by_epoch: dict[str, int]  # epochs without repeated samples are left out
    lost_by_epoch: dict[str, int]  # likewise
    other_batches: int
    repeated_orders: int
    same_bits: bool
    largest_difference: float | None  # of a weight; None if the training could not be finished
    rows_lost: int
    rows_doubled: int
    removed: int
    is_finished: bool
    failures: list[str]
    written_shares: list[float]  # of the checkpoint, when it was killed
    repeat: str  # the command
    code: str  # digest of what changes the measurement
    retried: int = 0
    commit: str | None = None
    measured_at: str | None = None  # ISO 8601, UTC

    @property
    def key(self) -> Key:
        """The key that identifies a result within a file."""
        return self.contestant, self.processes, self.kill

    @property
    def missed(self) -> bool:
        """Whether a kill in a save came with another share of the checkpoint on the disk."""
        return Kill.parse(self.kill).missed(self.written_shares)

    @property
    def is_exact(self) -> bool:
        """Whether the kill left no trace in samples, weights and rows, and needed no help."""
        faults = (
            self.repeated,
            self.lost,
            self.other_batches,
            self.repeated_orders,
            self.rows_lost,
            self.rows_doubled,
            self.removed,
        )
        return self.is_finished and self.same_bits and not any(faults)


@dataclass
class Results:
    """All results on one machine."""

    file: Path
    machine: Facts
    results: dict[Key, Result]

    @classmethod
    def read(cls, file: Path) -> Results | None:
        """Return the results in a file; None if there is no such file.

        Raises:
            SystemExit: the file holds something else.
        """

        def parse(content: Facts) -> Results:
            results = [Result(**value) for value in content["results"]]
            return cls(file, content["machine"], {result.key: result for result in results})

        return read_results(file, parse)

    def require_versions(self, machine: Mapping[str, Any]) -> None:
        """Refuse to add results of other versions to these.

        Raises:
            SystemExit: a version differs.
        """
        if self.results and self.machine["versions"] != machine["versions"]:
            raise SystemExit(
                f"error: {self.file} has results of other versions: pass another --output"
            )

    def in_order(self) -> list[Result]:
        """Return the results in the order of contestants, processes and moments."""
        names = [contestant.name for contestant in CONTESTANTS]
        moments = list(MOMENTS)
        return sorted(
            self.results.values(),
            key=lambda result: (
                names.index(result.contestant),
                result.processes,
                moments.index(result.moment),
                result.kill,
            ),
        )

    def write(self) -> None:
        """Write the file, completely or not at all."""
        results = self.in_order()
        names = {result.contestant for result in results}
        content = {
            "task": TASK,
            "definitions": DEFINITIONS,
            "moments": MOMENTS,
            "contestants": {
                contestant.name: {
                    "source": contestant.source,
                    "pages": contestant.pages_of(self.machine["versions"]),
                    "settings": contestant.settings,
                }
                for contestant in CONTESTANTS
                if contestant.name in names
            },
            "machine": self.machine,
            "results": [asdict(result) for result in results],
        }
        write_results(self.file, content)
