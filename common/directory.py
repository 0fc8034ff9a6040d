"""A run's directory: made, locked for one job, and holding `status.json` and what a run writes."""

import contextlib
import functools
import itertools
import math
import os
import platform
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from common.agreement import ask_rank_zero, gather_lists
from common.errors import (
    LETTING_GO,
    LOST_AGAIN,
    Outcome,
    ReplacedDirectoryError,
    UserError,
    let_main_rank_exit_first,
)
from common.files import locked, read_json, read_json_if_there, receipt_of, write_json, writing
from common.identity import signed_config
from common.machine import is_main_rank, rank, several_machines
from common.records import Status, read_record

LOCK, STATUS, CONFIG = ".lock", "status.json", "config.json"
INITIAL = "initial"  # a copy of what `--init-from` named, for a resume to need nothing else
WEIGHTS, FACTS = "model.safetensors", "model.json"  # of a model folder
WEIGHTS_DIGEST = "weights_sha256"  # in FACTS: the SHA-256 of WEIGHTS
# Seconds to wait for another job to leave: as long as one may take to save after a signal.
PATIENCE = 60.0
MOST_LOSSES = 10  # of processes, whose updates `status.json` remembers


class Taken(NamedTuple):
    """What rank 0 settled when it took a run's directory."""

    path: Path
    run_id: str  # random, of this run and of nothing else
    mark: Path  # a file that all machines must see
    is_finished: bool  # there is nothing to resume


