"""One training run: its directory, its state, and what happens around the recipe's loop."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from common import console, metrics, report
from common.checkpoint import Checkpoints, step_folders
from common.config import TrainingConfig
from common.directory import RunDirectory, json_safe
from common.errors import UserError, let_main_rank_exit_first
from common.export import load_weights, save_model
from common.failures import (
    GradientGuard,
    Preempted,
    TrainingError,
    is_lost_peer,
    is_out_of_memory,
    out_of_memory_advice,
)
from common.loader import Batch, Loader, Samples, make_loaders
from common.optimizers import start_momentum
from common.persistence import restore_random_state, restore_run, save_run
from common.resume import read_json
from common.runtime import build_accelerator, describe_environment
from common.sampling import TrainingOrder
from common.signals import StopRequest
from common.tracking import Tracking


class Run:
    """Carries a recipe's loop: counts, times, logs and saves; the loop itself is the recipe's.

    Use it as a context manager: however the run ends, `status.json` says how.
    """

    def __init__(self, config: TrainingConfig, recipe_file: str) -> None:
        self.config = config
        self.given = dict(vars(config))
        self.recipe = Path(recipe_file).stem
        self.began = time.perf_counter()
        self.accelerator = build_accelerator(config)
        self.device = self.accelerator.device
        self.global_step = 0
        self.epoch = 0
        self.stop_request = StopRequest()
        self.stopping = False
        self.check_every = 1  # updates between two agreements of all ranks on whether to stop
        resume = config.resume is not None
        self.directory = RunDirectory(config.output_dir, self.recipe, resume)
        self.checkpoints = Checkpoints(
            self.directory.path / "checkpoints",
            self.accelerator.process_index,
            self.accelerator.num_processes,
            config.keep_checkpoints,
        )
        self.random_state: dict[str, torch.Tensor] | None = None
        self.guard = GradientGuard(self.accelerator, config.max_grad_norm)
        self.sums = metrics.TrainingSums(self.device, config.gradient_accumulation_steps)
        self.stopwatch = metrics.Stopwatch(lambda: metrics.synchronize(self.device))
        self.tracking = Tracking(self.accelerator, self.directory.path)
        self.display: console.ProgressDisplay | None = None
        self.pending: dict[str, Any] = {}
        self.latest: dict[str, Any] = {}
        self.best_accuracy: float | None = None

    # Before the loop

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type that matrix products run in."""
        types = {"fp16": torch.float16, "bf16": torch.bfloat16}
        return types.get(self.accelerator.mixed_precision, torch.float32)

    def loaders(self, splits: Mapping[str, Samples]) -> tuple[Loader, Loader, Loader]:
        """Return the loaders for training, evaluation during it, and the final evaluation.

        The second reads the validation split, the third the test split; each stands in for the
        other where there is only one.
        """
        names = [name for name in ("validation", "test") if name in splits]
        self.validation_split, self.test_split = names[0], names[-1]
        loaders = make_loaders(self.config, self.accelerator, splits)
        return loaders["train"], loaders[self.validation_split], loaders[self.test_split]

    def plan(self, data: Any, train_loader: Loader, default_epochs: Mapping[str, int]) -> None:
        """Settle how many updates the run has, and how often it evaluates.

        Args:
            default_epochs: by name of the data set, and "other".
        """
        assert isinstance(train_loader.order, TrainingOrder)
        self.data, config = data, self.config
        self.updates_per_epoch = train_loader.order.updates_per_epoch
        self.samples_per_update = train_loader.order.global_batch
        if config.epochs is None:
            config.epochs = default_epochs.get(data.source.name, default_epochs["other"])
        self.total_steps = config.epochs * self.updates_per_epoch
        if config.max_steps is not None:
            self.total_steps = min(self.total_steps, config.max_steps)
        self.eval_every = config.eval_every or self.updates_per_epoch

    def warmup_steps(self, share: float) -> int:
        """Return the updates of warm-up: `--warmup-steps`, or a share of the run."""
        asked = self.config.warmup_steps
        return int(share * self.total_steps) if asked is None else asked

    def start(
        self, model: nn.Module, optimizer: Any, scheduler: Any, description: dict[str, Any]
    ) -> None:
        """Load weights or a checkpoint, write `config.json`, open trackers, show what will run.

        Args:
            description: of the model: its ``name``, and what else is needed to use it again.
        """
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.description = description
        start_momentum(optimizer.optimizer)
        self.unwrapped = self.accelerator.unwrap_model(model)
        config, data = self.config, self.data
        if config.init_from is not None:
            load_weights(self.unwrapped, config.init_from)
        config.dataset = data.source.location if config.dataset != "auto" else data.source.name
        parameters = sum(p.numel() for p in self.unwrapped.parameters())
        environment = describe_environment(self.accelerator, config)
        sizes = {name: len(split) for name, split in data.splits.items()}
        facts: dict[str, Any] = {
            "recipe": self.recipe,
            "config": vars(config),
            "given": self.given,
            "environment": environment,
            "data": {"name": data.source.name, "reason": data.source.reason, "sizes": sizes}
            | {"classes": len(data.class_names), "notes": data.notes},
            "model": {"name": description["name"], "parameters": parameters},
            "plan": {"total_steps": self.total_steps, "updates_per_epoch": self.updates_per_epoch},
        }
        self.facts = facts
        manifest = None
        if config.resume is not None:
            facts["given"] = read_json(self.directory.path / "config.json")["given"]
            manifest = restore_run(self)
        self.directory.write("config.json", facts)
        self.directory.write_status("running", self.global_step)
        self.tracking.start(
            config,
            facts,
            config.run_name or self.directory.path.name,
            manifest["wandb_run_id"] if manifest else None,
            # What is still to be written of the last step is in the checkpoint.
            self.directory.cut_metrics(self.global_step - bool(self.pending)),
        )
        report.show_plan(facts, f"{self.directory.path}; {self.tracking.shown}")
        self.display = console.ProgressDisplay(self.total_steps, self.global_step)
        restore_random_state(self)

    # In the loop

    def batches(self, loader: Loader) -> Iterator[Batch]:
        """Yield training batches to the end of the run, from where it stands."""
        if self.config.evaluate_only:
            return
        self.model.train()
        self.stopwatch.start()
        while self.global_step < self.total_steps:
            self.epoch, update = divmod(self.global_step, self.updates_per_epoch)
            batches = loader.epoch(self.epoch, update)
            while self.global_step < self.total_steps:
                waited = time.perf_counter()
                item = next(batches, None)
                if item is None:
                    break
                batch, samples, tokens = item
                self.counted = samples, tokens, time.perf_counter() - waited
                yield batch
                if self.stopping:
                    self.leave()
        self.stopwatch.stop()

    def leave(self) -> None:
        """End the job after a request to stop, once the checkpoint is on disk."""
        self.stopwatch.stop()
        self.checkpoints.wait()
        self.check_requests()
        self.end_collectives()
        reason = self.stop_request.reason or "a signal to another rank"
        raise Preempted(
            f"stopped after update {self.global_step} by {reason}; everything is saved: "
            f"go on with --resume {self.directory.path}"
        )

    def clip_gradients(self, model: nn.Module, optimizer: Any) -> None:
        """Clip the gradients' global norm, and see that non-finite ones are not applied."""
        self.guard.clip(model, optimizer)

    def record(self, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Take note of a micro-batch; log when an interval is over. No other synchronisation."""
        is_update = self.accelerator.sync_gradients
        self.sums.add(loss, logits, labels)
        self.stopwatch.count(*self.counted, is_update)
        if is_update:
            self.flush()
            self.global_step += 1
            if self.global_step % self.config.log_every == 0 or self.is_last_step:
                self.log_training()
            if self.guard.is_due:
                self.guard.check(self.global_step)
            if self.global_step % self.check_every == 0:
                self.check_requests()

    def check_requests(self) -> None:
        """Let all ranks agree on whether one was asked to stop, or could not save.

        Raises:
            TrainingError: on all ranks, when a checkpoint could not be written.
        """
        failure = self.checkpoints.failure
        flags = [self.stop_request.is_made, failure is not None]
        if self.accelerator.num_processes > 1:
            mine = torch.tensor(flags, dtype=torch.float32, device=self.device)
            flags = [value > 0 for value in self.accelerator.reduce(mine, "sum").tolist()]
        self.stopping = flags[0]
        if flags[1]:
            raise TrainingError(
                f"a checkpoint could not be written ({failure or 'on another rank'}): free some "
                f"space, then go on from the one before with --resume {self.directory.path}",
                every_rank=failure is not None,
            )

    @property
    def is_last_step(self) -> bool:
        """Whether the run's last update is done."""
        return self.global_step == self.total_steps

    @property
    def should_evaluate(self) -> bool:
        """Whether an evaluation is due; at the last update, the final one may stand for it."""
        if not self.accelerator.sync_gradients or self.global_step % self.eval_every:
            return False
        return not self.is_last_step or self.validation_split != self.test_split

    @property
    def should_save(self) -> bool:
        """Whether a checkpoint is due: by updates, at an epoch's end, or because of a signal."""
        if not self.accelerator.sync_gradients:
            return False
        every = self.config.checkpoint_every or self.updates_per_epoch
        ends = self.global_step % self.updates_per_epoch == 0 or self.is_last_step
        return self.stopping or ends or self.global_step % every == 0

    def save(self) -> None:
        """Save a checkpoint: copies the state now, and writes it in the background."""
        self.stopwatch.stop()
        save_run(self)
        self.stopwatch.start()

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[nn.Module]:
        """Give the bare model in evaluation mode, with throughput's clock stopped.

        Buffers such as batch norm's statistics differ between ranks, and are averaged first.
        The bare model is used, because ranks may have different numbers of batches.
        """
        running = self.stopwatch.started is not None
        self.stopwatch.stop()
        unwrapped = self.accelerator.unwrap_model(model)
        if self.accelerator.num_processes > 1:
            for buffer in unwrapped.buffers():
                if buffer.is_floating_point():
                    buffer.copy_(self.accelerator.reduce(buffer, "mean"))
        unwrapped.eval()
        with torch.inference_mode():
            yield unwrapped
        unwrapped.train()
        if running:
            self.stopwatch.start()

    def log_training(self) -> None:
        """Gather one interval's figures from all ranks, and log them."""
        values = metrics.gather_interval(self.accelerator, self.stopwatch.lap(), self.sums)
        values["train/learning_rate"] = self.optimizer.param_groups[0]["lr"]
        values["train/grad_norm"] = float(self.guard.grad_norm)
        values["train/skipped_updates"] = self.guard.check(self.global_step, values["train/loss"])
        if self.accelerator.scaler is not None:
            values["train/loss_scale"] = self.accelerator.scaler.get_scale()
        self.log(values)
        assert self.display is not None
        self.display.update(self.latest)
        # About once a second, and at the same updates on all ranks.
        per_second = 1000 / values["perf/step_milliseconds"]
        self.check_every = max(1, int(per_second)) if self.accelerator.num_processes > 1 else 1

    def log(self, values: dict[str, float]) -> None:
        """Log metrics at the present step; those of one step are written together."""
        if "eval/accuracy" in values:
            self.show_evaluation(values, self.validation_split)
            if self.validation_split == "validation":
                self.best_accuracy = max(values["eval/accuracy"], self.best_accuracy or 0.0)
        self.pending |= values | {
            "progress/global_step": self.global_step,
            "progress/epoch": self.global_step / self.updates_per_epoch,
            "progress/samples": self.global_step * self.samples_per_update,
        }
        self.latest |= self.pending

    def flush(self) -> None:
        """Write what was logged at the last step, to `metrics.jsonl` and the tracker."""
        if self.pending:
            self.tracking.log(self.pending, self.pending["progress/global_step"])
            self.pending = {}

    def show_evaluation(self, values: Mapping[str, float], split: str) -> None:
        """Print the figures of an evaluation."""
        report.show_evaluation(
            values, split, self.global_step, self.total_steps, self.updates_per_epoch
        )

    # After the loop

    def finish(self, evaluation: dict[str, float]) -> None:
        """Save the model, write `summary.json`, show the summary, and check the target.

        Args:
            evaluation: the final evaluation of the model as it is now.
        """
        config = self.config
        self.checkpoints.wait()
        self.check_requests()
        if self.validation_split == self.test_split:
            self.log(evaluation)
        else:
            self.show_evaluation(evaluation, self.test_split)
        self.flush()
        assert self.display is not None
        self.display.close()
        summary = self.summarize(evaluation)
        self.end_collectives()
        if self.accelerator.is_main_process and not config.evaluate_only:
            facts = {"recipe": self.recipe, "class_names": self.data.class_names}
            save_model(self.directory.path / "model", self.unwrapped, facts | self.description)
            if hasattr(self.data, "tokenizer_folder"):
                folder = self.directory.path / "model"
                shutil.copytree(self.data.tokenizer_folder, folder, dirs_exist_ok=True)
        self.directory.write("summary.json", json_safe(summary))
        self.tracking.finish(summary)
        report.show_summary(
            self.recipe, summary, self.test_split, self.directory.path, self.tracking.commands
        )
        accuracy, target = evaluation["eval/accuracy"], config.target_accuracy
        if target is not None and accuracy < target:
            raise TrainingError(
                f"the final accuracy {accuracy:.4f} is below --target-accuracy {target}"
            )
        self.directory.write_status("finished", self.global_step)

    def end_collectives(self) -> None:
        """Let the last collective be forgotten before a process can exit.

        A thread of gloo (torch 2.13) that drops the last reference to a reduced tensor while
        the interpreter exits aborts the process; a barrier holds no tensor and outlives those.
        """
        if self.accelerator.num_processes > 1:
            self.accelerator.wait_for_everyone()

    def summarize(self, evaluation: Mapping[str, float]) -> dict[str, Any]:
        """Return the run's figures under the metrics' names."""
        summary = {**self.latest, **evaluation}
        if not self.config.evaluate_only:
            whole = list(vars(self.stopwatch.whole_run).values())
            mine = torch.tensor([[*whole, self.sums.last_loss()]], dtype=torch.float64)
            ranks = self.accelerator.gather(mine.to(self.device)).cpu()
            summary |= metrics.throughput(ranks[:, :-1], tokens_matter=bool(ranks[0, 4]))
            summary["train/loss"] = float(ranks[:, -1].mean())
        if self.best_accuracy is not None:
            summary["eval/best_accuracy"] = self.best_accuracy
        summary["time/train_seconds"] = self.stopwatch.train_seconds
        summary["time/total_seconds"] = time.perf_counter() - self.began
        return summary

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.display is not None:
            self.display.close()
        if isinstance(error, Preempted):
            console.say(error.message)
            self.flush()
            self.tracking.finish(self.latest)
            self.directory.write_status("preempted", self.global_step, error.message)
        elif error is not None:
            named = f"rank {self.accelerator.process_index}: {type(error).__name__}: {error}"
            reason = error.message if isinstance(error, UserError) else named
            resumable = is_lost_peer(error)
            first = self.directory.write_failure(self.global_step, reason, resumable)
            self.flush()
            self.tracking.finish(self.latest, exit_code=1)
            self.directory.remove_if_unused()
        if isinstance(error, UserError):
            let_main_rank_exit_first()
        if error is not None and is_out_of_memory(error) and first:
            peak = console.peak_memory(metrics.memory_used(self.device))
            saved = any(step_folders(self.checkpoints.folder))
            resume = str(self.directory.path) if saved else None
            advice = out_of_memory_advice(self.config, resume, peak)
            raise TrainingError(advice, every_rank=True) from None
        together = error is None or isinstance(error, (UserError, Preempted))
        if torch.distributed.is_initialized() and together:
            torch.distributed.destroy_process_group()
