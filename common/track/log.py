"""The rows of a run, one for each step: in `metrics.jsonl`, at a tracker, on the terminal.

It also copies the printed lines to `output.log`. Their texts are composed in `common.track.report`.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Self, TextIO

from accelerate import Accelerator

from common.config import TrainingConfig
from common.console import say, warn
from common.console.display import DISPLAY
from common.console.messages import LINE_LISTENERS
from common.errors import TrainingError
from common.failures.disk_errors import advice_for, is_disk_error
from common.failures.sentences import cause_text
from common.measure.sums import Evaluation
from common.metric_names import EPOCH, STEP
from common.objective import PREFIXES, Split
from common.run_directory.records import METRICS_FILE, RunConfig
from common.storage.files import open_to_append, write_text
from common.storage.json_files import json_safe, read_lines
from common.system.platforms.commands import quoted
from common.track import report
from common.track.pending_row import PendingRow
from common.track.recorded_media import RecordedMedia
from common.track.trackers import TRACKERS
from common.track.trackers.tracker import Command, TrackedRun, Tracker, TrackerUnavailableError


class PrintedEvaluation(NamedTuple):
    """The key of an evaluation, so that none is printed twice."""

    split: Split
    step: float
    values: tuple[tuple[str, float | None], ...]  # names and values; None for NaN (NaN != NaN)

    @classmethod
    def of(cls, split: Split, step: float, values: Evaluation) -> Self:
        return cls(split, step, tuple(json_safe(values).items()))


def no_figures() -> Mapping[str, float]:
    """Return no figures, in place of the position of a run that has not started."""
    return {}


class Log:
    """Writes the row of each step, and prints the lines of a run.

    The row is collected in a `PendingRow`, which says when a step is over.

    All ranks make the calls, and rank 0 alone writes. A failing tracker never stops a run.
    """

    def __init__(self, accelerator: Accelerator, directory: Path) -> None:
        self.accelerator = accelerator
        self.directory = directory
        self.tracker: Tracker | None = None  # None: there is no tracker, or it has failed
        self.media = RecordedMedia(directory, accelerator.is_main_process)
        self.metrics_file: TextIO | None = None
        self.output_file: TextIO | None = None
        self.early_lines: list[str] = []  # printed before `start`, which opens the file for them
        if accelerator.is_main_process:
            LINE_LISTENERS.append(self.keep_line)
        # Returns where training is now, as figures by name. `start` sets it.
        self.current_position: Callable[[], Mapping[str, float]] = no_figures
        self.is_training_run = True  # False with `--evaluate-only`; `start` sets it
        self.pending_row = PendingRow()
        self.printed_evaluations: set[PrintedEvaluation] = set()

    def start(
        self,
        config: TrainingConfig,
        run_config: RunConfig,
        current_position: Callable[[], Mapping[str, float]],
    ) -> None:
        """Open the files and the tracker, print the plan of the run, and begin to show progress.

        A resumed run repeats the current step and later steps, so their rows are removed from
        `metrics.jsonl`.

        Args:
            current_position: returns where training is now, as figures by name: the step, the
                epoch and so on.
        """
        self.current_position = current_position
        self.is_training_run = not config.evaluate_only
        step = int(current_position()[STEP])
        if self.accelerator.is_main_process:
            path = self.directory / METRICS_FILE
            if step > 0 and not path.exists():
                warn(
                    f"{path} is missing, so the rows of the first {step:,} updates are lost: to "
                    "keep them, stop the run, restore the file from a backup, and resume again"
                )
            rows = [row for row in read_lines(path, STEP, warn) if row[STEP] < step]
            write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
            self.metrics_file = open_to_append(path)
            tracker_class = TRACKERS.get(config.tracker)
            if tracker_class is not None:
                run = TrackedRun(self.accelerator, config, run_config, self.directory, rows, step)
                with self.tracking():
                    self.tracker = tracker_class(run)
            self.output_file = open_to_append(path.with_name("output.log"))
            for line in self.early_lines:
                self.keep_line(line)
            self.early_lines.clear()
        shown_at = self.tracker.shown_at if self.tracker is not None else "metrics.jsonl only"
        report.show_plan(run_config, f"{self.directory}; {shown_at}")
        DISPLAY.start(run_config.plan.total_steps, self.step_and_epoch)

    @contextlib.contextmanager
    def tracking(self) -> Iterator[None]:
        """Run a block that uses the tracker, and go on without the tracker if it fails."""
        try:
            yield
        except TrackerUnavailableError as problem:
            self.tracker = None
            warn(
                f"metrics are written to metrics.jsonl only and not to a tracker, because {problem}"
            )
        except Exception as problem:
            self.tracker = None
            warn(
                f"the tracker failed ({cause_text(problem)}), so from now on metrics are written "
                "to metrics.jsonl only"
            )

    def add_interval(self, values: Mapping[str, float]) -> None:
        """Add the training figures of a log interval to the row, and show them."""
        self.add(values)
        DISPLAY.show_interval(report.progress_line_text(self.pending_row.figures))

    def step_and_epoch(self) -> tuple[int, float]:
        """Return the current update and epoch, for the display."""
        figures = self.current_position()
        return int(figures[STEP]), figures[EPOCH]

    def add_evaluation(
        self,
        values: Evaluation,
        split: Split,
        is_best: bool,
        model_position: Mapping[str, float] | None = None,
    ) -> None:
        """Add an evaluation to the row, and print it unless it was printed before.

        Args:
            values: the figures of the evaluation, as `checked_figures` returns them.
            is_best: whether the evaluation is the best on validation data so far.
            model_position: the position figures of the evaluated model; None if it is from the
                current step. The figures of a model from an earlier step are not added to a row
                that already has figures of the current model on the same split.
        """
        current_position = self.current_position()
        model_position = model_position or current_position
        # Where validation data stand in for test data, the final evaluation repeats an earlier one.
        evaluation = PrintedEvaluation.of(split, model_position[STEP], values)
        if evaluation not in self.printed_evaluations:
            self.printed_evaluations.add(evaluation)
            shown_position = model_position if self.is_training_run else None
            text = report.evaluation_text(values, split, shown_position)
            # A run that trains nothing has no other model to compare this one with.
            say(f"{text}  ★ best" if is_best and self.is_training_run else text)
        figures = {f"{PREFIXES[split]}/{name}": value for name, value in values.items()}
        is_current_model = model_position[STEP] == current_position[STEP]
        row_has_this_split = bool(figures.keys() & self.pending_row.figures.keys())
        if is_current_model or not row_has_this_split:
            self.add(figures)

    def add(self, values: Mapping[str, float]) -> None:
        """Add figures, and those of the current position, to the row of the current step."""
        self.pending_row.add({**values, **self.current_position()})

    def write_row(self) -> None:
        """Write the row of the step that is over: to the file and the tracker, with its media.

        Other ranks than 0 have no file, and drop their row.

        Raises:
            TrainingError: the row can't be written.
        """
        row = self.pending_row.take()
        if not row or self.metrics_file is None:
            return
        self.write_to_file(self.metrics_file, row)
        self.write_media()
        if self.tracker is not None:
            with self.tracking():
                self.tracker.log(row)

    def write_to_file(self, file: TextIO, row: Mapping[str, float]) -> None:
        """Add a row to `metrics.jsonl`.

        If that fails, the file is closed, and no further row is written to it.

        Raises:
            TrainingError: the row can't be written.
        """
        try:
            file.write(json.dumps(json_safe(row)) + "\n")
            file.flush()
        except OSError as problem:
            with contextlib.suppress(OSError):  # `close` flushes again, and fails again
                file.close()
            self.metrics_file = None
            disk_advice = advice_for(str(problem), problem.errno)
            advice = f"{disk_advice}, then continue with --resume {quoted(self.directory)}"
            raise TrainingError(
                f"{self.directory}/{METRICS_FILE} can't be written ({problem})",
                advice=advice,
                resumable=is_disk_error(problem),
            ) from None

    def send_to_tracker(self, send: Callable[[Tracker], None]) -> None:
        """Let `send` send more than rows, such as the model, to the tracker, if there is one.

        A failure leads to a warning, and the tracker stays in use.
        """
        if self.tracker is not None:
            try:
                send(self.tracker)
            except Exception as problem:
                warn(
                    "the tracker did not accept a file of this run, which stays in its directory "
                    f"({cause_text(problem)})"
                )

    def keep_line(self, line: str) -> None:
        """Copy a line of the terminal, without the progress bar, to `output.log` and the tracker.

        Before `start`, the line is kept for it. Any failure is ignored, because a warning about it
        would be another line to keep.
        """
        if self.output_file is None:
            self.early_lines.append(line)
            return
        with contextlib.suppress(Exception):
            print(line, file=self.output_file, flush=True)
            if self.tracker is not None:
                self.tracker.log_line(line)

    def write_media(self) -> None:
        """Write the images, tables and histograms that the recipe has logged since the last row."""
        self.media.write(None if self.tracker is None else self.tracker.log_media)

    def finish(
        self, summary: Mapping[str, float] | None = None, exit_code: int = 0
    ) -> list[Command]:
        """Close the files and the tracker; return how the user can view or upload the run.

        Args:
            summary: the figures for the tracker; by default, the latest values.
            exit_code: how the run ended, for the tracker: 0 unless it failed.
        """
        with contextlib.suppress(TrainingError):  # the disk may be full
            self.write_row()
        self.write_media()  # again, because `write_row` writes no media if it has no row
        if self.keep_line in LINE_LISTENERS:
            LINE_LISTENERS.remove(self.keep_line)
        for file in (self.metrics_file, self.output_file):
            if file is not None:
                # Lines that a full disk has refused are tried again here. Each row of metrics was
                # written, or its error raised, before.
                with contextlib.suppress(OSError):
                    file.close()
        self.metrics_file = None
        self.output_file = None
        tracker = self.tracker
        self.tracker = None
        if tracker is None:
            return []
        with self.tracking():
            tracker.finish(self.pending_row.latest if summary is None else summary, exit_code)
        return tracker.commands
