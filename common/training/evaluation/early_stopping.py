"""`--early-stopping N`: a run ends after N evaluations in a row without a better evaluation."""

from common.command_line.flag_reads import mark_read
from common.config import TrainingConfig
from common.console import say
from common.errors import UserError
from common.objective import Split
from common.system.wording import counted
from common.training.evaluation.best import Best


class EarlyStopping:
    """Decides whether a run ends early.

    This class has no state to save. `Best`, which is part of each checkpoint, counts the
    evaluations since the best one, so a resumed run decides as an uninterrupted run does.
    """

    def __init__(self, config: TrainingConfig, best: Best, validation_split: Split) -> None:
        """Prepare to decide, by validation data only.

        Args:
            config: the flags.
            best: the best evaluation so far, which the run keeps up to date.
            validation_split: the split of the evaluations during training: "test" if the data have
                no validation split.

        Raises:
            UserError: the flag is set, the run trains, and the data have no validation split.
        """
        self.config = config
        self.best = best
        self.has_announced = False  # whether the user has been told that the run stops early
        # `--evaluate-only` needs no validation data, because it trains nothing that could stop.
        is_used = config.early_stopping is not None and not config.evaluate_only
        if is_used and validation_split != "validation":
            raise UserError(
                "--early-stopping needs validation data, but there are none, and test data must "
                "not decide when to stop",
                advice=(
                    "add a validation split to the data, or with --dataset, pass "
                    "--validation-share 0.1 to hold out a part of the training split"
                ),
            )

    def decide(self, global_step: int) -> bool:
        """Return whether the run ends early, after update `global_step`.

        The first time that the answer is yes, this method prints a line. The flag
        `--early-stopping` takes effect only here, so this method marks the flag as read. If a
        recipe never calls it, the run can thus report that the flag has no effect.
        """
        mark_read(self.config, "early_stopping")
        patience = self.config.early_stopping
        if patience is None or self.best.evaluations_since_best < patience:
            return False
        if not self.has_announced:
            self.has_announced = True
            metric = self.best.objective.metric
            evaluations = counted(self.best.evaluations_since_best, "evaluation")
            reason = "was NaN" if self.best.value is None else "did not improve"
            say(
                f"stopped early after update {global_step}, because {metric} {reason} in "
                f"{evaluations}"
            )
        return True
