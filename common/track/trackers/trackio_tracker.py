"""The tracker that writes to trackio's folder, whose dashboard shows runs on this machine."""

import contextlib
import io
import json
import os
import sqlite3
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import huggingface_hub.constants
import numpy as np
from accelerate import tracking

from common.console import warn
from common.metric_names import STEP
from common.system.platforms.commands import quoted
from common.system.printable import with_restored_letters
from common.track.flat_config import flat_columns
from common.track.recorded_media import HistogramEntry, ImagesEntry, MediaEntry, TableEntry
from common.track.trackers.tracker import (
    Command,
    TrackedRun,
    Tracker,
    TrackerMissingError,
    TrackerSettingsError,
)

if TYPE_CHECKING:  # a run imports only its own tracker
    import trackio

INSTALL = 'pip install "trackio>=0.43"'
REMOTE_VARIABLES = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")  # they would send a run elsewhere
LOCK_SECONDS = 30.0  # seconds to wait while another process writes to the database


class TrackioTracker(Tracker):
    """A run in trackio's folder on this machine, on rank 0, started through Accelerate.

    Nothing is sent over a network. After a resume, the run has the rows of `metrics.jsonl`: rows
    that a kill lost are logged again, and rows that the resumed run will repeat are removed.
    """

    def __init__(self, run: TrackedRun) -> None:
        self.trackio = import_trackio()
        folder = Path(self.trackio.TRACKIO_DIR)
        require_writable(folder)
        # On a network file system, trackio leaves new rows in an inbox. Its dashboard moves them to
        # the database. Move them here as well, to see which rows there are.
        self.trackio.fragments.import_inbox_dir()
        config = run.config
        name = with_restored_letters(config.run_name or run.directory.name)
        arguments = {
            "name": self.unused_name(config.project, name, run.saved_config.run_id),
            "group": config.group,
            "config": configuration(run),
            "resume": "allow",
            "embed": False,  # open no dashboard in a notebook
            "auto_log_cpu": False,  # the rows have such figures already
            "auto_log_gpu": False,
        }
        self.accelerator = run.accelerator
        self.accelerator.log_with = [tracking.TrackioTracker(config.project, **arguments)]
        with without_network(), as_own_warnings(), silence():
            self.accelerator.init_trackers(config.project)
        self.restore_rows(config.project, run.earlier_rows, run.step)
        self.shown_at = f"trackio's folder {folder}, and metrics.jsonl"
        self.commands = [Command("view", f"trackio show --project {quoted(config.project)}")]

    def unused_name(self, project: str, name: str, run_id: str | None) -> str:
        """Return the run's name, or the name with the run's id if another run has the name.

        trackio continues the newest run that has the name. The id in that run's configuration shows
        whether it is this run.
        """
        runs = self.trackio.Api().runs(project) if self.database(project).exists() else ()
        same_name = [run for run in runs if run.name == name]
        if not same_name:
            return name
        newest = same_name[-1]
        is_this_run = (newest.config or {}).get("run_id") == run_id
        return name if is_this_run else f"{name}-{run_id}"

    def database(self, project: str) -> Path:
        """Return the SQLite file with the rows of a project's runs."""
        return Path(self.trackio.sqlite_storage.SQLiteStorage.get_project_db_path(project))

    def restore_rows(
        self, project: str, earlier_rows: Sequence[Mapping[str, float]], step: int
    ) -> None:
        """Make trackio's rows of this run the same as `earlier_rows`, after a kill at any time.

        Rows from `step` on are removed, because the resumed run repeats them. trackio's own
        interface can only add rows, so this method removes them from the database.

        Raises:
            sqlite3.Error: another version of trackio keeps its rows in another form.
        """
        path = self.database(project)
        stored_steps: set[int] = set()
        if path.exists():
            with contextlib.closing(sqlite3.connect(path, timeout=LOCK_SECONDS)) as connection:
                with connection:
                    connection.execute(
                        "DELETE FROM metrics WHERE run_id = ? AND step >= ?", (self.native.id, step)
                    )
                rows = connection.execute(
                    "SELECT step, metrics FROM metrics WHERE run_id = ?", (self.native.id,)
                )
                # Images, tables and histograms have rows of their own, which lack the metric `STEP`
                # and do not count here.
                stored_steps = {row_step for row_step, row in rows if STEP in json.loads(row)}
        for row in earlier_rows:
            if row[STEP] not in stored_steps:
                self.log(row)

    def log(self, row: Mapping[str, float]) -> None:
        """Queue a row of metrics; trackio's thread writes it within half a second."""
        self.accelerator.log(dict(row), step=int(row[STEP]))

    @property
    def native(self) -> "trackio.Run":
        """trackio's own object, which a recipe gets as `run.tracker`."""
        return self.accelerator.get_tracker("trackio", unwrap=True)

    def log_media(self, entry: MediaEntry) -> None:
        media: dict[str, object] = {}
        if isinstance(entry, ImagesEntry):
            captions = entry.captions or [file.stem for file in entry.files]
            for number, (file, caption) in enumerate(zip(entry.files, captions, strict=True)):
                # trackio takes no lists of images.
                media[f"{entry.name}/{number}"] = self.trackio.Image(str(file), caption=caption)
        elif isinstance(entry, TableEntry):
            media[entry.name] = self.trackio.Table(columns=[*entry.columns], data=entry.rows)
        elif isinstance(entry, HistogramEntry):
            histogram = (np.array(entry.counts), np.array(entry.edges))
            media[entry.name] = self.trackio.Histogram(np_histogram=histogram)
        self.native.log(media, step=entry.step)

    def finish(self, summary: Mapping[str, float], exit_code: int) -> None:
        """Wait until all rows are written; trackio gets no summary."""
        with silence():
            self.accelerator.end_training()
            self.trackio.finish()  # otherwise trackio would finish again, and print, at the exit


