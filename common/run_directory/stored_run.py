"""Reads the files of a stored run, and says which of them is missing, damaged or edited."""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from common.errors import UserError
from common.metric_names import STEP
from common.objective import Objective
from common.run_directory.identity import edited_config_error
from common.run_directory.record_files import (
    damaged_record_error,
    parse_record,
    read_record,
    read_record_if_there,
)
from common.run_directory.records import (
    CONFIG,
    METRICS_FILE,
    STATUS,
    SUMMARY,
    MetricsRow,
    RunConfig,
    Status,
    Summary,
)
from common.run_directory.status import current_status, stopped_if_killed
from common.storage.json_files import JsonObject, read_json, read_lines
from common.system.wording import counted

# The advice for a damaged file. It suits `--resume` and all tools that take a run.
ADVICE_IF_DAMAGED = "restore it from a backup, or pass another run"


@dataclass(frozen=True)
class StoredRun:
    """The files in a run's directory.

    Each file is read when it is first needed, and then kept. A run that is still training writes
    more later, so construct another object to see its later state.

    A file that is damaged, or that must not be missing, is a `UserError` with its path. A resume
    and the supervisors of a run must go on with a damaged `status.json`: they use `read_status`.
    """

    directory: Path

    @cached_property
    def config_contents(self) -> JsonObject:
        """The JSON object in `config.json`. Its digest belongs to exactly these contents.

        It is a `UserError` if the directory does not hold a run that began to train.
        """
        path = self.directory / CONFIG
        if not os.path.exists(path):
            require_begun(self)
        return read_json(path, ADVICE_IF_DAMAGED)

    @cached_property
    def saved_config(self) -> RunConfig:
        """The contents of `config.json` as a record."""
        path = self.directory / CONFIG
        return parse_record(self.config_contents, RunConfig, str(path), ADVICE_IF_DAMAGED)

    @cached_property
    def edited_config_error(self) -> UserError | None:
        """The error if `config.json` was edited or is another run's; None if the run wrote it."""
        return edited_config_error(self.directory, self.config_contents)

    @cached_property
    def objective(self) -> Objective:
        """The objective, which `config.json` has as a text."""
        return parsed_objective(self.saved_config, str(self.directory / CONFIG))

    @cached_property
    def status(self) -> Status:
        """The contents of `status.json`; an unknown status without the file.

        The status is ``stopped`` if the job was killed: see `current_status`.
        """
        path = self.directory / STATUS
        saved_status = read_record_if_there(path, Status, ADVICE_IF_DAMAGED) or Status()
        return stopped_if_killed(saved_status, self.directory)

    @cached_property
    def is_complete(self) -> bool:
        """Whether the run was trained to its end, even if it missed its target.

        A run that missed its target has the status "failed", and a summary.
        """
        has_summary = (self.directory / SUMMARY).exists()
        return self.status.status in ("finished", "failed") and has_summary

    @cached_property
    def summary(self) -> Summary:
        """The contents of `summary.json`; empty unless the run is complete.

        The file of any other run may be outdated: a run that missed its target ended with a
        summary, and may have gone on since.
        """
        if not self.is_complete:
            return Summary()
        return read_record(self.directory / SUMMARY, Summary, ADVICE_IF_DAMAGED)

    @cached_property
    def rows(self) -> list[MetricsRow]:
        """The rows of `metrics.jsonl`, in the order of the file; empty without the file.

        A last line that is only half written is left out.
        """
        return read_lines(self.directory / METRICS_FILE, STEP)


def parsed_objective(saved_config: RunConfig, source: str) -> Objective:
    """Return the objective in the contents of a `config.json`.

    Args:
        source: the path of the file, or the address of the run, for a message.

    Raises:
        UserError: the text of the objective is damaged.
    """
    try:
        return Objective.parse(saved_config.objective)
    except UserError as error:
        raise damaged_record_error(source, error.problem, ADVICE_IF_DAMAGED) from None


def require_begun(run: StoredRun) -> None:
    """Raise a `UserError` if a directory is not that of a run, or its training has not begun.

    The directory has no `config.json`, which a run writes before its first update. If the run has
    trained nevertheless, the file was lost, and there is no error.
    """
    directory = run.directory
    # This status is unknown if its file is damaged. The missing `config.json` matters more.
    current = current_status(directory)
    status = current.status
    if (directory / METRICS_FILE).exists() or status == "finished":
        return
    if status != "unknown":
        reason = f": {current.reason}" if current.reason else ""
        advice = "repeat the command that started it, or pass another run"
        if status == "running":
            advice = "wait until it has begun, or pass another run"
        raise UserError(
            f"the run in {directory} has not begun to train ({status}{reason})", advice=advice
        )
    runs_inside = sorted(directory.glob(f"*/{CONFIG}"))
    if runs_inside:
        raise UserError(
            f"{directory} is a folder of {counted(len(runs_inside), 'run')}, not a run itself",
            advice=(
                f"pass a run in it, such as {runs_inside[0].parent} (recipes compare also takes "
                f"several: {directory}/*/)"
            ),
        )
    raise UserError(
        f"{directory} is not the directory of a run, because it contains no {CONFIG}",
        advice="pass the directory of a run, such as runs/NAME",
    )
