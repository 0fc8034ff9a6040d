"""One training run: its directory, its state, and what happens around the recipe's loop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from common import beginning, ending, report
from common.agreement import Agreement
from common.checkpoint import Checkpoints
from common.config import TrainingConfig
from common.directory import RunDirectory, refuse_to_resume
from common.errors import UserError
from common.evaluation import evaluating
from common.failures import GradientGuard, Preempted
from common.flops import ComputeLoss
from common.loader import Batch, Loader, Samples, make_loaders
from common.logbook import Logbook
from common.memory_plan import MemoryPlan
from common.meters import Meters
from common.persistence import save_run
from common.plan import Plan, make_plan
from common.profiling import Profile
from common.runtime import build_accelerator
from common.sampling import TrainingOrder
from common.tracking import Tracking


class Run:
    """Carries a recipe's loop: counts, times, logs and saves; the loop itself is the recipe's.

    Use it as a context manager: however the run ends, `status.json` says how.
    """

    plan: Plan  # from `make_plan` on
    memory_plan: MemoryPlan  # from `start` on

    def __init__(self, config: TrainingConfig, recipe_file: str) -> None:
        self.config = config
        self.given = dict(vars(config))
        self.recipe = Path(recipe_file).stem
        self.began = time.perf_counter()
        try:
            self.accelerator = build_accelerator(config)
        except UserError as error:
            if config.resume is not None and config.output_dir is not None:
                refuse_to_resume(Path(config.output_dir), error.message)
            raise
        self.device = self.accelerator.device
        self.global_step = 0
        self.epoch = 0
        self.owes_evaluation = False  # of the present step: a signal cut it short
        resume = config.resume is not None
        self.directory = RunDirectory(config.output_dir, self.recipe, resume)
        self.checkpoints = Checkpoints(
            self.directory.path / "checkpoints",
            self.accelerator.process_index,
            self.accelerator.num_processes,
            config.keep_checkpoints,
            config.collective_timeout,
        )
        self.agreement = Agreement(
            self.accelerator,
            self.checkpoints,
            self.directory.path,
            heeds_signals=not config.evaluate_only,
        )
        self.random_state: dict[str, torch.Tensor] | None = None
        self.guard = GradientGuard(self.accelerator, config.max_grad_norm)
        self.meters = Meters(self.accelerator, config.gradient_accumulation_steps)
        self.tracking = Tracking(self.accelerator, self.directory.path)
        self.logbook = Logbook(self.tracking)
        self.facts: dict[str, Any] = {}  # what `config.json` holds
        self.profile = Profile(self)

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
        self.all_loaders = loaders = make_loaders(self.config, self.accelerator, splits)
        if not self.config.evaluate_only:
            for loader in loaders.values():
                loader.is_cut_short = self.agreement.is_announced
        return loaders["train"], loaders[self.validation_split], loaders[self.test_split]

    def make_plan(self, data: Any, train_loader: Loader, default_epochs: Mapping[str, int]) -> None:
        """Settle how many updates the run has, and how often it evaluates and saves.

        Args:
            default_epochs: by name of the data set, and "other".
        """
        assert isinstance(train_loader.order, TrainingOrder)
        self.data = data
        self.plan = make_plan(self.config, train_loader.order, data.source.name, default_epochs)

    def start(
        self,
        model: nn.Module,
        optimizer: Any,
        scheduler: Any,
        description: dict[str, Any],
        compute_loss: ComputeLoss,
    ) -> None:
        """Load weights or a checkpoint, write `config.json`, open trackers, show what will run.

        Args:
            description: of the model: its ``name``, and what else is needed to use it again.
            compute_loss: the recipe's, to count what a sample costs.
        """
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.unwrapped = self.accelerator.unwrap_model(model)
        self.description = description
        beginning.start(self, compute_loss)

    # In the loop

    def batches(self, loader: Loader) -> Iterator[Batch]:
        """Yield training batches to the end of the run, from where it stands."""
        if self.config.evaluate_only:
            return
        self.model.train()
        self.meters.stopwatch.start()
        while self.global_step < self.plan.total_steps:
            self.epoch, update = divmod(self.global_step, self.plan.updates_per_epoch)
            batches = self.profile.watch(loader.epoch(self.epoch, update), loader)
            self.memory_plan.measure_first_step()
            while self.global_step < self.plan.total_steps:
                waited = time.perf_counter()
                item = next(batches, None)
                if item is None:
                    break
                batch, work = item
                self.counted = work, time.perf_counter() - waited
                yield batch
                if self.agreement.stopping:
                    self.leave()
        self.meters.stopwatch.stop()

    def leave(self) -> None:
        """End the job after a request to stop, once the checkpoint is on disk."""
        self.meters.stopwatch.stop()
        self.checkpoints.wait()
        self.agreement.check(self.global_step)
        self.agreement.end_collectives()
        raise Preempted(
            f"stopped after update {self.global_step} by {self.agreement.reason}; everything is "
            f"saved: go on with --resume {self.directory.path}"
        )

    def clip_gradients(self, model: nn.Module, optimizer: Any) -> None:
        """Clip the gradients' global norm, and see that non-finite ones are not applied."""
        self.guard.clip(model, optimizer)

    def record(self, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Take note of a micro-batch; log when an interval is over. No other synchronisation."""
        is_update = self.accelerator.sync_gradients
        self.meters.count(loss, logits, labels, *self.counted, is_update)
        if is_update:
            self.logbook.flush()
            self.global_step += 1
            if self.global_step % self.config.log_every == 0 or self.plan.ends(self.global_step):
                self.log_training()
            if self.guard.is_due:
                self.guard.check(self.global_step)
            if self.global_step % self.agreement.every == 0:
                self.agreement.check(self.global_step)
            self.profile.step()

    def log_training(self) -> None:
        """Gather one interval's figures from all ranks, log and show them."""
        values = self.meters.interval()
        values["train/learning_rate"] = self.optimizer.param_groups[0]["lr"]
        values["train/grad_norm"] = float(self.guard.grad_norm)
        values["train/skipped_updates"] = self.guard.check(self.global_step, values["train/loss"])
        if self.accelerator.scaler is not None:
            values["train/loss_scale"] = self.accelerator.scaler.get_scale()
        self.log(values)
        self.logbook.show_interval()

    @property
    def should_evaluate(self) -> bool:
        """Whether an evaluation is due; at the last update, the final one may stand for it."""
        if not self.accelerator.sync_gradients or not self.plan.evaluates(self.global_step):
            return False
        return not self.plan.ends(self.global_step) or self.validation_split != self.test_split

    @property
    def should_save(self) -> bool:
        """Whether a checkpoint is due: by the plan, or because of a signal."""
        return self.accelerator.sync_gradients and (
            self.agreement.stopping or self.plan.saves(self.global_step)
        )

    def save(self) -> None:
        """Save a checkpoint: copies the state now, and writes it in the background."""
        self.meters.stopwatch.stop()
        save_run(self)
        self.meters.stopwatch.start()

    def evaluating(self, model: nn.Module) -> AbstractContextManager[nn.Module]:
        """Give the bare model in evaluation mode, with throughput's clock stopped."""
        return evaluating(self, model)

    def log(self, values: dict[str, float]) -> None:
        """Log metrics at the present step; those of one step are written together."""
        if "eval/accuracy" in values:
            self.show_evaluation(values, self.validation_split)
            if self.validation_split == "validation":
                self.logbook.note_accuracy(values["eval/accuracy"])
        self.logbook.log(
            values
            | {
                "progress/global_step": self.global_step,
                "progress/epoch": self.global_step / self.plan.updates_per_epoch,
                "progress/samples": self.global_step * self.plan.samples_per_update,
                "time/train_seconds": self.meters.stopwatch.train_seconds,
            }
        )

    def show_evaluation(self, values: Mapping[str, float], split: str) -> None:
        """Print the figures of an evaluation."""
        report.show_evaluation(
            values, split, self.global_step, self.plan.total_steps, self.plan.updates_per_epoch
        )

    # After the loop

    def finish(self, evaluation: dict[str, float]) -> None:
        """Save the model, write `summary.json`, show the summary, and check the target.

        Args:
            evaluation: the final evaluation of the model as it is now.
        """
        ending.finish(self, evaluation)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        ending.close(self, error)
