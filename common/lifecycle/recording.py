"""What a run does after its updates.

It logs the figures of each log interval. After the first update, it refuses flags that nothing
used.
"""

from pathlib import Path

from common.command_line.flag_reads import unread_flags, unused_flag_error
from common.command_line.flag_uses import find_flag_uses
from common.console import say
from common.errors import UserError
from common.flags import spelled
from common.lifecycle.stages import Context, KeptParts
from common.metric_names import TRAINING_LOSS
from common.ranks.agreement import gather_from_ranks
from common.run_directory.records import Flags
from common.training.rates import learning_rates


def log_interval(context: Context, kept: KeptParts) -> None:
    """Add the figures of the interval that ends here to the row of the current step.

    Raises:
        TrainingError: an update had non-finite gradients, or the loss is NaN.
        UserError: the recipe recorded a metric under a name that the run uses itself, or the run's
            directory no longer belongs to this run.
    """
    context.directory.require_ownership(max_age=1.0)
    values = context.meters.interval()
    context.guard.check(context.progress.global_step, values.get(TRAINING_LOSS, 0.0))
    own_values = {**context.guard.figures(), **learning_rates(kept.optimizers)}
    names_in_both = sorted(values.keys() & own_values.keys())
    if names_in_both:
        name = names_in_both[0]
        raise UserError(
            (
                f"run.record got the metric {name.removeprefix('train/')!r}, but the run itself "
                f"already logs {name}"
            ),
            advice="give the metric another name",
        )
    context.logs.interval({**values, **own_values})


def refuse_unread_flags(context: Context, stated_flags: Flags) -> None:
    """End the run if the user stated a flag that nothing uses; called on all ranks.

    By the end of the first update, the run has used most flags. If the recipe's source has a line
    that may use a flag later, the run goes on. A message then names the line, because the recipe
    may never reach it.

    Args:
        stated_flags: the flags as they were when the run was first started.

    Raises:
        UserError: no rank has used a flag, and no line of the recipe may use it.
    """
    unread_on_rank = unread_flags(context.config, stated_flags)
    unread_on_ranks = gather_from_ranks(context.accelerator, unread_on_rank)
    unread = [name for name in unread_on_rank if all(name in names for names in unread_on_ranks)]
    if not unread:
        return
    uses = find_flag_uses(Path(context.recipe_file))
    for name in unread:
        place = uses.place_of(name)
        if place is None:
            raise unused_flag_error(context.config, name, f"{context.recipe}.py")
        say(
            f"{spelled(name)} was set, but the first update did not use it: check that {place} is "
            f"reached later, or leave {spelled(name)} out"
        )
