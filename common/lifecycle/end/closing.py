"""Closes a run: notes how it ended, and releases what it used."""

from collections.abc import Iterable
from typing import NamedTuple

from common.console import say
from common.console.before_imports import LAUNCHER_TRACEBACKS
from common.console.display import DISPLAY
from common.console.messages import log_line
from common.data.loader import Loader
from common.data.workers.processes import kill_workers
from common.errors import Preempted, TrainingError, UserError
from common.failures.error_causes import is_lost_process, is_out_of_memory, lost_process_in_words
from common.failures.outcomes import Outcome, outcome_of
from common.failures.user_frames import place_in_words, shorten_traceback
from common.lifecycle.end import releasing
from common.lifecycle.end.error_report import claim_report
from common.lifecycle.stages import Context, Stages
from common.lifecycle.tensor_errors import likely_cause_of
from common.measure.memory_limits import lift_limit
from common.run_directory.directory import LOST_AGAIN, LOST_AGAIN_ADVICE, RunDirectory
from common.run_directory.status import read_status
from common.system.launch_variables import is_launched
from common.training.evaluation.rehearsal import Rehearsal
from common.training.out_of_memory import out_of_memory_error

LOST_ADVICE = (
    "look for the message of a process that ended; if there is none, let all processes make the "
    "same calls, such as run.record, run.log, run.save and the evaluation, and none of them under "
    "if accelerator.is_main_process"
)


class NotedFailure(NamedTuple):
    """A failure of this rank, as `status.json` now has it."""

    outcome: Outcome
    step: int
    is_first: bool  # whether no other rank had failed before
    is_lost_again: bool  # whether a process was lost at the same update before


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
        TrainingError, SystemExit: instead of `error`; see `error_to_raise` and `stop_behind`.
    """
    DISPLAY.close()
    ending = stop_behind(error) or error
    loaders = [] if stages.loaded is None else [*stages.loaded.loaders.values()]
    if stages.started is not None:
        stages.started.profiler.stop()
    if isinstance(error, UserError):
        claim_report(context.directory.path.name)
    try:
        if error is not None:
            add_notes(error, rehearsal)
        if ending is not None:
            end_unfinished_run(ending, context, loaders)
    finally:
        releasing.release(context, loaders, ending, is_embedded)
    if ending is not None and ending is not error:
        raise ending from None


def stop_behind(error: BaseException | None) -> Preempted | None:
    """Return the request to stop that an error is, or that it followed from; None without one.

    A signal handler may raise `Preempted` at any line, also within a lock of Python. The lock then
    raises an error of its own, in whose context the request is.
    """
    while error is not None and not isinstance(error, Preempted):
        error = error.__context__
    return error


def add_notes(error: BaseException, rehearsal: Rehearsal) -> None:
    """Add notes to an error: whether it came in the rehearsal, and its likely cause, if known."""
    likely_cause = likely_cause_of(error)
    rehearsal.add_note_to(error, is_explained=likely_cause is not None)
    if likely_cause is not None:
        shorten_traceback(error)
        error.add_note(f"Likely cause: {likely_cause}.")


def end_unfinished_run(error: BaseException, context: Context, loaders: Iterable[Loader]) -> None:
    """Keep what an unfinished run has logged, and note how it ended.

    If this function returns, the caller lets `error` end the process.

    Raises:
        TrainingError, SystemExit: instead of `error`; see `error_to_raise`.
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
        TrainingError, SystemExit: instead of `error`; see `error_to_raise`.
    """
    if not isinstance(error, UserError):
        # Other ranks may be gone, and their files may never come.
        context.checkpoints.shorten_wait()
    failure = note_failure(error, context.directory, outcome, step)
    log_line(f"{outcome.status}: {outcome.reason}")
    context.logs.finish(exit_code=1)
    context.directory.remove_if_unused()
    other_error = error_to_raise(error, failure, context, loaders)
    if other_error is not None:
        raise other_error from None


def note_failure(
    error: BaseException, directory: RunDirectory, outcome: Outcome, step: int
) -> NotedFailure:
    """Note in `status.json` that a run failed, unless another rank has noted its own failure."""
    is_first = directory.write_failure(outcome, step, is_lost_process=is_lost_process(error))
    status = read_status(directory.path)
    # At the second loss of a process at the same update, `write_failure` marks the run as not
    # resumable, although `outcome` is resumable.
    is_lost_again = is_first and outcome.resumable and status.resumable is False
    return NotedFailure(outcome, step, is_first, is_lost_again)


def error_to_raise(
    error: BaseException, failure: NotedFailure, context: Context, loaders: Iterable[Loader]
) -> TrainingError | SystemExit | None:
    """Return the error that is to end the process instead of `error`; None keeps `error`.

    - Another process was lost, or memory ran out: a `TrainingError` says what to do.
    - Another rank failed first, and `error` may only be a consequence of that failure: the rank
      that failed first says why, so this rank exits without a message.
    """
    outcome = failure.outcome
    if failure.is_lost_again:
        problem = f"{outcome.reason}; {LOST_AGAIN.format(step=failure.step)}"
        return TrainingError(problem, advice=LOST_AGAIN_ADVICE, every_rank=True)
    may_follow_from_first = outcome.resumable and not isinstance(error, UserError)
    if may_follow_from_first and not failure.is_first:
        return SystemExit(1)
    if failure.is_first and lost_process_in_words(error) is not None:
        return TrainingError(
            f"{outcome.reason}{place_in_words(error)}",
            advice=LOST_ADVICE,
            every_rank=True,
            resumable=True,
        )
    if is_out_of_memory(error) and failure.is_first:
        device = context.accelerator.device
        return out_of_memory_error(context.config, context.directory.path, device, loaders)
    return None
