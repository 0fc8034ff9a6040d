"""The directory of a run: how it is made, locked for one job, and written to."""

import contextlib
import functools
import itertools
import os
import platform
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import (
    LETTING_GO,
    LOST_AGAIN,
    Outcome,
    UserError,
    ask_rank_zero,
    let_main_rank_exit_first,
)
from common.files import locked, read_json, read_json_if_there, receipt_of, write_json, writing
from common.machine import is_main_rank, rank, several_machines

LOCK, STATUS, CONFIG = ".lock", "status.json", "config.json"
INITIAL = "initial"  # a copy of the model that `--init-from` named, so that a resume needs no other
WEIGHTS, FACTS = "model.safetensors", "model.json"  # of a model folder
WEIGHTS_DIGEST = "weights_sha256"  # in FACTS: the SHA-256 of WEIGHTS
# Seconds to wait for the lock: another job may take this long to save and exit after a signal.
PATIENCE = 60.0
MOST_LOSSES = 10  # losses of a process that `status.json` remembers, by their updates


class Taken(NamedTuple):
    """The directory that rank 0 has taken for this run."""

    path: Path
    run_id: str  # random; belongs to this run alone
    mark: Path  # a file that all machines must see
    is_finished: bool  # whether the run in it is finished, so that there is nothing to resume


class RunDirectory:
    """The files of one run, which only rank 0 writes."""

    def __init__(
        self,
        output_dir: str | None,
        recipe: str,
        resume: bool,
        patience: float = PATIENCE,
        is_finished: Callable[[], bool] = lambda: False,
    ) -> None:
        """Take `output_dir`, or a new directory that rank 0 names by the recipe and the time.

        Args:
            patience: seconds to wait for another job to leave, and for each machine to see the
                directory. The other ranks must wait for rank 0 at least as long.
            is_finished: called by rank 0 on a resume, once no other job can write here. It raises a
                `UserError` if the run is not the one for which the command line was read.

        Raises:
            UserError: on all ranks. The directory can't be made, holds another run, or stays in use
                by another job; or a machine does not see it, and would lose its parts of the
                checkpoints.
            SystemExit: with status 0, on all ranks, if the run is finished.
        """
        self.named_by_clock = output_dir is None
        self.lock = contextlib.ExitStack()
        self.has_config = False  # whether the run has written its `config.json`
        patience = min(patience, PATIENCE)
        try:
            taken = ask_rank_zero(
                lambda: self.take(output_dir, recipe, resume, patience, is_finished)
            )
            self.path = taken.path
            self.run_id = taken.run_id
            if several_machines() and not taken.is_finished:
                insist_on_sight(taken.mark, patience)
        except UserError:
            if hasattr(self, "path"):
                self.remove_if_unused()
            self.release()
            time.sleep(LETTING_GO)
            let_main_rank_exit_first()
            raise
        if taken.is_finished:
            self.release()
            time.sleep(LETTING_GO)
            raise SystemExit(0)

    def take(
        self,
        output_dir: str | None,
        recipe: str,
        resume: bool,
        patience: float,
        is_finished: Callable[[], bool],
    ) -> Taken:
        """Make and lock the directory on rank 0; the arguments are those of `__init__`."""
        self.path = make_directory(output_dir, recipe, resume)
        self.lock.enter_context(locked(self.path / LOCK, patience))
        # Another job may have used the directory while this one waited for the lock.
        if not resume:
            refuse_to_write_over(self.path)
        elif is_finished():
            return Taken(self.path, run_id="", mark=self.path, is_finished=True)
        earlier_id = saved_run_id(self.path) if resume else None
        self.run_id = earlier_id or secrets.token_hex(8)
        # Written at once, because the status of an earlier attempt is not that of this one.
        self.write_status("running", None if resume else 0)
        # A random name. If each machine has a folder of its own under this path, it may hold files
        # of the same name as here.
        mark = self.path / f".seen-{secrets.token_hex(4)}"
        if several_machines():
            mark.touch()
        return Taken(self.path, self.run_id, mark, is_finished=False)

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file on rank 0; a `UserError` if the run's files are gone."""
        self.insist_on_own()
        if is_main_rank():
            write_json(self.path / name, value)
        self.has_config = self.has_config or name == CONFIG

    def insist_on_own(self) -> None:
        """Raise a `UserError` if the directory was removed, or now holds another run.

        A file written there would damage the other run, or make a folder that only looks like a
        run.
        """
        if not self.has_config:
            return
        if is_main_rank():
            is_own = read_run_id(self.path / CONFIG) == self.run_id
        else:  # a shared file system may show the files of another machine with a delay
            is_own = self.path.is_dir()
        if not is_own:
            raise UserError(
                f"{self.path} was removed, moved or replaced while the run wrote to it: start the "
                "run again, and leave its directory in place"
            )

    def write_status(self, status: str, global_step: int | None, reason: str | None = None) -> None:
        """Write the state of the run to `status.json`, on rank 0.

        Only a run with the status "running" or "preempted" is marked as resumable.
        """
        if is_main_rank():
            outcome = Outcome(status, status in ("running", "preempted"), reason)
            write_outcome(self.path, outcome, global_step, run_id=self.run_id)

    def write_failure(self, outcome: Outcome, global_step: int, is_loss: bool = False) -> bool:
        """Write to `status.json` why the run failed, unless another rank already has.

        The first loss of a process at an update may be an accident, and a restart helps. After a
        second loss at the same update, the run is no longer resumable: a supervisor would restart
        it for ever.

        Args:
            is_loss: whether the run failed because it lost a process.

        Returns:
            Whether this rank was the first to report a failure.
        """
        status = read_status(self.path)
        if status.get("status") == "failed":
            return False
        steps_of_losses = losses_in(status)
        if is_loss:
            if global_step in steps_of_losses:
                reason = f"{outcome.reason}; {LOST_AGAIN.format(step=global_step)}"
                outcome = outcome._replace(resumable=False, reason=reason)
            steps_of_losses = [*steps_of_losses, global_step][-MOST_LOSSES:]
        # If the disk is full, the reason is still printed.
        with contextlib.suppress(UserError):
            write_outcome(self.path, outcome, global_step, steps_of_losses=steps_of_losses)
        return True

    def remove_if_unused(self) -> None:
        """Remove a directory that was named by the time, if the run has not written to it yet."""
        names = {path.name for path in self.path.glob("*")}
        if is_main_rank() and self.named_by_clock and names <= {STATUS, LOCK}:
            shutil.rmtree(self.path, ignore_errors=True)

    def release(self) -> None:
        self.lock.close()


