"""Read a run from its own directory."""

from pathlib import Path

from common.run_directory.records import CurrentStatus
from common.run_directory.stored_run import StoredRun
from common.tools.compare.readers.run_record import RunRecord, chartable_numbers, merge_rows


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
        status_step=saved_status.global_step,
    )
