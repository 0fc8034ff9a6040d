"""Read runs that W&B stores: from its offline folders, or from its server.

Projects at W&B are read through the public `Api` of wandb 0.31. This has been tested only with a
stand-in for the API.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from common.errors import UserError
from common.failures.outcomes import RunStatus
from common.failures.sentences import as_user_error
from common.metric_names import STEP, TOTAL_SECONDS
from common.objective import Objective
from common.run_directory.record_files import parse_record
from common.run_directory.records import RunConfig
from common.run_directory.stored_run import parsed_objective
from common.tools.compare.readers.run_record import RunRecord, chartable_numbers, merge_rows
from common.track.flat_config import nested_facts

# Seconds for the command that reads an offline folder. It takes a few, except for huge files.
INSPECTION_SECONDS = 300.0
# The status of a run, by W&B's word for it. Other words, such as "crashed", are failures.
STATUS_BY_WANDB_STATE: dict[str, RunStatus] = {
    "finished": "finished",
    "running": "running",
    "preempted": "preempted",
}


def read_offline(file: Path) -> RunRecord:
    """Read a run from the file `*.wandb` in W&B's folder `wandb/offline-run-*`.

    Raises:
        UserError: W&B's command can't read the file, or the run is not one of these recipes.
    """
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
    try:
        completed = subprocess.run(
            command, capture_output=True, encoding="utf-8", timeout=INSPECTION_SECONDS
        )
    except subprocess.TimeoutExpired:
        reason = f"wandb has not read it within {INSPECTION_SECONDS:g} seconds"
    else:
        if completed.returncode == 0 and completed.stdout.strip():
            return completed.stdout
        lines = completed.stderr.strip().splitlines() or ["wandb prints nothing about it"]
        reason = lines[-1]
    raise UserError(
        f"{file} can't be read as a W&B run ({reason})",
        advice="copy the file again from its source, update wandb, or leave this run out",
    )


@contextmanager
def using_wandb(problem: str, advice: str) -> Iterator[None]:
    """Turn errors of W&B in the block into a `UserError`.

    Before the block, such an error is raised if W&B can't go online: by `WANDB_MODE`, without an
    API key, or because the server does not answer.

    Args:
        problem: the beginning of the message, which the cause follows in brackets.
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
        UserError: W&B does not return the runs, the project has no runs of these recipes, or the
            configuration of such a run can't be read.
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
    saved_config, objective = parse_saved_config(config, source)
    status, reason = status_of(state, rows, has_summary=bool(final_summary))
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


def status_of(
    state: str, rows: Sequence[Mapping[str, float]], *, has_summary: bool
) -> tuple[RunStatus, str | None]:
    """Return a run's status, and the reason for it if one is known.

    Args:
        state: W&B's word for the status.
        rows: the run's rows, in order. A reason names the update of the last one.
        has_summary: whether the run has written its summary, as it does at its end.
    """
    status = STATUS_BY_WANDB_STATE.get(state, "failed")
    # W&B also says "finished" of a run that saved itself and stopped before its end.
    if status == "finished" and not has_summary:
        return "preempted", "its summary was never written"
    if status == "failed":
        return "failed", f"W&B calls it {state} after update {rows[-1][STEP] if rows else 0:g}"
    return status, None


def parse_saved_config(config: Mapping[str, object], source: str) -> tuple[RunConfig, Objective]:
    """Return a run's configuration and objective, from the flags and facts at W&B.

    Args:
        config: the flags and facts, flat: one value for each name.
        source: the run's folder, or its address at W&B, for a message.

    Raises:
        UserError: they are not those of a run of these recipes.
    """
    try:
        saved_config = parse_record(nested_facts(config), RunConfig, source)
        return saved_config, parsed_objective(saved_config, source)
    except UserError as error:  # a run at W&B has no file that could be restored
        advice = "leave this run out: pass the other runs of its project one by one"
        raise UserError(f"the configuration of {error.problem}", advice=advice) from None
