"""Chooses the figures of two runs' rows that can be compared.

A training figure, such as the loss, is a mean since the previous log line. If two runs have their
log lines at different updates, such figures of a row cover different updates, and differ.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from common.objective import EVALUATION_PREFIXES
from common.run_directory.records import MetricsRow
from common.tools.reproduce.compared_run import ComparedRun
from common.tools.rows import CLOCK_PREFIXES

LOG_EVERY = "log_every"  # the flag that sets the log lines
PREFIXES_OF_OTHER_FIGURES = (*EVALUATION_PREFIXES, *CLOCK_PREFIXES, "progress/")


@dataclass(frozen=True)
class ComparableRows:
    """The rows of two runs, by update, with the figures that can be compared."""

    old: dict[int, MetricsRow]
    new: dict[int, MetricsRow]
    # The updates of the old run's rows whose training figures cover other updates in the new run.
    left_out: list[int]

    @property
    def common_steps(self) -> list[int]:
        """The updates for which both runs have a row, in order."""
        return [step for step in self.old if step in self.new]


def comparable_rows(old: ComparedRun, new: ComparedRun) -> ComparableRows:
    """Return the rows of two runs, without training figures that cover different updates.

    Runs with the same `--log-every` should have the same log lines, so all of their rows are
    compared, and a row that only one of them has counts as missing.
    """
    if not may_have_other_log_lines(old, new):
        return ComparableRows(old.rows, new.rows, left_out=[])
    old_intervals = starts_of_intervals(old.rows)
    new_intervals = starts_of_intervals(new.rows)
    same_intervals = {
        step for step, start in old_intervals.items() if new_intervals.get(step) == start
    }
    return ComparableRows(
        old=rows_within(old.rows, same_intervals),
        new=rows_within(new.rows, same_intervals),
        left_out=[step for step in old_intervals if step not in same_intervals],
    )


def may_have_other_log_lines(old: ComparedRun, new: ComparedRun) -> bool:
    """Return whether the runs differ in `--log-every`, or a resume of one of them changed it."""
    if old.saved_config.flags.get(LOG_EVERY) != new.saved_config.flags.get(LOG_EVERY):
        return True
    return any(LOG_EVERY in attempt.changed_flags for attempt in [*old.attempts, *new.attempts])


def starts_of_intervals(rows: Mapping[int, MetricsRow]) -> dict[int, int]:
    """Return the update after which the training figures of each log line begin.

    Args:
        rows: a run's rows by update, in order. Rows of an evaluation alone are no log lines.
    """
    starts = {}
    previous_step = 0
    for step, row in rows.items():
        if any(is_training_figure(name) for name in row):
            starts[step] = previous_step
            previous_step = step
    return starts


def is_training_figure(name: str) -> bool:
    """Return whether a figure is of the updates since the previous log line."""
    return not name.startswith(PREFIXES_OF_OTHER_FIGURES)


def rows_within(
    rows: Mapping[int, MetricsRow], same_intervals: Collection[int]
) -> dict[int, MetricsRow]:
    """Return a run's rows without the training figures that the other run can't have.

    Args:
        rows: the run's rows by update, in order.
        same_intervals: the updates of the log lines that cover the same updates in both runs. Other
            rows keep their figures of an evaluation, and are left out if they have none.
    """
    kept_rows = {}
    for step, row in rows.items():
        if step in same_intervals:
            kept_rows[step] = row
        elif any(name.startswith(EVALUATION_PREFIXES) for name in row):
            kept_rows[step] = {
                name: value for name, value in row.items() if not is_training_figure(name)
            }
    return kept_rows
