"""The plan of a run: how many updates it makes, and after which it logs, evaluates and saves.

The intervals and the learning-rate schedule follow from the length, so one object has all three.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from common.command_line.flag_reads import mark_read
from common.config import TrainingConfig
from common.errors import UserError
from common.metric_names import EPOCH, SAMPLES, STEP
from common.run_directory.records import PlanFacts
from common.training.optim import SCALES, warmup_decay

MAX_EVALUATIONS = 20  # evaluations in a run without `--eval-every`
# Rows in a run without `--log-every`. Logging a row takes about a millisecond, in which an
# accelerator may be idle.
MAX_ROWS = 1000
MAX_LOG_INTERVAL = 50  # updates, if the run then has at most `MAX_ROWS` rows


class EpochSize(Protocol):
    """What a plan needs of the order of samples."""

    @property
    def updates_per_epoch(self) -> int: ...

    @property
    def global_batch(self) -> int: ...  # samples of an update over all ranks


@dataclass(frozen=True)
class ScheduledRates:
    """How `Plan.schedule` changed the learning rates; the defaults are those without a call.

    A recipe that does not call it has its own learning rates.
    """

    scale: float = 1.0  # the factor by which all rates were multiplied
    warmup_steps: int = 0
    peak: float | None = None  # of the first group of the first optimizer


class Plan:
    """A run's length and intervals, in optimizer updates, and what its schedule does to rates."""

    def __init__(
        self,
        config: TrainingConfig,
        order: EpochSize,
        dataset: str,
        default_epochs: Mapping[str, int],
    ) -> None:
        """Decide how long a run is, and how often it logs, evaluates and saves.

        Args:
            config: the flags.
            order: the order of the training samples.
            dataset: the name of the data set.
            default_epochs: the recipe's epochs by data set, for a run without `--epochs`.

        Raises:
            UserError: no flag states the epochs, and the recipe has none for this data set.
        """
        self.updates_per_epoch = order.updates_per_epoch
        self.samples_per_update = order.global_batch  # samples over all ranks
        self.epochs: int = (
            epochs_by_default(dataset, default_epochs) if config.epochs is None else config.epochs
        )
        total_steps = self.epochs * self.updates_per_epoch
        self.total_steps = min(total_steps, config.max_steps or total_steps)
        self.log_every = config.log_every or log_interval_by_default(self.total_steps)
        # If a run has many short epochs, not every epoch is followed by an evaluation.
        epoch_interval = math.ceil(self.total_steps / self.updates_per_epoch / MAX_EVALUATIONS)
        self.eval_every = config.eval_every or epoch_interval * self.updates_per_epoch
        # Whether the first interval has rows of its own, before the one at its end; see `logs`.
        self.has_early_rows = config.log_every is None
        # Without the flag, only the ends of epochs and of the run have checkpoints.
        self.save_every = config.checkpoint_every or self.total_steps
        self.config = config
        # The batch that the learning rate is stated for; by default the recipe's own batch size.
        base_batch_size = config.base_batch_size or type(config).batch_size
        batch_ratio = self.samples_per_update / base_batch_size
        # The factor of `--scale-learning-rate`, which takes effect only in `schedule`.
        self.scale_for_batch = SCALES[config.scale_learning_rate](batch_ratio)
        self.scheduled = ScheduledRates()  # `schedule` replaces it
        self.schedulers: list[LambdaLR] = []  # those that `schedule` has returned

    def schedule(self, optimizer: Optimizer, warmup_share: float) -> LambdaLR:
        """Multiply the optimizer's learning rates in place, and return a scheduler for them.

        The factor is that of `--scale-learning-rate`. A second call for the same optimizer would
        multiply its rates again. The multiplied rate is the peak, which the scheduler of
        `--schedule` reaches after the warm-up. `config.json` gets the factor, the length of the
        warm-up and the peak.

        Args:
            warmup_share: the share of the run's updates that are warm-up, for a run without
                `--warmup-steps`.
        """
        warmup = self.config.warmup_steps
        warmup_steps = int(warmup_share * self.total_steps) if warmup is None else warmup
        for group in optimizer.param_groups:
            group["lr"] *= self.scale_for_batch
        peak = self.scheduled.peak
        if peak is None:  # with several optimizers, the first one's rate counts
            peak = float(optimizer.param_groups[0]["lr"])
        self.scheduled = ScheduledRates(self.scale_for_batch, warmup_steps, peak)
        # These flags take effect only here. If a recipe leaves this call out, the run can thus
        # report that they have no effect.
        flags = ("schedule", "warmup_steps", "scale_learning_rate", "base_batch_size")
        mark_read(self.config, *flags)
        scheduler = warmup_decay(optimizer, self.total_steps, warmup_steps, self.config.schedule)
        self.schedulers.append(scheduler)
        return scheduler

    def epoch(self, step: int) -> int:
        """Return the epoch, from 0, of the update that follows `step`; at the end, the last one."""
        return max(0, min(step, self.total_steps - 1)) // self.updates_per_epoch

    def ends(self, step: int) -> bool:
        """Whether update `step` is the run's last."""
        return step == self.total_steps

    def logs(self, step: int) -> bool:
        """Whether a row is due after update `step`: at each interval, and at the run's end.

        Without `--log-every`, the first interval also has rows after updates 1, 2, 4, 8 and so on,
        because the loss changes most there.
        """
        # A power of two has one bit, so `step & (step - 1)` is 0.
        is_early_row = self.has_early_rows and step < self.log_every and step & (step - 1) == 0
        return step % self.log_every == 0 or is_early_row or self.ends(step)

    def evaluates(self, step: int) -> bool:
        """Whether the interval makes an evaluation due after update `step`.

        `Evaluations.is_due` also knows other reasons for an evaluation, and against it.
        """
        return step > 0 and step % self.eval_every == 0

    def saves(self, step: int, is_checkpoint_old: bool = True) -> bool:
        """Whether a checkpoint is due after update `step`.

        A checkpoint is due every `--checkpoint-every` updates, at the run's end, and at the end of
        an epoch.

        Args:
            step: the number of updates made.
            is_checkpoint_old: whether the last checkpoint is old. If not, the end of an epoch has
                no checkpoint, because short epochs would spend most of their time on checkpoints.
        """
        if self.ends(step) or step % self.save_every == 0:
            return True
        return is_checkpoint_old and step % self.updates_per_epoch == 0

    def facts(self) -> PlanFacts:
        """Return the entry of the plan in `config.json`."""
        return PlanFacts(
            total_steps=self.total_steps,
            updates_per_epoch=self.updates_per_epoch,
            log_every=self.log_every,
            eval_every=self.eval_every,
            rate_scale=self.scheduled.scale,
            warmup_steps=self.scheduled.warmup_steps,
            peak_learning_rate=self.scheduled.peak,
        )

    def position_figures(self, step: int) -> dict[str, float]:
        """Return the ``progress/`` metrics after update `step`."""
        return {
            STEP: step,
            EPOCH: step / self.updates_per_epoch,
            SAMPLES: step * self.samples_per_update,
        }


def log_interval_by_default(total_steps: int) -> int:
    """Return the updates between two rows, for a run without `--log-every`.

    A run of up to 2,500 updates gets about 50 rows, enough for a curve. A longer run gets a row for
    every 50 updates, but at most `MAX_ROWS` rows in all. The number of updates alone decides. If
    time decided too, a resumed run would have other rows than a run that was never interrupted.
    """
    if total_steps > MAX_ROWS * MAX_LOG_INTERVAL:
        return math.ceil(total_steps / MAX_ROWS)
    return min(MAX_LOG_INTERVAL, max(1, total_steps // 50))


def epochs_by_default(dataset: str, default_epochs: Mapping[str, int]) -> int:
    """Return the epochs that a recipe states for this data set, or else for ``"other"``.

    Raises:
        UserError: the recipe states neither.
    """
    epochs = default_epochs.get(dataset, default_epochs.get("other"))
    if epochs is None:
        names = ", ".join(default_epochs)
        others = f", only for {names}" if names else ""
        advice = 'add "other", as in DEFAULT_EPOCHS = {"other": 10}, or pass --epochs N'
        raise UserError(
            f"DEFAULT_EPOCHS has no entry for data set {dataset}{others}", advice=advice
        )
    return epochs
