"""How many updates a run makes, and after which of them it evaluates and saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.config import TrainingConfig
from common.sampling import TrainingOrder


@dataclass(frozen=True)
class Plan:
    """A run's length and intervals, in optimizer updates."""

    total_steps: int
    updates_per_epoch: int
    samples_per_update: int  # over all ranks
    eval_every: int
    save_every: int
    warmup: int | None  # as asked for

    def warmup_steps(self, share: float) -> int:
        """Return the updates of warm-up: `--warmup-steps`, or a share of the run."""
        return int(share * self.total_steps) if self.warmup is None else self.warmup

    def ends(self, step: int) -> bool:
        """Whether update `step` is the run's last."""
        return step == self.total_steps

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation is due after update `step`."""
        return step % self.eval_every == 0

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due: by updates, at an epoch's end, or at that of the run."""
        by_updates = step % self.save_every == 0 or step % self.updates_per_epoch == 0
        return by_updates or self.ends(step)


def make_plan(
    config: TrainingConfig, order: TrainingOrder, dataset: str, default_epochs: Mapping[str, int]
) -> Plan:
    """Settle how long a run is, and note in `config` the epochs that its data set gets.

    Args:
        dataset: its name.
        default_epochs: by name of the data set, and "other".
    """
    updates = order.updates_per_epoch
    if config.epochs is None:
        config.epochs = default_epochs.get(dataset, default_epochs["other"])
    total_steps = config.epochs * updates
    return Plan(
        total_steps=min(total_steps, config.max_steps or total_steps),
        updates_per_epoch=updates,
        samples_per_update=order.global_batch,
        eval_every=config.eval_every or updates,
        save_every=config.checkpoint_every or updates,
        warmup=config.warmup_steps,
    )