def insist_on_sight(mark: Path, patience: float) -> None:
    """Raise a `UserError` on all ranks if one of them does not see a file that rank 0 has made.

    Args:
        patience: seconds to wait for the file, because NFS may cache that the folder is missing.
    """
    from accelerate.utils import gather_object

    deadline = time.monotonic() + patience
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    blind_ranks = gather_object([] if mark.exists() else [f"rank {rank()} on {platform.node()}"])
    if is_main_rank():
        mark.unlink(missing_ok=True)
    if blind_ranks:
        raise UserError(
            f"{mark.parent.absolute()} is not on a file system that all machines share: "
            f"{', '.join(blind_ranks):.200} can't see the files that rank 0 writes there, and its "
            "parts of a checkpoint would be lost: name another --output-dir"
        )


def make_directory(output_dir: str | None, recipe: str, resume: bool) -> Path:
    """Make the directory of a run: `output_dir`, or a new one under `runs/` if it is None."""
    if output_dir is not None:
        path = Path(output_dir)
        if not resume:
            refuse_to_write_over(path)
        with writing(f"--output-dir {path}"):
            path.mkdir(parents=True, exist_ok=True)
            (path / LOCK).touch()
        return path
    name = f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
    with writing("runs"):
        Path("runs").mkdir(exist_ok=True)
        for number in itertools.count(1):
            path = Path("runs", f"{name}-{number}" if number > 1 else name)
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                break
    return path


def refuse_to_write_over(path: Path) -> None:
    """Raise a `UserError` if a directory holds a run, or checkpoints that are left of one."""
    if os.path.exists(path / CONFIG):
        raise UserError(
            f"--output-dir {path} holds a run, which is kept: name another directory, or go on "
            "with this run by --resume auto"
        )
    if os.path.isdir(path / "checkpoints") and os.listdir(path / "checkpoints"):
        raise UserError(
            f"--output-dir {path} holds checkpoints of a run, which are kept, but no {CONFIG}: put "
            "that file back and add --resume auto, or name another directory"
        )


