"""The trackers that show a run besides its own files: W&B, online or offline, and TensorBoard."""

import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from accelerate import Accelerator
from accelerate.tracking import filter_trackers
from PIL import Image

from common.config import TrainingConfig
from common.console import warn
from common.objective import PREFIXES, Objective
from common.run_directory.records import RunConfig
from common.system.platforms import quoted, shown_path
from common.system.printable import with_letters
from common.tables import markdown_table
from common.track import media
from common.track.names import SPLITS, STEP, Facts, flat, precision_name
from common.track.recorded_media import Entry, HistogramEntry, ImagesEntry, TableEntry
from common.track.service import MOST_SECONDS_TO_FINISH, ServiceWatch

if TYPE_CHECKING:  # a run imports only its own tracker
    import wandb
    from torch.utils.tensorboard import SummaryWriter
    from wandb import Run as WandbRun

LONGEST_TAG = 64  # characters; W&B refuses a run with a longer tag
PROBE_BYTES = 2**16  # written to a folder to see whether it takes W&B's files
SERVER_SECONDS = 5.0  # in which the server must accept a connection, and again to answer


class Command(NamedTuple):
    """What a user can do with a tracked run after its end."""

    purpose: Literal["view", "upload"]
    text: str  # a line for the shell, or a URL


class TrackerUnavailableError(ValueError):
    """The tracker can't be used, for a reason that the user can mend.

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


class TensorBoard:
    """Event files for TensorBoard in the run directory, on rank 0, written through Accelerate."""

    shown = "TensorBoard, and metrics.jsonl"
    run = None  # there is no W&B run, so results and models are not attached to one

    def __init__(self, accelerator: Accelerator, directory: Path) -> None:
        accelerator.project_configuration.set_directories(str(directory))
        accelerator.log_with = filter_trackers(["tensorboard"], directory)
        accelerator.init_trackers("tensorboard")
        if not accelerator.trackers:
            raise TrackerMissingError("TensorBoard is not installed", "run pip install tensorboard")
        self.accelerator = accelerator
        self.commands = [Command("view", f"tensorboard --logdir {quoted(shown_path(directory))}")]

    def limited(self) -> contextlib.AbstractContextManager[None]:
        """Limit nothing: `WandB.limited` guards against a service, and TensorBoard has none."""
        return contextlib.nullcontext()

    def log(self, row: Mapping[str, float]) -> None:
        self.accelerator.log(dict(row), step=int(row[STEP]))

    @property
    def native(self) -> "SummaryWriter":
        """TensorBoard's own object, which a recipe gets as `run.tracker`."""
        return self.accelerator.get_tracker("tensorboard", unwrap=True)

    def log_media(self, entry: Entry) -> None:
        """Show images, a table or a histogram that a recipe has logged, at the entry's step."""
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

    def finish(self, summary: Facts, exit_code: int) -> None:
        self.accelerator.end_training()


