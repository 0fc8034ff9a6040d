"""Closes a run: notes how it ended, and releases what it used."""

from collections.abc import Iterable

from common.console import say
from common.console.before_imports import LAUNCHER_TRACEBACKS
from common.console.display import DISPLAY
from common.console.messages import log_line
from common.data.loader import Loader
from common.data.workers.processes import kill_workers
from common.errors import Preempted, TrainingError, UserError
from common.failures.error_causes import is_lost_process, is_out_of_memory
from common.failures.outcomes import Outcome, outcome_of
from common.lifecycle.end import releasing
from common.lifecycle.end.error_report import claim_report
from common.lifecycle.stages import Context, Stages
from common.measure.memory import lift_limit
from common.run_directory.directory import LOST_AGAIN, LOST_AGAIN_ADVICE
from common.run_directory.status import read_status
from common.system.launch_variables import is_launched
from common.training.evaluation.rehearsal import Rehearsal
from common.training.out_of_memory import out_of_memory_error


def close(
    context: Context,
    stages: Stages,
    rehearsal: Rehearsal,
    error: BaseException | None,
    is_embedded: bool,
) -> None:
    """Note how a run ended, and release what it uses.

    Args:
        error: what ended the run early; None for a run that is over.
        is_embedded: whether another program called the recipe: see `launch.notebook.is_embedded`.

    Raises:
        TrainingError, SystemExit: instead of `error`; see `end_failed_run`.
    """
    DISPLAY.close()
    loaders = [] if stages.loaded is None else [*stages.loaded.loaders.values()]
    if stages.started is not None:
        stages.started.profiler.stop()
    if isinstance(error, UserError):
        claim_report(context.directory.path.name)
    try:
        if error is not None:
            rehearsal.add_note_to(error)
            end_unfinished_run(error, context, loaders)
    finally:
        releasing.release(context, loaders, error, is_embedded)


def end_unfinished_run(error: BaseException, context: Context, loaders: Iterable[Loader]) -> None:
    """Keep what an unfinished run has logged, and note how it ended.

    If this function returns, the caller lets `error` end the process.

    Raises:
        TrainingError, SystemExit: instead of `error`; see `end_failed_run`.
    """
    lift_limit()  # a run that met the limit of its memory can then still write its files
    kill_workers()
    # If a resumed run failed before it restored a checkpoint, its progress is still at update 0.
    # `status.json` then has the update at which the earlier attempt ended.
    step = context.progress.global_step or read_status(context.directory.path).global_step
    outcome = outcome_of(error, context.accelerator.process_index)
    if isinstance(error, Preempted):
        end_stopped_run(error, context, outcome, step)
    else:
        end_failed_run(error, context, loaders, outcome, step)


def end_stopped_run(error: Preempted, context: Context, outcome: Outcome, step: int) -> None:
    """Print why a run stopped on request, close its logs, and note the end in `status.json`."""
    say(error.message)
    if error.is_by_ctrl_c and is_launched():
        say(LAUNCHER_TRACEBACKS)
    context.logs.finish()
    context.directory.write_status(outcome.status, step, outcome.reason)


def end_failed_run(
    error: BaseException,
    context: Context,
    loaders: Iterable[Loader],
    outcome: Outcome,
    step: int,
) -> None:
    """Note in `status.json` that a run failed, and close its logs.

    Raises:
        TrainingError: instead of `error`, if memory ran out, or if a process was lost at the same
            update before. The message says what to do.
        SystemExit: instead of `error`, if another rank failed first, and `error` may only be a
            consequence of that failure.
    """
    directory = context.directory
    if not isinstance(error, UserError):
        # Other ranks may be gone, and their files may never come.
        context.checkpoints.shorten_wait()
    is_first_failure = directory.write_failure(
        outcome, step, is_lost_process=is_lost_process(error)
    )
    status = read_status(directory.path)
    # At the second loss of a process at the same update, `write_failure` marks the run as not
    # resumable, although `outcome` is resumable.
    is_lost_again = is_first_failure and outcome.resumable and status.resumable is False
    log_line(f"{outcome.status}: {outcome.reason}")
    context.logs.finish(exit_code=1)
    directory.remove_if_unused()
    if is_lost_again:
        problem = f"{outcome.reason}; {LOST_AGAIN.format(step=step)}"
        raise TrainingError(problem, advice=LOST_AGAIN_ADVICE, every_rank=True) from None
    may_follow_from_first = outcome.resumable and not isinstance(error, UserError)
    if may_follow_from_first and not is_first_failure:
        raise SystemExit(1) from None  # the rank that failed first says why
    if is_out_of_memory(error) and is_first_failure:
        device = context.accelerator.device
        raise out_of_memory_error(context.config, directory.path, device, loaders) from None
