"""Takes a run's directory for this job: makes it, locks it, and checks what it contains."""

import contextlib
import itertools
import os
import platform
import secrets
import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from common.errors import UserError
from common.failures.outcomes import Outcome
from common.failures.sentences import writing
from common.ranks.agreement import ask_rank_zero, gather_lists
from common.ranks.rank_exits import let_gloo_release, let_main_rank_exit_first
from common.run_directory.directory import RunDirectory, remove_if_unused
from common.run_directory.effective_batch import ResumableConfig
from common.run_directory.excerpts import excerpt_of
from common.run_directory.identity import saved_run_id
from common.run_directory.records import CHECKPOINTS_FOLDER, CONFIG, STATUS
from common.run_directory.resume import require_unchanged_run, say_finished
from common.run_directory.run_to_resume import read_run
from common.run_directory.status import read_status, write_outcome
from common.storage.files import LOCK, locked
from common.storage.json_files import read_json
from common.system.launch_variables import is_main_rank, rank, several_machines
from common.system.platforms.commands import quoted

# Seconds to wait for another job, which may take this long to save a checkpoint after a signal.
MAX_TIMEOUT = 60.0


class TakenDirectory(NamedTuple):
    """The message of rank 0 to the other ranks after it has taken a run's directory."""

    path: Path
    run_id: str  # random, and unique to this run
    # A file that rank 0 made, and that all machines must see: see `require_shared_folder`.
    mark: Path


def take_run_directory(config: ResumableConfig, recipe: str, timeout: float) -> RunDirectory:
    """Make the directory of a run, or take that of the run to resume; called on all ranks.

    Rank 0 locks the directory for this job. It stays locked until `RunDirectory.release`.

    Args:
        config: the run's flags. If they resume a run, `output_dir` names the run's directory. If
            `output_dir` is None, the run gets a new directory under `runs/`, named by recipe and
            time.
        recipe: the recipe's name.
        timeout: the seconds to wait until another job leaves the directory, and until this machine
            sees it, at most `MAX_TIMEOUT`. It must be shorter than the time after which the other
            ranks give up waiting for rank 0.

    Raises:
        UserError: on all ranks. The directory can't be made, contains another run, or another job
            keeps using it; or a machine does not see it, so that its part of the checkpoints would
            be lost.
        SystemExit: with status 0, on all ranks, if the run to resume is finished.
    """
    timeout = min(timeout, MAX_TIMEOUT)
    lock = contextlib.ExitStack()  # only rank 0 locks the directory
    undo = contextlib.ExitStack()  # what rank 0 undoes if the run can't use the directory
    try:
        taken_directory = ask_rank_zero(
            lambda: take_on_rank_zero(config, recipe, timeout, lock, undo)
        )
        if taken_directory is not None and several_machines():
            require_shared_folder(
                taken_directory.mark, timeout, is_resumed=config.resume is not None
            )
    except UserError:
        undo.close()
        unlock_before_exit(lock)
        let_main_rank_exit_first()
        raise
    if taken_directory is None:
        unlock_before_exit(lock)
        raise SystemExit(0)
    is_removable = is_main_rank() and config.output_dir is None
    return RunDirectory(taken_directory.path, taken_directory.run_id, lock, is_removable)


def take_on_rank_zero(
    config: ResumableConfig,
    recipe: str,
    timeout: float,
    lock: contextlib.ExitStack,
    undo: contextlib.ExitStack,
) -> TakenDirectory | None:
    """Make and lock the directory on rank 0, check it, and write the status ``running``.

    See `take_run_directory` for the other arguments, and for the errors.

    Args:
        lock: gets the lock of the directory.
        undo: gets what to undo if the run can't use the directory.

    Returns:
        What the other ranks need to know; None if the run to resume is finished.
    """
    is_resumed = config.resume is not None
    path = make_directory(config.output_dir, recipe, is_resumed)
    if config.output_dir is None:
        undo.callback(remove_if_unused, path, lock)
    flag = None if is_resumed else "--output-dir"  # a run is resumed in its own directory
    lock.enter_context(locked(path / LOCK, timeout, flag))
    # Another job may have used the directory while this job waited for the lock.
    if is_resumed:
        run = read_run(path, type(config), recipe)
        if run.is_finished():
            say_finished(path)
            return None
        require_unchanged_run(run, config)
    else:
        refuse_to_write_over(path, recipe)
    earlier_run_id = saved_run_id(path) if is_resumed else None
    run_id = earlier_run_id or secrets.token_hex(8)
    # Replace the status of an earlier attempt at once, because it says nothing about this attempt.
    # None keeps the update of the earlier attempt.
    running = Outcome("running", resumable=True, reason=None)
    write_outcome(path, running, None if is_resumed else 0, run_id=run_id)
    return TakenDirectory(path, run_id, make_mark(path))


