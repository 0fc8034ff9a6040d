"""Turns the errors of a wait for workers into the errors that a user sees."""

from common.data.workers.watch import Watch, WorkerNames
from common.errors import LostProcessError, UserError
from common.system.platforms.limits import descriptor_limit

# A part of the error that torch raises if a DataLoader's worker was killed or has exited.
WORKER_GONE = "DataLoader worker (pid"
TOO_MANY_FILES = "Too many open files"


def meaning_of_error(
    error: Exception | UserError, watch: Watch, timeout: float, names: WorkerNames
) -> Exception | UserError | None:
    """Return the error to raise after an error in a wait for workers.

    Args:
        error: the error of torch's loader.
        watch: the watch over the workers.
        timeout: seconds to wait for one batch.
        names: how messages name the workers.

    Returns:
        - `error` itself, if it came from the data set
        - a `UserError`, if no batch came in time or this process has too few file descriptors
        - a `LostProcessError`, if a worker was killed or has exited
        - None, if the watch killed the workers because a stop was requested
    """
    error_text = str(error).strip()
    lacks_files = TOO_MANY_FILES in error_text
    is_lost = WORKER_GONE in error_text or isinstance(error, (ConnectionError, EOFError))
    # torch begins the text of an error from inside a worker with "Caught".
    is_from_dataset = error_text.startswith("Caught")
    is_from_waiting = is_lost or lacks_files
    if is_from_dataset or not is_from_waiting:
        return error
    if watch.kill_reason == "no batch came":
        return no_batch_error(timeout, watch.were_stopped, names)
    if lacks_files:
        return too_many_files_error(names)
    if watch.kill_reason == "stop requested":
        return None
    return LostProcessError(f"one of {names.name} has ended ({error_text})")


def no_batch_error(seconds: float, were_stopped: bool, names: WorkerNames) -> UserError:
    """Return the error for a wait in which no batch came.

    Args:
        seconds: the length of the wait.
        were_stopped: whether a signal stopped some of the workers.
        names: how to name the workers.
    """
    problem = f"nothing came for {seconds:.0f} s from {names.name}"
    advice = "start the run again"
    if were_stopped:
        problem += ", because some of them were stopped by a signal"
    elif names.timeout_flag is not None:
        advice += f", or allow slow data more time with {names.timeout_flag} SECONDS"
    return UserError(problem, advice=advice, every_rank=True, resumable=True)


def too_many_files_error(names: WorkerNames) -> UserError:
    """Return the error for a process with too few file descriptors for its workers' batches."""
    limit = descriptor_limit()
    remedies = []
    if limit is not None:
        remedies.append(f"raise the limit with ulimit -n {max(4096, 4 * limit)}")
    if names.count_flag is not None:
        remedies.append(f"pass {names.count_flag} 0")
    return UserError(
        f"{names.name} need more open files than this process may have",
        advice=", or ".join(remedies or ["end other programs"]),
        every_rank=True,
    )