class RunDirectory:
    """The files of one run; rank 0 alone writes them."""

    def __init__(
        self,
        asked: str | None,
        recipe: str,
        resume: bool,
        patience: float = PATIENCE,
        is_finished: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create the directory: `asked`, or one named by recipe and time, chosen by rank 0.

        Args:
            is_finished: asked by rank 0 on a resume, once no other job can write here. It raises a
                `UserError` if the run is not the one that the command line was read for.

        Raises:
            UserError: on all ranks. The directory can't be made, holds another run, or is in use
                by a job for longer than `patience`, in seconds, in which the other ranks must not
                lose theirs; or a machine does not see it, whose parts of the checkpoints would be
                lost.
            SystemExit: with status 0, on all ranks, when the run is finished.
        """
        self.named_by_clock = asked is None
        self.lock = contextlib.ExitStack()
        self.has_config = False  # whether this process has written it
        self.seen_at = -math.inf  # clock of the last look at whose directory it is

        def take() -> Taken:
            self.path = make_directory(asked, recipe, resume)
            self.lock.enter_context(locked(self.path / LOCK, min(patience, PATIENCE)))
            # Another job may have used the directory while this one waited for the lock.
            if not resume:
                refuse_to_write_over(self.path)
            elif is_finished():
                return Taken(self.path, "", self.path, True)
            self.run_id = (saved_run_id(self.path) if resume else None) or secrets.token_hex(8)
            # At once: what an earlier attempt ended by says nothing of this one.
            self.write_status("running", None if resume else 0)
            # A new name: a folder that each machine has to itself may hold any other.
            mark = self.path / f".seen-{secrets.token_hex(4)}"
            if several_machines():
                mark.touch()
            return Taken(self.path, self.run_id, mark, False)

        try:
            taken = ask_rank_zero(take)
            self.path, self.run_id = taken.path, taken.run_id
            if several_machines() and not taken.is_finished:
                insist_on_sight(taken.mark, min(patience, PATIENCE))
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

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file on rank 0; a `UserError` if the run's files are gone.

        `config.json` also gets a digest of its contents, by which a resume notices an edit.
        """
        self.insist_on_own()
        if is_main_rank():
            write_json(self.path / name, signed_config(value) if name == CONFIG else value)
        self.has_config = self.has_config or name == CONFIG

    def insist_on_own(self, max_age: float = 0.0) -> None:
        """Raise a `UserError` if the directory was removed, or holds another run by now.

        Whatever is written then would make a folder that looks like a run and is none, or would
        damage the other run.

        Args:
            max_age: the seconds for which an earlier look is enough.
        """
        if not self.has_config or time.monotonic() - self.seen_at < max_age:
            return
        self.seen_at = time.monotonic()
        if is_main_rank():
            is_own = read_run_id(self.path / CONFIG) == self.run_id
        else:  # on a shared file system what another machine wrote may be seen later
            is_own = self.path.is_dir()
        if not is_own:
            raise ReplacedDirectoryError(self.path)

    def write_status(self, status: str, global_step: int | None, reason: str | None = None) -> None:
        """Say on rank 0 how the run stands; ``resumable`` is false where it would end so again."""
        if is_main_rank():
            outcome = Outcome(status, status in ("running", "preempted"), reason)
            write_outcome(self.path, outcome, global_step, run_id=self.run_id)

    def write_failure(self, outcome: Outcome, global_step: int, is_loss: bool = False) -> bool:
        """Say in `status.json` why the run failed; return whether this rank was the first to.

        The first loss of a process at an update may be an accident, which a restart mends. After
        a second one at the same update the run is not resumable, or it would be restarted forever.
        """
        earlier = read_status(self.path)
        if earlier.status == "failed":
            return False
        steps_of_losses = earlier.lost_at_steps
        if is_loss:
            if global_step in steps_of_losses:
                again = LOST_AGAIN.format(step=global_step)
                outcome = outcome._replace(resumable=False, reason=f"{outcome.reason}; {again}")
            steps_of_losses = [*steps_of_losses, global_step][-MOST_LOSSES:]
        with contextlib.suppress(UserError):  # where the disk is full, it is printed all the same
            write_outcome(self.path, outcome, global_step, steps_of_losses=steps_of_losses)
        return True

    def remove_if_unused(self) -> None:
        """Remove a directory that was named by the clock, if the run ended before it began."""
        names = {path.name for path in self.path.glob("*")}
        if is_main_rank() and self.named_by_clock and names <= {STATUS, LOCK}:
            self.release()  # Windows removes no file that is open
            shutil.rmtree(self.path, ignore_errors=True)

    def release(self) -> None:
        self.lock.close()


def insist_on_sight(mark: Path, patience: float) -> None:
    """Raise a `UserError` on all ranks if one does not see a file that rank 0 has made."""
    deadline = time.monotonic() + patience  # NFS may remember that the folder was not there
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    blind = gather_lists([] if mark.exists() else [f"rank {rank()} on {platform.node()}"])
    if is_main_rank():
        mark.unlink(missing_ok=True)
    if blind:
        raise UserError(
            f"{mark.parent.absolute()} is not on a file system that all machines share: "
            f"{', '.join(blind):.200} can't see what rank 0 writes there, and what it saves of a "
            "checkpoint would be lost: name another --output-dir"
        )


def make_directory(asked: str | None, recipe: str, resume: bool) -> Path:
    """Make a run's directory; where none is asked for, one under `runs/` that no other run has."""
    if asked is not None:
        path = Path(asked)
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
    """Raise a `UserError` if a directory holds a run, or what is left of one."""
    if os.path.exists(path / CONFIG):
        advice = "name another, or go on with it by --resume auto"
        raise UserError(f"--output-dir {path} holds a run, which is kept: {advice}")
    if os.path.isdir(path / "checkpoints") and os.listdir(path / "checkpoints"):
        what = f"--output-dir {path} holds checkpoints of a run, which are kept, but no {CONFIG}"
        raise UserError(f"{what}: put that file back and add --resume auto, or name another folder")


def saved_run_id(path: Path) -> str | None:
    """Return the identity of the run in a directory; None of a run of an older version.

    It is in `config.json`. Where that file lacks it, `status.json` and the newest checkpoint may
    still have it.
    """
    manifests = sorted(path.glob("checkpoints/step-*/manifest.json"), reverse=True)
    found = map(read_run_id, (path / CONFIG, path / STATUS, *manifests))
    return next((run_id for run_id in found if run_id is not None), None)


def read_run_id(file: Path) -> str | None:
    """Return the identity that a JSON file of a run names, if it can be read and names one."""
    with contextlib.suppress(UserError):
        run_id = (read_json_if_there(file) or {}).get("run_id")
        return run_id if isinstance(run_id, str) and run_id else None
    return None


def read_status(path: Path) -> Status:
    """Return the contents of a run's `status.json`; an unknown status if it can't be read."""
    with contextlib.suppress(UserError):
        return read_record(path / STATUS, Status)
    return Status()


def write_outcome(
    path: Path,
    outcome: Outcome,
    global_step: int | None = None,
    *,
    run_id: str | None = None,
    steps_of_losses: list[int] | None = None,
) -> None:
    """Write `status.json`; a value that is None stays as an earlier attempt wrote it.

    The updates at which earlier attempts lost a process stay until the run is finished.
    """
    earlier = read_status(path)
    if global_step is None:
        global_step = earlier.global_step
    if steps_of_losses is None:
        steps_of_losses = earlier.lost_at_steps
    facts = {**outcome._asdict(), "global_step": global_step}
    if run_id or earlier.run_id:
        facts["run_id"] = run_id or earlier.run_id
    if steps_of_losses and outcome.status != "finished":
        facts["lost_at_steps"] = steps_of_losses
    write_json(path / STATUS, Status(**facts).to_json())


def model_folder(path: str | Path, flag: str = "--init-from ") -> Path:
    """Return the folder of the model in a run, or of the model itself, which a flag names.

    A `UserError` says that there is none, or that its weights are not those that were written.
    """
    for folder in (Path(path, "model"), Path(path)):
        if os.path.isfile(folder / WEIGHTS) and os.path.isfile(folder / FACTS):
            insist_on_written_weights(folder)
            return folder
    advice = "pass a run that finished, or its model folder"
    raise UserError(f"{flag}{path} holds no finished model ({WEIGHTS} and {FACTS}): {advice}")


def insist_on_written_weights(folder: Path) -> None:
    """Raise a `UserError` if the weights have another digest than the one beside them, if any."""
    path, expected = folder / WEIGHTS, read_json(folder / FACTS).get(WEIGHTS_DIGEST)
    if expected is not None and digest_of_file(path) != expected:
        what = f"{path} can't be read as it was written: its SHA-256 is not the one in {FACTS}"
        advice = f"take a whole copy, or remove {WEIGHTS_DIGEST} there if you changed the weights"
        raise UserError(f"{what}: {advice}")


def digest_of_file(path: Path) -> str:
    """Return a file's SHA-256; one that has not changed since is not read again."""
    try:
        status = path.stat()
        return cached_digest(path, (status.st_mtime_ns, status.st_ctime_ns, status.st_size))
    except OSError as problem:
        raise UserError(f"{path} can't be read: {problem}") from None


@functools.lru_cache(maxsize=16)
def cached_digest(path: Path, stamps: tuple[int, ...]) -> str:
    return receipt_of(path)["sha256"]


def refuse_to_resume(asked: str | Path | None, outcome: Outcome, resume: bool = True) -> None:
    """Say in the status of an unfinished run how the command given failed to go on with it.

    Or a supervisor that starts the command again until the run is done would do so for ever. A
    command that does not ask to `resume` says nothing of a run that is there.
    """
    path = Path(asked or "")
    is_anothers = not resume and os.path.exists(path / CONFIG)
    status = read_status(path).status
    if not is_main_rank() or asked is None or is_anothers or status in ("unknown", "finished"):
        return
    # It may be running, by another command; and what could not be written is printed all the same.
    with contextlib.suppress(UserError), locked(path / LOCK, patience=0):
        write_outcome(path, outcome)
