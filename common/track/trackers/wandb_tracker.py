"""The tracker that shows a run at W&B, online or offline."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from accelerate.tracking import filter_trackers

from common.data.dataset import Data
from common.data.loader import Loader
from common.measure.memory_plan import MemoryRows
from common.measure.value_checks import Metrics
from common.metric_names import STEP, TRAINING_LOSS
from common.objective import EVALUATED_SPLITS, PREFIXES, Objective
from common.system.platforms.commands import quoted, shown_path
from common.system.printable import with_restored_letters
from common.track.flat_config import flat_columns
from common.track.names import SPLITS
from common.track.recorded_media import HistogramEntry, ImagesEntry, MediaEntry, TableEntry
from common.track.trackers import wandb_panels
from common.track.trackers.tracker import Command, TrackedRun, Tracker
from common.track.trackers.wandb_environment import wandb_folder, wandb_mode
from common.track.trackers.wandb_service import MAX_SECONDS_TO_FINISH, ServiceWatch

if TYPE_CHECKING:  # a run imports only its own tracker
    import wandb
    from wandb import Run as WandbRun

MAX_TAG_LENGTH = 64  # characters; W&B refuses a run with a longer tag


class WandbTracker(Tracker):
    """A run at W&B, on rank 0, started through Accelerate: `accelerator.get_tracker` returns it.

    The run is online or offline, as `start_wandb` decides. Rows that a kill lost are logged again.
    """

    def __init__(self, run: TrackedRun) -> None:
        # W&B's own error reports print, and can delay the end of a run.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        # W&B stages its uploads in the run's directory, next to its other files.
        staging_folder = Path(os.environ.get("WANDB_DIR") or run.directory, "wandb")
        os.environ.setdefault("WANDB_DATA_DIR", str(staging_folder.absolute()))
        mode, reason = start_wandb(run)
        self.objective = Objective.parse(run.saved_config.objective)
        self.best: float | None = None  # the objective's best value on validation data so far
        # The prefix of the split that is evaluated during training: validation, or else test.
        sizes = run.saved_config.data.sizes
        prefix = next(PREFIXES[split] for split in EVALUATED_SPLITS if split in sizes)
        # A metric without a slash in its name belongs to no section, and W&B shows it before all
        # sections. So the most important metrics are logged under such names as well.
        self.top_names = {
            f"{prefix}/{self.objective.metric}": f"{self.objective.metric}_{prefix}",
            TRAINING_LOSS: "loss_train",
            f"{prefix}/loss": f"loss_{prefix}",
        }
        self.service = ServiceWatch()
        with self.limited():
            self.wandb_run: WandbRun = run.accelerator.get_tracker("wandb", unwrap=True)
            self.wandb_run.config.update(flat_columns(run.saved_config), allow_val_change=True)
            self.define_metrics()
            self.restore_rows(run.earlier_rows)
        self.shown_at = f"W&B {mode} ({reason}), and metrics.jsonl"
        folder = quoted(shown_path(Path(self.wandb_run.dir).parent))
        self.commands: list[Command] = []
        if self.wandb_run.offline:
            self.commands.append(Command("view", f"wandb leet {folder}"))
            self.commands.append(Command("upload", f"wandb sync {folder}"))
        elif self.wandb_run.url:
            self.commands.append(Command("view", self.wandb_run.url))

    def limited(self) -> contextlib.AbstractContextManager[None]:
        """Limit the time that the calls in a block may wait for W&B's service."""
        return self.service.limited()

    def define_metrics(self) -> None:
        """Define how W&B shows the metrics."""
        self.wandb_run.define_metric("*", step_metric=STEP)  # the x-axis of every chart
        for name in (STEP, "progress/*", "time/*", *(f"{split}/count" for split in SPLITS)):
            self.wandb_run.define_metric(name, hidden=True)  # such metrics make no useful charts

    def restore_rows(self, earlier_rows: Sequence[Mapping[str, float]]) -> None:
        """Log once more the earlier rows that W&B lost, and find the best value of the others."""
        for row in earlier_rows:
            if row[STEP] >= self.wandb_run.step:  # the next step that W&B expects
                self.log(row)
            else:
                self.note_best(row)

    def log(self, row: Mapping[str, float]) -> None:
        top_values = {
            top_name: row[name] for name, top_name in self.top_names.items() if name in row
        }
        with self.limited():
            # Commit at once. Otherwise W&B would write the last row after the summary, and replace
            # it.
            self.wandb_run.log({**top_values, **row}, step=int(row[STEP]), commit=True)
            self.note_best(row)

    def note_best(self, row: Mapping[str, float]) -> None:
        """Keep the objective's best value so far in W&B's summary, as `summary.json` names it.

        Until the run ends, W&B itself keeps only the latest value there. Sweeps use the best.
        """
        value = row.get(self.objective.validation_key)
        if value is None:
            return
        self.best = self.objective.best([self.best, value])
        if self.best is not None:  # None: no value so far is a number
            self.wandb_run.summary[self.objective.best_key] = self.best

    @property
    def native(self) -> "WandbRun":
        """W&B's own object, which a recipe gets as `run.tracker`."""
        return self.wandb_run

    def log_media(self, entry: MediaEntry) -> None:
        import wandb

        panel: wandb.Table | wandb.Histogram | list[wandb.Image] | None = None
        if isinstance(entry, ImagesEntry):
            captions = entry.captions or [file.stem for file in entry.files]
            pairs = zip(entry.files, captions, strict=True)
            panel = [wandb.Image(str(file), caption=caption) for file, caption in pairs]
        elif isinstance(entry, TableEntry):
            panel = wandb.Table(columns=[*entry.columns], data=entry.rows, allow_mixed_types=True)
            wandb_panels.keep_in_run(self.wandb_run, entry.name, panel, entry.step)
        elif isinstance(entry, HistogramEntry):
            histogram = (np.array(entry.counts), np.array(entry.edges))
            panel = wandb.Histogram(np_histogram=histogram)
        # Do not commit: the metrics of the same step follow, and belong to the same row.
        with self.limited():
            self.wandb_run.log({entry.name: panel, STEP: entry.step}, step=entry.step, commit=False)

    def log_line(self, line: str) -> None:
        with self.limited():
            self.wandb_run.write_logs(line)

    def log_results(
        self, evaluation: Metrics, prefix: str, loader: Loader, data: Data, memory: MemoryRows
    ) -> None:
        with self.limited():
            wandb_panels.show_results(self.wandb_run, evaluation, prefix, loader, data, memory)

    def log_profile(self, folder: Path, verdict: str) -> None:
        with self.limited():
            wandb_panels.upload_profile(self.wandb_run, folder, verdict)

    def log_model(self, folder: Path) -> None:
        with self.limited():
            wandb_panels.upload_artifact(self.wandb_run, folder, "model")

    def finish(self, summary: Mapping[str, float], exit_code: int) -> None:
        """Close the run, and replace the summary that W&B made of the last row."""
        with self.service.limited(MAX_SECONDS_TO_FINISH):
            self.wandb_run.summary.update(dict(summary))
            self.wandb_run.finish(exit_code=exit_code)


