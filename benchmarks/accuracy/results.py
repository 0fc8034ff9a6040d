"""The file of results: every finished run, and the table that follows from them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.accuracy.records import Evaluation, ForwardCost, Trial
from benchmarks.accuracy.workloads import Peer, Published, SameEpochs, Workload
from benchmarks.harness.result_file import read_results, write_results

Settings = dict[str, Any]  # a JSON object
NOTES = (
    "Seconds run from the start of the command, with imports, data preparation in empty caches and "
    "all evaluations.",
    "Both sides evaluate the same split after each epoch. Where it is test, the first meeting of a "
    "goal is a figure of this benchmark: no model and no setting is chosen by it.",
    "PFLOP: 10¹⁵ operations, three forward passes for each sample, a multiply-add counted as two.",
    "Peers read raw pixels, as torchvision stores them; recipes decode the images in their time.",
)


@dataclass(frozen=True)
class FinishedRun:
    """One contestant with one seed."""

    workload: str
    contestant: str
    seed: int
    settings: Settings
    repeat: list[str]  # commands
    evaluations: list[Evaluation]  # empty for a trial
    forward: ForwardCost
    trial: Trial | None
    git_commit: str | None
    measured_at: str
    load_average_before: float

    @property
    def key(self) -> tuple[str, str, int]:
        """The key that identifies a run within a file."""
        return self.workload, self.contestant, self.seed

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FinishedRun:
        """Read what `asdict` returned."""
        trial = value["trial"]
        read = {
            "evaluations": [Evaluation(**entry) for entry in value["evaluations"]],
            "forward": ForwardCost(**value["forward"]),
            "trial": None if trial is None else Trial(**trial),
        }
        return cls(**{**value, **read})


@dataclass
class Results:
    """All finished runs on one machine."""

    file: Path
    machine: Settings  # hardware, rates and versions
    runs: dict[tuple[str, str, int], FinishedRun] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> Results | None:
        """Return the results in a file; None if there is no such file.

        Raises:
            SystemExit: the file holds something else.
        """

        def parse(content: Settings) -> Results:
            runs = [FinishedRun.from_json(value) for value in content["runs"]]
            return cls(file, content["machine"], {run.key: run for run in runs})

        return read_results(file, parse)

    def require_machine(self, machine: Settings) -> None:
        """Refuse to add runs of another machine or other versions to these.

        Raises:
            SystemExit: the hardware's name or a version differs.
        """
        if not self.runs:
            return
        here = (machine["hardware"]["processor"], machine["versions"])
        there = (self.machine["hardware"]["processor"], self.machine["versions"])
        if here != there:
            raise SystemExit(
                f"error: {self.file} has runs of another machine or of other versions: pass "
                "another --output"
            )

    def has(self, key: tuple[str, str, int], settings: Settings) -> bool:
        """Whether a run with these settings is finished."""
        run = self.runs.get(key)
        # Through JSON, because tuples become lists there.
        return run is not None and run.settings == json.loads(json.dumps(settings))

    def write(self, table: Sequence[Mapping[str, Any]]) -> None:
        """Write the file, completely or not at all."""
        content = {
            "notes": NOTES,
            "machine": self.machine,
            "table": table,
            "runs": [asdict(run) for run in self.runs.values()],
        }
        write_results(self.file, content)

    def of(self, workload: str, contestant: str) -> list[FinishedRun]:
        """Return a contestant's runs by seed."""
        runs = [run for run in self.runs.values() if run.key[:2] == (workload, contestant)]
        return sorted(runs, key=lambda run: run.seed)

    def evaluations(self, workload: Workload, run: FinishedRun) -> list[Evaluation]:
        """Return the evaluations of a run, computed ones for a trial.

        A trial has none while the contestant whose epochs it takes has no run of the same seed.
        """
        peer = workload.contestant(run.contestant)
        if run.trial is None or not isinstance(peer, Peer):
            return run.evaluations
        if isinstance(peer.epochs_from, Published):
            return [run.trial.after(peer.epochs_from.epochs, peer.epochs_from.figures)]
        assert isinstance(peer.epochs_from, SameEpochs)
        other = self.runs.get((workload.name, peer.epochs_from.contestant, run.seed))
        entries = [] if other is None else other.evaluations
        return [run.trial.after(entry.epoch, entry.figures) for entry in entries]
