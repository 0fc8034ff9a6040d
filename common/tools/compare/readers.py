"""Read runs: from their own directories, from W&B's offline folders, or from W&B's server.

Projects at W&B are read through the public `Api` of wandb 0.31. This has been tested only with a
stand-in for the API.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from common.errors import UserError
from common.failures.outcomes import RunStatus
from common.failures.sentences import as_user_error
from common.metric_names import STEP, TOTAL_SECONDS
from common.objective import EVALUATED_SPLITS, PREFIXES, Objective, Split
from common.run_directory.records import (
    CurrentStatus,
    Flags,
    RunConfig,
    is_number,
    parse_record,
)
from common.run_directory.stored_run import StoredRun, parsed_objective
from common.track.flat_config import unflat

TOO_LARGE = 1e100  # a chart can't show larger values
# The status of a run, by W&B's word for it.
STATUS_BY_WANDB_STATE: dict[str, RunStatus] = {
    "finished": "finished",
    "running": "running",
    "preempted": "preempted",
}
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

    @property
    def flags(self) -> Flags:
        """The flags by name, with the value that the run chose instead of ``auto``."""
        return self.saved_config.flags

    @property
    def splits(self) -> tuple[Split, Split]:
        """The split that is evaluated during training, and the split of the final evaluation.

        Both are the same if the data has only one of validation and test. A run with neither has
        logged no evaluation, so it does not matter which split is named.
        """
        splits = [split for split in EVALUATED_SPLITS if split in self.saved_config.data.sizes]
        return (splits[0], splits[-1]) if splits else ("validation", "validation")

    @property
    def goal(self) -> str:
        """The name under which training logs the objective's metric, such as ``val/accuracy``."""
        return f"{PREFIXES[self.splits[0]]}/{self.objective.metric}"

    @property
    def last_step(self) -> int:
        """The update of the last row; 0 without rows."""
        return int(self.rows[-1][STEP]) if self.rows else 0

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


def read_runs(sources: Sequence[str]) -> list[RunRecord]:
    """Read runs from directories or W&B.

    Runs that share a name are called by their source instead.

    Raises:
        UserError: a source is not a run, or a file of the run is damaged.
    """
    runs = [run for source in sources for run in read_source(source)]
    uses = Counter(run.name for run in runs)
    return [replace(run, name=run.source) if uses[run.name] > 1 else run for run in runs]


def read_source(source: str) -> list[RunRecord]:
    """Read the run, or the runs of a project, that an argument of the command line names.

    Raises:
        UserError: the argument does not name a run, or a file of the run is damaged.
    """
    path = Path(os.path.expanduser(source))
    if os.path.isdir(path):
        # Only W&B's offline folders have a file with this suffix.
        files = sorted(path.glob("*.wandb"))
        return [read_offline(files[0]) if files else read_directory(path)]
    if path.suffix == ".wandb" and os.path.isfile(path):
        return [read_offline(path)]
    if os.path.exists(path):
        raise UserError(
            f"{source} is a file", advice="pass the directory of the run, such as runs/NAME"
        )
    if re.fullmatch(r"[\w.-]+/[\w.-]+(/[\w.-]+)?", source):
        return read_project(source)
    raise UserError(
        f"there is no folder {source}",
        advice=(
            "pass the directory of a run, such as runs/NAME, a folder wandb/offline-run-*, or "
            "ENTITY/PROJECT for a W&B project"
        ),
    )


def read_directory(path: Path) -> RunRecord:
    """Read the run in a directory.

    Raises:
        UserError: the directory does not hold a run that began to train, or a file is damaged.
    """
    run = StoredRun(path)
    # The status comes first. In the other order, a run could write its last rows and end in
    # between, and these rows would be missed.
    saved_status = run.status
    # Without a `status.json`, nothing says that the run has ended.
    status: CurrentStatus = "running"
    if saved_status.status != "unknown":
        status = saved_status.status
    return RunRecord(
        name=str(run.saved_config.flags.get("run_name") or path.resolve().name),
        source=str(path),
        saved_config=run.saved_config,
        objective=run.objective,
        rows=merge_rows(run.rows),
        summary=chartable_numbers(run.summary.figures),
        status=status,
        reason=saved_status.reason,
    )


def read_offline(file: Path) -> RunRecord:
    """Read a run from the file `*.wandb` in W&B's folder `wandb/offline-run-*`."""
    run = json.loads(inspect_offline(file, "--summary"))
    records = map(json.loads, inspect_offline(file).splitlines())
    history = (record["history"]["item"] for record in records if record["type"] == "history")
    name = str(run["name"] or run["run_id"])
    return record_of(name, str(file.parent), run["config"], history, run["summary"], run["state"])