class WandB:
    """A run at W&B, on rank 0, started through Accelerate: `accelerator.get_tracker` has it."""

    def __init__(
        self,
        accelerator: Accelerator,
        config: TrainingConfig,
        run_config: RunConfig,
        directory: Path,
        earlier: Sequence[Mapping[str, float]],
    ) -> None:
        """Start the W&B run, online if the server accepts the key, else offline.

        Args:
            earlier: the rows of `metrics.jsonl` so far; those that W&B lost are logged again.
        """
        # W&B's own error reports can delay the end of a run, and they print.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        # W&B stages its uploads in the run's directory, next to its other files.
        staging_folder = Path(os.environ.get("WANDB_DIR") or directory, "wandb")
        os.environ.setdefault("WANDB_DATA_DIR", str(staging_folder.absolute()))
        mode, reason = start_wandb(accelerator, config, run_config, directory)
        self.objective = Objective.parse(run_config.objective)
        self.best: float | None = None
        # The split that is evaluated during training: validation, or else test.
        split = next(PREFIXES[name] for name in PREFIXES if name in run_config.data.sizes)
        # A metric without a slash in its name belongs to no section, and W&B shows it before all
        # sections. So the most important metrics are logged under such names as well.
        self.top_names = {
            f"{split}/{self.objective.metric}": f"{self.objective.metric}_{split}",
            "train/loss": "loss_train",
            f"{split}/loss": f"loss_{split}",
        }
        self.service = ServiceWatch()
        with self.limited():
            self.run: WandbRun = accelerator.get_tracker("wandb", unwrap=True)
            self.begin(run_config, earlier)
        self.shown = f"W&B {mode} ({reason}), and metrics.jsonl"
        folder = quoted(shown_path(Path(self.run.dir).parent))
        self.commands: list[Command] = []
        if self.run.offline:
            self.commands.append(Command("view", f"wandb leet {folder}"))
            self.commands.append(Command("upload", f"wandb sync {folder}"))
        elif self.run.url:
            self.commands.append(Command("view", self.run.url))

    def limited(self) -> contextlib.AbstractContextManager[None]:
        """Limit the time that the calls in a block may wait for W&B's service."""
        return self.service.limited()

    def begin(self, run_config: RunConfig, earlier: Sequence[Mapping[str, float]]) -> None:
        """Define how W&B shows the metrics, and log the `earlier` rows again that it lost."""
        self.run.config.update(flat(run_config), allow_val_change=True)
        self.run.define_metric("*", step_metric=STEP)  # the x-axis of every chart
        for name in (STEP, "progress/*", "time/*", *(f"{split}/count" for split in SPLITS)):
            self.run.define_metric(name, hidden=True)  # these make no useful charts
        for row in earlier:
            if row[STEP] >= self.run.step:  # the next step that W&B expects
                self.log(row)

    def log(self, row: Mapping[str, float]) -> None:
        """Log a row of metrics at its step."""
        top_values = {
            top_name: row[name] for name, top_name in self.top_names.items() if name in row
        }
        with self.limited():
            # Commit at once. Otherwise W&B would write the last row after the summary, over it.
            self.run.log({**top_values, **row}, step=int(row[STEP]), commit=True)
            value = row.get(f"val/{self.objective.metric}")
            if value is not None:
                self.note_best(value)

    def note_best(self, value: float) -> None:
        """Keep the best value in the summary, under the name that `summary.json` and sweeps use."""
        values = [value] if self.best is None else [self.best, value]
        self.best = self.objective.best(values)
        if self.best is not None:
            self.run.summary[self.objective.best_key] = self.best

    @property
    def native(self) -> "WandbRun":
        """W&B's own object, which a recipe gets as `run.tracker`."""
        return self.run

    def log_media(self, entry: Entry) -> None:
        """Show images, a table or a histogram that a recipe has logged, at the entry's step."""
        import wandb

        panel: wandb.Table | wandb.Histogram | list[wandb.Image] | None = None
        if isinstance(entry, ImagesEntry):
            captions = entry.captions or [file.stem for file in entry.files]
            pairs = zip(entry.files, captions, strict=True)
            panel = [wandb.Image(str(file), caption=caption) for file, caption in pairs]
        elif isinstance(entry, TableEntry):
            panel = wandb.Table(columns=[*entry.columns], data=entry.rows, allow_mixed_types=True)
            media.keep_in_run(self.run, entry.name, panel, entry.step)
        elif isinstance(entry, HistogramEntry):
            histogram = (np.array(entry.counts), np.array(entry.edges))
            panel = wandb.Histogram(np_histogram=histogram)
        # Do not commit: the metrics of the same step follow, and belong to the same row.
        with self.limited():
            self.run.log({entry.name: panel, STEP: entry.step}, step=entry.step, commit=False)

    def finish(self, summary: Facts, exit_code: int) -> None:
        """Close the run, and replace the summary that W&B made of the last row."""
        with self.service.limited(MOST_SECONDS_TO_FINISH):
            self.run.summary.update(dict(summary))
            self.run.finish(exit_code=exit_code)


def start_wandb(
    accelerator: Accelerator, config: TrainingConfig, run_config: RunConfig, directory: Path
) -> tuple[str, str]:
    """Start a W&B run through Accelerate, offline if the server refuses it.

    Returns:
        The mode, "online" or "offline", and the reason for it.
    """
    import wandb

    mode, reason = wandb_mode()
    arguments = init_arguments(config, run_config, directory)
    arguments |= {"mode": mode, "settings": settings_of_run()}
    accelerator.log_with = filter_trackers(["wandb"])
    try:
        accelerator.init_trackers(config.project, None, {"wandb": arguments})
    except Exception as problem:
        accelerator.trackers.clear()
        wandb.teardown()  # the failed attempt would keep the run's id in use
        mode = "offline"
        reason = f"the server refused: {type(problem).__name__}"
        accelerator.init_trackers(config.project, None, {"wandb": {**arguments, "mode": mode}})
    return mode, reason


