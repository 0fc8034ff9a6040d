"""The training loop: its batches, what it records, and what is due after each update."""

import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.optim import Optimizer

from common.command_line.flag_reads import mark_read
from common.data.loader import Loader
from common.data.samples import Batch, Work
from common.lifecycle import saving, training_figures
from common.lifecycle.evaluations import Evaluations
from common.lifecycle.first_batch import warn_of_nan
from common.lifecycle.misuse import no_update_error
from common.lifecycle.stages import Context, StartedRun, reached
from common.lifecycle.training_watch import TrainingWatch
from common.lifecycle.unread_flags import refuse_unread_flags
from common.measure.value_checks import Metrics


class TrainingLoop:
    """The loop of one run. Its body is in the recipe."""

    def __init__(self, context: Context, evaluations: Evaluations) -> None:
        self.context = context
        self.evaluations = evaluations
        # The work of the current batch, and the seconds for which the loop waited for it.
        self.current_work: tuple[Work, float] | None = None
        self.is_first_batch_checked = False
        self.are_flags_checked = False  # becomes true after the first update
        self.watch = TrainingWatch(context.guard)

    def batches(self, started: StartedRun, loader: Loader) -> Iterator[Batch]:
        """Yield training batches from the current update to the end of the run.

        If a rank was asked to stop, this method saves a checkpoint after an update and ends the
        process.

        Raises:
            UserError: the loop recorded no update in a whole epoch.
            Preempted: a rank was asked to stop, and everything is saved.
        """
        progress = self.context.progress
        meters = self.context.meters
        started.kept.model.train()
        meters.start()
        with self.watch.watching(started):
            while progress.global_step < started.plan.total_steps:
                first_step = progress.global_step
                yield from self.batches_of_epoch(started, loader)
                if progress.global_step == first_step:
                    raise no_update_error()
        meters.stopwatch.stop()

    def batches_of_epoch(self, started: StartedRun, loader: Loader) -> Iterator[Batch]:
        """Yield training batches from the current update to the end of its epoch, or of the run."""
        progress = self.context.progress
        rehearsal = self.evaluations.rehearsal
        plan = started.plan
        epoch, step_in_epoch = divmod(progress.global_step, plan.updates_per_epoch)
        epoch_batches = loader.epoch(epoch, step_in_epoch)
        batches = started.profiler.watch(epoch_batches, loader, progress.global_step)
        while progress.global_step < plan.total_steps:
            wait_began = time.perf_counter()
            item = next(batches, None)
            if item is None:
                return
            batch, batch_work = item
            wait_seconds = time.perf_counter() - wait_began
            self.current_work = batch_work, wait_seconds
            if not self.is_first_batch_checked:
                self.is_first_batch_checked = True
                warn_of_nan(batch)
            if rehearsal.is_wanted:
                # A resumed run may begin with a real evaluation, which replaces the rehearsal.
                is_replaced = self.evaluations.is_real_one_due(plan, started.loaded)
                rehearsal.make_due(is_replaced)
            with started.memory_plan.watching(batch_work):
                yield batch
            rehearsal.end()  # also for a loop that has not called `run.record`
            if self.context.decisions.stopping:
                # This saves nothing if the loop has saved after this update.
                saving.save_and_leave(started)

    def clip(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Clip the gradients' global norm in place; skip the update if the norm is not finite."""
        if not self.are_flags_checked:
            # Only this call puts the flag into effect: see `TAKES_EFFECT_IN` in `flag_reads`.
            mark_read(self.context.config, "max_grad_norm")
        self.context.guard.clip(model, optimizer)

    def count_micro_batch(self, loss: torch.Tensor | float, metrics: Metrics | None) -> None:
        """Count the current micro-batch, with its loss and its metrics.

        Raises:
            UserError: a metric is not a number, or the recipe has taken no batch from the run.
        """
        self.evaluations.rehearsal.end()  # an evaluation after this micro-batch is a real one
        batch_work, wait_seconds = reached(self.current_work, "run.batches(train_loader)")
        is_update = self.context.accelerator.sync_gradients
        self.context.meters.count(loss, metrics, batch_work, wait_seconds, is_update)
        if self.context.progress.global_step == 0:
            self.context.guard.note_first_loss(loss)

    def end_update(self, started: StartedRun) -> None:
        """Count an update, and do what is due after it.

        Raises:
            UserError: after the first update, no code uses a flag that was set; or the loop clips
                gradients before there are any.
            TrainingError: an update had non-finite gradients, or a rank could not write its
                checkpoint.
        """
        context = self.context
        context.guard.end_update()
        # The row of the previous update is complete; see `PendingRow`.
        context.logs.write_row()
        step = context.progress.advance()
        if not self.are_flags_checked:
            self.are_flags_checked = True
            refuse_unread_flags(context, started.saved_config.given_flags)
        self.watch.check_update(started)
        if started.plan.logs(step):
            training_figures.log_interval(started)
        if context.guard.is_due:
            context.guard.check(step)
        if step % context.decisions.check_every == 0:
            context.decisions.check(step)
        started.profiler.step()