def start_wandb(run: TrackedRun) -> tuple[str, str]:
    """Start a W&B run through Accelerate, in the mode of `wandb_mode`.

    If that fails, for example because the server refuses the run, start it offline.

    Returns:
        The mode in which it was started, and the reason for it.
    """
    import wandb

    mode, reason = wandb_mode()
    arguments = {**init_arguments(run), "mode": mode, "settings": private_settings()}
    accelerator = run.accelerator
    project = run.config.project
    accelerator.log_with = filter_trackers(["wandb"])
    try:
        accelerator.init_trackers(project, None, {"wandb": arguments})
    except Exception as problem:
        accelerator.trackers.clear()
        wandb.teardown()  # the failed attempt would keep the run's id in use
        mode = "offline"
        reason = f"the server refused: {type(problem).__name__}"
        accelerator.init_trackers(project, None, {"wandb": {**arguments, "mode": mode}})
    return mode, reason


def init_arguments(run: TrackedRun) -> dict[str, object]:
    """Return the arguments of `wandb.init`, from flags and `WANDB_*` variables.

    A flag takes precedence over its variable. Tags are joined, and the job type has no flag.
    """
    config = run.config
    variable = os.environ.get
    default_job_type = "evaluate" if config.evaluate_only else "train"
    tags = [*run.tags, *variable("WANDB_TAGS", "").split(",")]
    return {
        "id": run.saved_config.wandb_run_id,
        "resume": "allow",
        "name": with_restored_letters(
            config.run_name or variable("WANDB_NAME") or run.directory.name
        ),
        "dir": wandb_folder(run.directory),
        "group": config.group or variable("WANDB_RUN_GROUP"),
        "job_type": variable("WANDB_JOB_TYPE") or default_job_type,
        "notes": config.notes or variable("WANDB_NOTES"),
        "tags": short_tags(tags),
    }


def private_settings() -> "wandb.Settings":
    """Return the settings of the W&B run, which print nothing and send nothing private."""
    import wandb

    return wandb.Settings(
        silent=True,
        # W&B would store every redrawing of a progress bar. The run keeps whole lines itself.
        console="off",
        init_timeout=20,  # seconds
        # Upload no command line, which may contain a token, and no code or git remotes.
        x_disable_meta=True,
        save_code=False,
        disable_git=True,
        disable_code=True,
    )


def short_tags(tags: Sequence[str]) -> list[str]:
    """Return the tags in a form that W&B accepts: shortened, without empty or repeated tags."""
    shortened = [with_restored_letters(tag).strip()[:MAX_TAG_LENGTH] for tag in tags if tag.strip()]
    return list(dict.fromkeys(shortened))