def init_arguments(
    config: TrainingConfig, run_config: RunConfig, directory: Path
) -> dict[str, object]:
    """Return the arguments of `wandb.init`; flags take precedence over `WANDB_*` variables."""
    variable = os.environ.get
    default_job_type = "evaluate" if config.evaluate_only else "train"
    tags = [*tags_of_run(config, run_config), *variable("WANDB_TAGS", "").split(",")]
    return {
        "id": run_config.wandb_run_id,
        "resume": "allow",
        "name": with_letters(config.run_name or variable("WANDB_NAME") or directory.name),
        "dir": wandb_folder(directory),
        "group": config.group or variable("WANDB_RUN_GROUP"),
        "job_type": variable("WANDB_JOB_TYPE") or default_job_type,
        "notes": config.notes or variable("WANDB_NOTES"),
        "tags": short_tags(tags),
    }


def tags_of_run(config: TrainingConfig, run_config: RunConfig) -> list[str]:
    """Return the recipe, data set, precision and device of a run, and the user's own tags."""
    environment = run_config.environment
    return [
        run_config.recipe,
        run_config.data.name,
        precision_name(environment.mixed_precision),
        "cpu" if environment.device_type == "cpu" else environment.device,
        *config.tags,
    ]


def settings_of_run() -> "wandb.Settings":
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


def wandb_settings() -> "wandb.Settings":
    """Return W&B's settings, which `WANDB_*` variables may change.

    Raises:
        TrackerSettingsError: one of them has a value that W&B does not accept.
    """
    import wandb
    from pydantic import ValidationError  # wandb's settings are a pydantic model

    try:
        return wandb.setup(wandb.Settings(silent=True)).settings
    except ValidationError as problem:
        error = problem.errors()[0]
        variable = "_".join(["WANDB", *map(str, error["loc"])]).upper()
        value = "" if "KEY" in variable else f"={str(error['input'])[:LONGEST_TAG]!r}"
        raise TrackerSettingsError(
            f"W&B rejects {variable}{value}: {error['msg']}", f"correct or unset {variable}"
        ) from None
    except wandb.Error as problem:  # a malformed key, which the message does not repeat
        raise TrackerSettingsError(
            f"W&B rejects a WANDB_* variable ({problem})", "correct or unset it"
        ) from None


def short_tags(tags: Sequence[str]) -> list[str]:
    """Return the tags as W&B accepts them: shortened, without empty ones and repetitions."""
    shortened = [with_letters(tag).strip()[:LONGEST_TAG] for tag in tags if tag.strip()]
    return list(dict.fromkeys(shortened))


def wandb_folder(directory: Path) -> Path:
    """Return the folder for W&B's files: WANDB_DIR, or `directory` if WANDB_DIR isn't writable."""
    chosen_folder = os.environ.get("WANDB_DIR")
    if not chosen_folder:
        return directory
    try:
        Path(chosen_folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=chosen_folder) as file:
            file.write(bytes(PROBE_BYTES))
    except (OSError, ValueError) as problem:
        cause = getattr(problem, "strerror", None) or problem
        warn(
            f"WANDB_DIR {chosen_folder} can't be written ({cause}): W&B's files go to {directory} "
            "instead"
        )
        return directory
    return Path(chosen_folder)


def wandb_mode() -> tuple[str, str]:
    """Return W&B's mode, "online" if the server knows the user's key, and the reason to print.

    Asking first keeps W&B from prompting for a key or waiting for a server that is out of reach.

    Raises:
        TrackerSettingsError: a `WANDB_*` variable has a value that W&B does not accept.
    """
    import requests

    settings = wandb_settings()
    chosen_mode = os.environ.get("WANDB_MODE")
    if chosen_mode:
        return chosen_mode, "by WANDB_MODE"
    netrc_auth = requests.utils.get_netrc_auth(settings.base_url)
    key = os.environ.get("WANDB_API_KEY")
    auth = ("api", key) if key else netrc_auth
    if auth is None:
        return "offline", "no API key"
    try:
        response = requests.post(
            f"{settings.base_url}/graphql",
            json={"query": "query Viewer { viewer { id } }"},
            auth=auth,
            headers=settings.x_extra_http_headers,
            timeout=SERVER_SECONDS,
        )
    except requests.RequestException:
        return "offline", "the server does not answer"
    if not response.ok:
        return "offline", f"the server answers {response.status_code} {response.reason}"
    with contextlib.suppress(ValueError, KeyError, TypeError):
        if response.json()["data"]["viewer"]["id"]:
            return "online", str(settings.base_url)
    return "offline", "the server does not know the key"
