"""Where metrics go: W&B or TensorBoard through Accelerate, and always the run's own files."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from common import wandb_run
from common.config import TrainingConfig
from common.console import say
from common.directory import json_safe
from common.failures import TrainingError

if TYPE_CHECKING:
    from accelerate import Accelerator


class Tracking:
    """Logs one vocabulary of metrics; a failing tracker never stops the training.

    The calls are made on all ranks; rank 0 alone writes.
    """

    def __init__(self, accelerator: Accelerator, directory: Path) -> None:
        self.accelerator = accelerator
        self.directory = directory
        self.main = accelerator.is_main_process
        self.shown = "metrics.jsonl only"
        self.commands: list[str] = []
        self.file: TextIO | None = None
        self.run_id: str | None = None  # of the W&B run

    def start(
        self,
        config: TrainingConfig,
        facts: Mapping[str, Any],
        name: str,
        run_id: str | None,
        earlier: list[dict[str, Any]],
    ) -> None:
        """Open the tracker that the configuration names, and the run's `metrics.jsonl`.

        Args:
            run_id: of the W&B run to go on with.
            earlier: what `metrics.jsonl` holds already; what W&B lost of it is logged again.
        """
        if not self.main:
            return
        self.run_id = run_id
        self.file = (self.directory / "metrics.jsonl").open("a", encoding="utf-8")
        try:
            if config.tracker == "wandb":
                self.start_wandb(config, facts, name, earlier)
            elif config.tracker == "tensorboard":
                self.start_tensorboard(config)
        except Exception as problem:  # a tracker may fail in any way, and must not matter
            self.give_up(problem)

    def start_wandb(
        self,
        config: TrainingConfig,
        facts: Mapping[str, Any],
        name: str,
        earlier: list[dict[str, Any]],
    ) -> None:
        """Start W&B: online when a key is there and the server answers, else offline."""
        import wandb
        from accelerate.tracking import filter_trackers

        mode, reason = wandb_mode()
        if mode == "disabled":
            self.shown = "W&B is disabled by WANDB_MODE; metrics.jsonl"
            return
        arguments: dict[str, Any] = {
            **wandb_run.init_arguments(config, facts, name),
            "mode": mode,
            "id": self.run_id,
            "resume": "allow" if self.run_id else None,
            "settings": wandb.Settings(
                silent=True,
                console="off",
                init_timeout=20,
                # Neither the command line, which may hold a token, nor code or git remotes.
                x_disable_meta=True,
                save_code=False,
                disable_git=True,
                disable_code=True,
            ),
        }
        self.accelerator.log_with = filter_trackers(["wandb"])
        try:
            self.accelerator.init_trackers(config.project, None, {"wandb": arguments})
        except Exception as problem:
            if mode == "offline":
                raise
            mode, reason = "offline", f"the server refused: {type(problem).__name__}"
            arguments["mode"] = mode
            self.accelerator.trackers.clear()
            self.accelerator.init_trackers(config.project, None, {"wandb": arguments})
        run = self.accelerator.get_tracker("wandb", unwrap=True)
        self.run_id = run.id
        run.config.update(dict(facts), allow_val_change=True)
        wandb_run.define_metrics(run)
        for values in earlier:
            if values["progress/global_step"] >= run.step:
                run.log(values, step=values["progress/global_step"])
        self.shown = f"W&B {mode} ({reason}), and metrics.jsonl"
        folder = Path(run.dir).parent
        shown = os.path.relpath(folder)
        self.commands = (
            [f"wandb leet {shlex.quote(shown)}", f"wandb sync {shlex.quote(shown)}"]
            if mode == "offline"
            else [str(run.url)]
        )

    def start_tensorboard(self, config: TrainingConfig) -> None:
        """Write TensorBoard events into the run's directory."""
        from accelerate.tracking import filter_trackers

        self.accelerator.project_configuration.set_directories(str(self.directory))
        self.accelerator.log_with = filter_trackers(["tensorboard"], self.directory)
        self.accelerator.init_trackers("tensorboard")
        if not self.accelerator.trackers:
            raise ModuleNotFoundError("package tensorboard is not installed")
        self.shown = "TensorBoard, and metrics.jsonl"
        self.commands = [f"tensorboard --logdir {shlex.quote(os.path.relpath(self.directory))}"]

    def log(self, metrics: Mapping[str, float], global_step: int) -> None:
        """Write one object to `metrics.jsonl`, flushed, and send it to the tracker.

        Raises:
            TrainingError: when the file can't be written.
        """
        if self.file is None:
            return
        try:
            self.file.write(json.dumps(json_safe(metrics)) + "\n")
            self.file.flush()
        except OSError as problem:
            with contextlib.suppress(OSError):  # it tries to write again
                self.file.close()
            self.file = None
            raise TrainingError(
                f"{self.directory}/metrics.jsonl can't be written ({problem}): free some space, "
                f"then go on with --resume {self.directory}",
                every_rank=True,
            ) from None
        try:
            # Committed at once: W&B would hold the last row back, over the summary.
            commit = {"wandb": {"commit": True}}
            self.accelerator.log(dict(metrics), step=global_step, log_kwargs=commit)
        except Exception as problem:
            self.give_up(problem)

    def attach(self, send: Callable[[Any], None]) -> None:
        """Let `send` add to the W&B run, where there is one; if it can't, that is said."""
        for tracker in self.accelerator.trackers if self.main else []:
            if tracker.name == "wandb":
                try:
                    send(tracker.tracker)
                except Exception as problem:
                    say(f"not sent to W&B ({type(problem).__name__}: {problem})")

    def finish(self, summary: Mapping[str, Any], exit_code: int = 0) -> None:
        """Close the tracker, with the end-of-run values as its summary."""
        if self.file is None:
            return
        self.file.close()
        self.file = None
        try:
            for tracker in self.accelerator.trackers:
                if tracker.name == "wandb":
                    wandb_run.finish(tracker.tracker, summary, exit_code)
                else:
                    tracker.finish()
        except Exception as problem:
            self.give_up(problem)

    def give_up(self, problem: Exception) -> None:
        """Go on with the files alone."""
        self.accelerator.trackers = []
        say(f"tracking stopped ({type(problem).__name__}: {problem}); metrics.jsonl goes on")


def wandb_mode() -> tuple[str, str]:
    """Return W&B's mode and why; never prompts, and takes 3 s at most."""
    import requests
    import wandb

    asked = os.environ.get("WANDB_MODE", "")
    if asked:
        return asked, "by WANDB_MODE"
    server = wandb.setup().settings.base_url
    has_key = bool(os.environ.get("WANDB_API_KEY") or requests.utils.get_netrc_auth(server))
    if not has_key:
        return "offline", "no API key"
    try:
        requests.get(server, timeout=3)
    except requests.RequestException:
        return "offline", "the server does not answer"
    return "online", str(server)