def make_mark(path: Path) -> Path:
    """Return the path of a file that all machines must see: see `require_shared_folder`.

    With several machines, this also makes the file. A machine that does not share this file system
    may have a folder at the same path, with the mark of an earlier run. The name is random, so that
    the machine does not take that mark for this one.
    """
    mark = path / f".seen-{secrets.token_hex(4)}"
    if several_machines():
        mark.touch()
    return mark


def unlock_before_exit(lock: contextlib.ExitStack) -> None:
    """Unlock the directory before this process exits.

    The ranks have just exchanged objects. Without a wait, gloo may abort the process as it exits:
    see `let_gloo_release`.
    """
    lock.close()
    let_gloo_release()


def require_shared_folder(mark: Path, timeout: float, is_resumed: bool) -> None:
    """Raise a `UserError` on all ranks if one of them does not see a file that rank 0 has made.

    All ranks call this before training, to find machines that do not share the run's file system.
    Rank 0 then removes the file.

    Args:
        mark: the file.
        timeout: the seconds to wait for the file.
        is_resumed: whether the run is resumed, so that `--output-dir` can't name another directory.
    """
    # Wait, because NFS may hide a new folder for some time.
    deadline = time.monotonic() + timeout
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    own_name = [] if mark.exists() else [f"rank {rank()} on {platform.node()}"]
    ranks_without_file = gather_lists(own_name)
    if is_main_rank():  # all ranks have looked for the file by now
        mark.unlink(missing_ok=True)
    if ranks_without_file:
        names = f"{', '.join(ranks_without_file):.200}"
        advice = "pass an --output-dir on a file system that all machines share"
        if is_resumed:
            advice = "move this run to a file system that all machines share, and resume it there"
        raise UserError(
            (
                f"{mark.parent.absolute()} is not on a file system that all machines share: "
                f"{names} can't see what rank 0 writes there, so parts of a checkpoint would be "
                "lost"
            ),
            advice=advice,
        )


def make_directory(output_dir: str | None, recipe: str, is_resumed: bool) -> Path:
    """Make a run's directory and return it: `output_dir`, or a new folder under `runs/`.

    Raises:
        UserError: the directory can't be made, or it contains runs and `is_resumed` is false.
    """
    if output_dir is not None:
        path = Path(output_dir)
        if not is_resumed:
            refuse_to_write_over(path, recipe)
        with writing(str(path) if is_resumed else f"--output-dir {path}"):
            path.mkdir(parents=True, exist_ok=True)
            (path / LOCK).touch()  # raises an error now if the directory can't be written
        return path
    name = f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
    with writing(str(Path("runs").absolute())):
        Path("runs").mkdir(exist_ok=True)
        for number in itertools.count(1):  # another run may have started in the same second
            path = Path("runs", f"{name}-{number}" if number > 1 else name)
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                break
    return path


def refuse_to_write_over(path: Path, recipe: str) -> None:
    """Raise a `UserError` if a directory contains a run, its checkpoints, or folders of runs.

    Args:
        recipe: the recipe of the run that is to start there.
    """
    if os.path.exists(path / CONFIG):
        problem, advice = problem_and_advice(path, recipe)
        raise UserError(f"can't start in --output-dir {path}, because {problem}", advice=advice)
    run = first_run_in(path)
    if run is not None:
        raise UserError(
            f"can't start in --output-dir {path}, because it contains the folders of other runs, "
            f"such as {run.name}",
            advice=f"pass a folder of its own, such as --output-dir {quoted(path / 'NAME')}",
        )
    checkpoints = path / CHECKPOINTS_FOLDER
    if os.path.isdir(checkpoints) and os.listdir(checkpoints):
        mistake = (
            f"can't start in --output-dir {path}, because it contains checkpoints of another run, "
            f"without its {CONFIG}"
        )
        advice = (
            "pass another directory; to continue that run instead, put its config.json back and "
            "add --resume auto"
        )
        raise UserError(mistake, advice=advice)


def problem_and_advice(path: Path, recipe: str) -> tuple[str, str]:
    """Return why no run can start in a directory with a `config.json`, and what to do."""
    saved = excerpt_of({})
    with contextlib.suppress(UserError):  # the file is damaged
        saved = excerpt_of(read_json(path / CONFIG))
    another = "pass another directory"
    if saved.recipe is None and not os.path.exists(path / STATUS):
        return f"it contains a {CONFIG} that is not a run's", another
    if saved.recipe not in (None, recipe):
        return f"it already contains a run of another recipe, {saved.recipe!s:.50}", another
    if read_status(path).status == "finished":
        return "it already contains a run, which is finished", another
    return "it already contains a run", f"{another}, or add --resume auto to continue that run"


def first_run_in(path: Path) -> Path | None:
    """Return the first folder in a directory that is a run's; None if there is none."""
    with contextlib.suppress(OSError):  # there is no such directory, or it can't be read
        for name in sorted(os.listdir(path)):
            if all(os.path.isfile(path / name / file) for file in (CONFIG, STATUS)):
                return path / name
    return None