def import_trackio() -> ModuleType:
    """Import trackio, with those of its modules that are used here.

    Raises:
        TrackerMissingError: trackio is not installed.
    """
    try:
        import trackio
        import trackio.fragments
        import trackio.sqlite_storage
    except ModuleNotFoundError as problem:
        if problem.name != "trackio":  # trackio is there, but lacks a module that it needs
            raise
        raise TrackerMissingError("trackio is not installed", f"run {INSTALL}") from None
    return trackio


def configuration(run: TrackedRun) -> dict[str, object]:
    """Return the run's flags and facts, with its tags and notes, for which trackio has no place."""
    return {**flat_columns(run.saved_config), "tags": run.tags, "notes": run.config.notes}


def require_writable(folder: Path) -> None:
    """Raise a `TrackerSettingsError` if trackio can't write to its folder.

    trackio's own thread would lose the rows with a warning.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as problem:
        raise TrackerSettingsError(
            f"trackio's folder {folder} can't be written ({problem.strerror})",
            "set TRACKIO_DIR to a folder that can be written",
        ) from None


@contextlib.contextmanager
def without_network() -> Iterator[None]:
    """Keep trackio on this machine while it starts a run.

    Otherwise trackio would ask the Hub for the name of a user who is logged in, and send the run to
    the Space or server that an environment variable names.
    """
    ignored = {name: os.environ.pop(name) for name in REMOTE_VARIABLES if os.environ.get(name)}
    for name in ignored:
        warn(f"{name} is ignored, because recipes track runs with trackio on this machine only")
    was_offline = huggingface_hub.constants.HF_HUB_OFFLINE
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        huggingface_hub.constants.HF_HUB_OFFLINE = was_offline
        os.environ.update(ignored)


@contextlib.contextmanager
def as_own_warnings() -> Iterator[None]:
    """Print the warnings of the calls in a block as this run's warnings, without file and line."""
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)  # the class of trackio's warnings
        yield
    for warning in recorded:
        warn(str(warning.message))


def silence() -> contextlib.AbstractContextManager[object]:
    """Drop the output of the calls in a block; the run itself says what a user must know."""
    return contextlib.redirect_stdout(io.StringIO())
