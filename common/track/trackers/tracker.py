"""The class that every tracker extends."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from accelerate import Accelerator

from common.config import TrainingConfig
from common.data.dataset import Data
from common.data.loader import Loader
from common.measure.memory_plan import MemoryRows
from common.measure.value_checks import Metrics
from common.run_directory.records import RunConfig
from common.track.names import precision_name
from common.track.recorded_media import MediaEntry


class Command(NamedTuple):
    """A command or address with which a user views or uploads a tracked run."""

    purpose: Literal["view", "upload"]
    text: str  # a line for the shell, or a URL


class TrackerUnavailableError(ValueError):
    """The tracker can't be used, for a reason that the user can fix.

    Training goes on without the tracker. A tool that needs the tracker raises a `UserError` with
    this problem and this advice.
    """

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__(f"{problem}: {advice}")
        self.problem = problem
        self.advice = advice


class TrackerSettingsError(TrackerUnavailableError):
    """An environment variable has a value that the tracker does not accept."""


class TrackerMissingError(TrackerUnavailableError):
    """The tracker's package is not installed."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker shows, as it is when the tracker starts."""

    accelerator: Accelerator
    config: TrainingConfig
    saved_config: RunConfig  # the contents of `config.json`
    directory: Path
    # The rows of `metrics.jsonl` before `step`. A tracker may lack some of them after a kill.
    earlier_rows: Sequence[Mapping[str, float]]
    step: int  # the current step, which a resumed run repeats

    @property
    def tags(self) -> list[str]:
        """The recipe, data set, precision and device of the run, and the user's own tags."""
        environment = self.saved_config.environment
        return [
            self.saved_config.recipe,
            self.saved_config.data.name,
            precision_name(environment.mixed_precision),
            "cpu" if environment.device_type == "cpu" else environment.device,
            *self.config.tags,
        ]


class Tracker(ABC):
    """Shows a run's metrics at a service or in a program. It exists on rank 0 only.

    Any method may raise any error. `Log` then prints a warning, and the training goes on.

    The methods that are not abstract are for things that few trackers can show. Unless a tracker
    overrides them, they do nothing; `noqa` tells ruff that this is intended.
    """

    shown_at: str  # where the run is shown, for the plan that a run prints
    commands: list[Command]  # how the user can view or upload the run after its end

    @abstractmethod
    def __init__(self, run: TrackedRun) -> None:
        """Start the run at the tracker, or continue it if an earlier attempt has started it.

        Raises:
            TrackerMissingError: the tracker's package is not installed.
            TrackerSettingsError: an environment variable or a folder can't be used.
        """

    @property
    @abstractmethod
    def native(self) -> object:
        """The tracker's own object, which a recipe gets as `run.tracker`."""

    @abstractmethod
    def log(self, row: Mapping[str, float]) -> None:
        """Log a row of metrics at its step, which is `row[STEP]`."""

    @abstractmethod
    def log_media(self, entry: MediaEntry) -> None:
        """Show images, a table or a histogram that a recipe has logged, at the entry's step."""

    @abstractmethod
    def finish(self, summary: Mapping[str, float], exit_code: int) -> None:
        """Close the run, when all rows are written.

        Args:
            summary: the contents of `summary.json`, or the latest figures of a run that failed.
            exit_code: 0 if the run succeeded.
        """

    def log_line(self, line: str) -> None:  # noqa: B027
        """Keep a line that the run prints on the terminal."""

    def log_results(  # noqa: B027
        self, evaluation: Metrics, prefix: str, loader: Loader, data: Data, memory: MemoryRows
    ) -> None:
        """Show more of the final evaluation than its figures, and the memory of each part.

        Args:
            evaluation: the final evaluation, of which `Classified` has more to show.
            prefix: the prefix of the split's metrics, "val" or "test".
            loader: the loader that the evaluation read.
            data: the data set that the recipe's `load_data` returned.
            memory: the planned and measured MiB of each part; empty if nothing was planned.
        """

    def log_profile(self, folder: Path, verdict: str) -> None:  # noqa: B027
        """Upload the files of a profile in `folder`, and show its verdict."""

    def log_model(self, folder: Path) -> None:  # noqa: B027
        """Upload the exported model in `folder`."""
