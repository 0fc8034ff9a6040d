"""The tracker that writes event files for TensorBoard."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from accelerate.tracking import filter_trackers
from PIL import Image

from common.metric_names import STEP
from common.output.tables import markdown_table
from common.system.platforms.commands import quoted, shown_path
from common.track.recorded_media import HistogramEntry, ImagesEntry, MediaEntry, TableEntry
from common.track.trackers.tracker import Command, TrackedRun, Tracker, TrackerMissingError

if TYPE_CHECKING:  # a run imports only its own tracker
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardTracker(Tracker):
    """Event files in the run directory, on rank 0, written through Accelerate."""

    def __init__(self, run: TrackedRun) -> None:
        accelerator = run.accelerator
        accelerator.project_configuration.set_directories(str(run.directory))
        accelerator.log_with = filter_trackers(["tensorboard"], run.directory)
        accelerator.init_trackers("tensorboard")
        if not accelerator.trackers:  # Accelerate leaves out a tracker that is not installed
            raise TrackerMissingError("TensorBoard is not installed", "run pip install tensorboard")
        self.accelerator = accelerator
        self.shown_at = "TensorBoard, and metrics.jsonl"
        folder = quoted(shown_path(run.directory))
        self.commands = [Command("view", f"tensorboard --logdir {folder}")]

    @property
    def native(self) -> "SummaryWriter":
        """TensorBoard's own object, which a recipe gets as `run.tracker`."""
        return self.accelerator.get_tracker("tensorboard", unwrap=True)

    def log(self, row: Mapping[str, float]) -> None:
        self.accelerator.log(dict(row), step=int(row[STEP]))

    def log_media(self, entry: MediaEntry) -> None:
        writer = self.native
        if isinstance(entry, ImagesEntry):
            for number, file in enumerate(entry.files):
                with Image.open(file) as image:
                    pixels = np.asarray(image.convert("RGB"))
                caption = entry.captions[number] if entry.captions else number
                writer.add_image(f"{entry.name}/{caption}", pixels, entry.step, dataformats="HWC")
        elif isinstance(entry, TableEntry):
            table: list[Sequence[object]] = [entry.columns, *entry.rows]
            rows = [[str(cell) for cell in row] for row in table]
            writer.add_text(entry.name, "\n".join(markdown_table(rows)), entry.step)
        elif isinstance(entry, HistogramEntry):
            # TensorBoard takes values, not counts: repeat the middle of each bin.
            middles = (np.array(entry.edges[:-1]) + entry.edges[1:]) / 2
            values = np.repeat(middles, entry.counts)
            writer.add_histogram(entry.name, values, entry.step)

    def finish(self, summary: Mapping[str, float], exit_code: int) -> None:
        """Close the event files; TensorBoard gets no summary."""
        self.accelerator.end_training()