def saved_run_id(path: Path) -> str | None:
    """Return the id of the run in a directory; None if it is of a version that had no ids.

    If `config.json` lacks the id, `status.json` and the newest checkpoint may still have it.
    """
    manifests = sorted(path.glob("checkpoints/step-*/manifest.json"), reverse=True)
    for file in (path / CONFIG, path / STATUS, *manifests):
        run_id = read_run_id(file)
        if run_id is not None:
            return run_id
    return None


def read_run_id(file: Path) -> str | None:
    """Return the run id in a JSON file; None if it is missing, or the file can't be read."""
    with contextlib.suppress(UserError):
        run_id = (read_json_if_there(file) or {}).get("run_id")
        return run_id if isinstance(run_id, str) and run_id else None
    return None


def read_status(path: Path) -> dict[str, Any]:
    """Return the contents of a run's `status.json`; nothing if it is missing or damaged."""
    with contextlib.suppress(UserError):
        return read_json(path / STATUS)
    return {}


def losses_in(status: Mapping[str, Any]) -> list[int]:
    """Return the updates at which attempts of a run lost a process, from its `status.json`."""
    steps = status.get("lost_at_steps")
    if not isinstance(steps, list):
        return []
    return [step for step in steps if isinstance(step, int)]


def write_outcome(
    path: Path,
    outcome: Outcome,
    global_step: int | None = None,
    *,
    run_id: str | None = None,
    steps_of_losses: list[int] | None = None,
) -> None:
    """Write `status.json`.

    The earlier value of an argument that is None stays. `steps_of_losses` are the updates at which
    attempts lost a process; they are dropped once the run is finished.
    """
    earlier = read_status(path)
    step = earlier.get("global_step") if global_step is None else global_step
    facts = {**outcome._asdict(), "global_step": step if isinstance(step, int) else 0}
    if run_id is None and isinstance(earlier.get("run_id"), str):
        run_id = earlier["run_id"]
    if run_id is not None:
        facts["run_id"] = run_id
    losses = losses_in(earlier) if steps_of_losses is None else steps_of_losses
    if losses and outcome.status != "finished":
        facts["lost_at_steps"] = losses
    write_json(path / STATUS, facts)


def model_folder(path: str | Path, flag: str = "--init-from ") -> Path:
    """Return the model folder of a run, or the folder itself if it holds a model.

    Args:
        flag: named the path; stands before it in messages.

    Raises:
        UserError: there is no model, or its weights have changed since they were written.
    """
    for folder in (Path(path, "model"), Path(path)):
        if os.path.isfile(folder / WEIGHTS) and os.path.isfile(folder / FACTS):
            insist_on_written_weights(folder)
            return folder
    raise UserError(
        f"{flag}{path} holds no finished model ({WEIGHTS} and {FACTS}): pass a run that finished, "
        "or its model folder"
    )


def insist_on_written_weights(folder: Path) -> None:
    """Raise a `UserError` if the SHA-256 of the weights differs from the one in FACTS, if any."""
    path = folder / WEIGHTS
    expected = read_json(folder / FACTS).get(WEIGHTS_DIGEST)
    if expected is not None and digest_of_file(path) != expected:
        raise UserError(
            f"{path} can't be read as it was written: its SHA-256 is not the one in {FACTS}: take "
            f"a complete copy, or remove {WEIGHTS_DIGEST} there if you changed the weights"
        )


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 of a file, which is read again only if it has changed."""
    try:
        status = path.stat()
        return cached_digest(path, (status.st_mtime_ns, status.st_ctime_ns, status.st_size))
    except OSError as problem:
        raise UserError(f"{path} can't be read: {problem}") from None


@functools.lru_cache(maxsize=16)
def cached_digest(path: Path, stamps: tuple[int, ...]) -> str:
    return receipt_of(path)["sha256"]


def refuse_to_resume(run: str | Path | None, outcome: Outcome, resume: bool = True) -> None:
    """Write to the status of an unfinished run why this command could not go on with it.

    Otherwise a supervisor that repeats the command until the run is finished would repeat it for
    ever. A command that does not ask to `resume` leaves the status of an existing run alone.
    """
    if run is None or not is_main_rank():
        return
    path = Path(run)
    is_of_another_command = not resume and os.path.exists(path / CONFIG)
    if is_of_another_command or read_status(path).get("status") in (None, "finished"):
        return
    # Another command may be running it, which holds the lock. If the status can't be written, the
    # reason is still printed.
    with contextlib.suppress(UserError), locked(path / LOCK, patience=0):
        write_outcome(path, outcome)
