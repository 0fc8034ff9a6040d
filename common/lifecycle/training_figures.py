"""The figures of training in a row: those since the last log line, and the position."""

from common.errors import UserError
from common.lifecycle.stages import Context, StartedRun
from common.metric_names import TRAINING_LOSS, TRAINING_SECONDS
from common.training.plan import Plan
from common.training.rates import learning_rates


def current_position(context: Context, plan: Plan) -> dict[str, float]:
    """Return the figures of the current position: update, epoch, samples, training time."""
    seconds = context.meters.stopwatch.training_seconds
    return plan.position_figures(context.progress.global_step) | {TRAINING_SECONDS: seconds}


def log_interval(started: StartedRun) -> None:
    """Add the figures of the interval that ends here to the row of the current step.

    They include the gradients and the learning rates.

    Raises:
        TrainingError: an update had non-finite gradients, or the loss is NaN.
        UserError: the recipe recorded a metric under a name that the run uses itself, or the run's
            directory no longer belongs to this run.
    """
    context = started.context
    context.directory.require_ownership(max_age=1.0)  # seconds, because log lines may be frequent
    meter_figures = context.meters.end_interval()  # among them the metrics that the recipe recorded
    # Without a loss, there is no NaN to find.
    loss = meter_figures.get(TRAINING_LOSS, 0.0)
    context.guard.check(context.progress.global_step, loss)
    optimizer_figures = {**context.guard.figures(), **learning_rates(started.kept.optimizers)}
    names_in_both = sorted(meter_figures.keys() & optimizer_figures.keys())
    if names_in_both:
        name = names_in_both[0]
        raise UserError(
            (
                f"run.record got the metric {name.removeprefix('train/')!r}, but the run itself "
                f"already logs {name}"
            ),
            advice="give the metric another name",
        )
    context.logs.add_interval({**meter_figures, **optimizer_figures})