def inspect_offline(file: Path, *flags: str) -> str:
    """Return the output of `wandb leet inspect` for a file; wandb 0.31 has no other reader.

    Raises:
        UserError: the command can't read the file.
    """
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *flags, str(file)]
    completed = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300)
    if completed.returncode or not completed.stdout.strip():
        lines = completed.stderr.strip().splitlines() or ["wandb prints nothing about it"]
        raise UserError(
            f"{file} can't be read as a W&B run ({lines[-1]})",
            advice="copy the file again from its source, update wandb, or leave this run out",
        )
    return completed.stdout


@contextmanager
def using_wandb(problem: str, advice: str) -> Iterator[None]:
    """Turn a missing API key, an unreachable server or a refusal by W&B into a `UserError`.

    If `WANDB_MODE` does not allow W&B to go online, that is such an error, too.

    Args:
        problem: the beginning of the message.
        advice: the advice of the message, unless the user must correct a `WANDB_*` variable.
    """
    import wandb

    from common.track.trackers.tracker import TrackerSettingsError
    from common.track.trackers.wandb_environment import wandb_mode

    with as_user_error((wandb.Error, ValueError, OSError), problem, advice, first_line=True):
        try:
            mode, reason = wandb_mode()
            if mode != "online" and os.environ.get("WANDB_MODE"):
                reason = f"WANDB_MODE is {mode}"
                advice = "unset WANDB_MODE, or set it to online"
            if mode != "online":
                raise UserError(f"{problem} ({reason})", advice=advice)
            yield
        except TrackerSettingsError as error:  # its message says what to do
            raise UserError(f"{problem} ({error.problem})", advice=error.advice) from None


def read_project(address: str) -> list[RunRecord]:
    """Read the runs of a W&B project, oldest first, or a single run.

    Args:
        address: ``entity/project``, or ``entity/project/run`` for a single run.

    Raises:
        UserError: W&B does not return the runs, or the project has no runs of these recipes.
    """
    import wandb

    advice = (
        "check the path; for a W&B project, check its name and log in with wandb login, or pass a "
        "folder wandb/offline-run-*, which needs no account"
    )
    with using_wandb(
        f"there is no folder {address}, and it can't be read as a W&B project", advice
    ):
        api = wandb.Api(timeout=20)
        is_single_run = address.count("/") == 2
        runs = [api.run(address)] if is_single_run else api.runs(address, order="+created_at")
        records = [
            record_of(
                run.name or run.id,
                "/".join(run.path),
                run.config,
                run.scan_history(),
                run.summary_metrics,
                run.state.lower(),
            )
            for run in runs
            if "objective" in run.config  # a project may hold other programs' runs
        ]
    if not records and is_single_run:
        raise UserError(
            f"the W&B run {address} is not a run of these recipes",
            advice="pass a run that a recipe has logged",
        )
    if not records:
        raise UserError(
            f"the W&B project {address} contains no runs of these recipes",
            advice="pass a project to which recipes have logged runs",
        )
    return records


def record_of(
    name: str,
    source: str,
    config: Mapping[str, object],
    history: Iterable[Mapping[str, object]],
    summary: Mapping[str, object],
    state: str,
) -> RunRecord:
    """Return the record of a run that W&B stores.

    Args:
        name: the run's name.
        source: the run's folder, or its address at W&B.
        config: the run's flags and facts, flat: one value for each name.
        history: the run's rows, in which W&B's own names are among the metrics.
        summary: W&B's latest values, which are the run's own summary only after its end.
        state: W&B's word for the run's status.

    Raises:
        UserError: W&B's flags and facts are not those of a run of these recipes.
    """
    # W&B's own names, such as _step, have no slash.
    rows_of_metrics = (
        {metric: value for metric, value in row.items() if "/" in metric} for row in history
    )
    rows = merge_rows(rows_of_metrics)
    # A run writes its total time only at its end. Without it, the values are not yet a summary.
    final_summary = chartable_numbers(summary) if TOTAL_SECONDS in summary else {}
    # Other states, such as "crashed" and "killed", are failures.
    status = STATUS_BY_WANDB_STATE.get(state, "failed")
    reason = None
    # W&B also says "finished" of a run that saved itself and stopped before its end.
    if status == "finished" and not final_summary:
        status = "preempted"
        reason = "its summary was never written"
    elif status == "failed":
        reason = f"W&B calls it {state} after update {rows[-1][STEP] if rows else 0:g}"
    try:
        saved_config = parse_record(unflat(config), RunConfig, source)
        objective = parsed_objective(saved_config, source)
    except UserError as error:  # a run at W&B has no file that could be restored
        advice = "leave this run out: pass the other runs of its project one by one"
        raise UserError(f"the configuration of {error.problem}", advice=advice) from None
    return RunRecord(
        name=name,
        source=source,
        saved_config=saved_config,
        objective=objective,
        rows=rows,
        summary=final_summary,
        status=status,
        reason=reason,
    )
