"""The record of a run that a comparison works on, wherever the run is stored."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from common.metric_names import STEP
from common.objective import EVALUATED_SPLITS, PREFIXES, Objective, Split
from common.run_directory.records import CurrentStatus, Flags, RunConfig, is_number

TOO_LARGE = 1e100  # a chart can't show larger values
MAX_INTEGER = 2**53  # larger integers become floats: a chart takes only integers of 64 bits


@dataclass(frozen=True)
class RunRecord:
    """The contents of one run's files. A file that the run did not write is empty here.

    A run may be stored at W&B alone, so this record has no `StoredRun` that more could be read
    from. It keeps only numbers that a chart can show, and leaves out NaN.
    """

    name: str
    source: str  # the run's folder, or its address at W&B
    saved_config: RunConfig  # the contents of `config.json`
    objective: Objective
    rows: list[dict[str, float]]  # the rows of `metrics.jsonl`: one for each step, in order
    summary: Mapping[str, float]  # the figures in `summary.json`; empty before the run's end
    status: CurrentStatus
    reason: str | None = None  # why the run was preempted or failed
    status_step: int = 0  # the update in `status.json`; 0 for a run at W&B, which stores none

    @property
    def identity(self) -> str:
        """What copies of the run share: its random id, or its source if it has no id."""
        return self.saved_config.run_id or self.source

    @property
    def flags(self) -> Flags:
        """The flags by name, with the value that the run chose instead of ``auto``."""
        return self.saved_config.flags

    @property
    def is_trained(self) -> bool:
        """Whether the run trains; with `--evaluate-only`, it only evaluates a given model."""
        return not self.flags.get("evaluate_only")

    @property
    def splits(self) -> tuple[Split, Split]:
        """The split that is evaluated during training, and the split of the final evaluation.

        Both are the same if the data has only one of validation and test. A run with neither has
        logged no evaluation, so it does not matter which split is named.
        """
        splits = [split for split in EVALUATED_SPLITS if split in self.saved_config.data.sizes]
        return (splits[0], splits[-1]) if splits else ("validation", "validation")

    @property
    def objective_key(self) -> str:
        """The name under which training logs the objective's metric, such as ``val/accuracy``."""
        return f"{PREFIXES[self.splits[0]]}/{self.objective.metric}"

    @property
    def last_step(self) -> int:
        """The update of the last row; 0 without rows."""
        return int(self.rows[-1][STEP]) if self.rows else 0

    @property
    def global_step(self) -> int:
        """How many updates the run has made, as far as its files say.

        A run that stops between two log lines states its last update in `status.json` alone. A
        killed run leaves an older `status.json`, and its rows are newer.
        """
        return max(self.last_step, self.status_step)

    def values(self, metric: str) -> list[float]:
        """Return a metric's values in the rows, in order. Rows without the metric are left out."""
        return [row[metric] for row in self.rows if metric in row]


def chartable_numbers(values: Mapping[str, object]) -> dict[str, float]:
    """Return the values that are numbers and that a chart can show: no NaN, nothing too large.

    Integers from `MAX_INTEGER` on become floats.
    """
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if is_number(value) and abs(value) < TOO_LARGE:
            numbers[name] = value if abs(value) < MAX_INTEGER else float(value)
    return numbers


def merge_rows(rows: Iterable[Mapping[str, object]]) -> list[dict[str, float]]:
    """Return one row for each step, in order.

    A resumed run may log a step again; the later values replace the earlier ones.
    """
    merged: defaultdict[float, dict[str, float]] = defaultdict(dict)
    for row in map(chartable_numbers, rows):
        if STEP in row:
            merged[row[STEP]] |= row
    return [merged[step] for step in sorted(merged)]
