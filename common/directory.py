"""A run's directory: made, locked for one job, and holding `status.json` and what a run writes."""

import contextlib
import itertools
import os
import platform
import secrets
import shutil
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from common.errors import (
    LETTING_GO,
    LOST_AGAIN,
    Outcome,
    UserError,
    ask_rank_zero,
    let_main_rank_exit_first,
)
from common.files import locked, read_json, write_json, writing
from common.machine import is_main_rank, rank, several_machines

LOCK, STATUS = ".lock", "status.json"
INITIAL = "initial"  # a copy of what `--init-from` named, for a resume to need nothing else
WEIGHTS, FACTS = "model.safetensors", "model.json"  # of a model folder
# Seconds to wait for another job to leave: as long as one may take to save after a signal.
PATIENCE = 60.0
MOST_LOSSES = 10  # of processes, whose updates `status.json` remembers


class RunDirectory:
    """The files of one run; rank 0 alone writes them."""

    def __init__(self, asked: str | None, recipe: str, resume: bool, patience: float = PATIENCE):
        """Create the directory: `asked`, or one named by recipe and time, chosen by rank 0.

        A `UserError`, on all ranks: it can't be made, holds another run, or is in use by a job
        for longer than `patience`, in seconds, in which the other ranks must not lose theirs; or
        a machine does not see it, whose parts of the checkpoints would be lost.
        """
        self.named_by_clock = asked is None
        self.lock = contextlib.ExitStack()

        def take() -> tuple[Path, Path]:
            self.path = make_directory(asked, recipe, resume)
            self.lock.enter_context(locked(self.path / LOCK, min(patience, PATIENCE)))
            # At once: what an earlier attempt ended by says nothing of this one.
            self.write_status("running", None if resume else 0)
            # A new name: a folder that each machine has to itself may hold any other.
            mark = self.path / f".seen-{secrets.token_hex(4)}"
            if several_machines():
                mark.touch()
            return self.path, mark

        try:
            self.path, mark = ask_rank_zero(take)
            if several_machines():
                insist_on_sight(mark, min(patience, PATIENCE))
        except UserError:
            if hasattr(self, "path"):
                self.remove_if_unused()
            self.release()
            time.sleep(LETTING_GO)
            let_main_rank_exit_first()
            raise

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        if is_main_rank():
            write_json(self.path / name, value)

    def write_status(self, status: str, global_step: int | None, reason: str | None = None) -> None:
        """Say on rank 0 how the run stands; ``resumable`` is false where it would end so again."""
        if is_main_rank():
            outcome = Outcome(status, status in ("running", "preempted"), reason)
            write_outcome(self.path, outcome, global_step)

    def write_failure(self, outcome: Outcome, global_step: int, is_loss: bool = False) -> bool:
        """Say in `status.json` why the run failed; return whether this rank was the first to.

        The first loss of a process at an update may be an accident, which a restart mends. After
        a second one at the same update the run is not resumable, or it would be restarted forever.
        """
        status = read_status(self.path)
        if status.get("status") == "failed":
            return False
        steps_of_losses = losses_in(status)
        if is_loss:
            if global_step in steps_of_losses:
                again = LOST_AGAIN.format(step=global_step)
                outcome = outcome._replace(resumable=False, reason=f"{outcome.reason}; {again}")
            steps_of_losses = [*steps_of_losses, global_step][-MOST_LOSSES:]
        with contextlib.suppress(UserError):  # where the disk is full, it is printed all the same
            write_outcome(self.path, outcome, global_step, steps_of_losses)
        return True

    def remove_if_unused(self) -> None:
        """Remove a directory that was named by the clock, if the run ended before it began."""
        names = {path.name for path in self.path.glob("*")}
        if is_main_rank() and self.named_by_clock and names <= {STATUS, LOCK}:
            shutil.rmtree(self.path, ignore_errors=True)

    def release(self) -> None:
        self.lock.close()


def insist_on_sight(mark: Path, patience: float) -> None:
    """Raise a `UserError` on all ranks if one does not see a file that rank 0 has made."""
    from accelerate.utils import gather_object

    deadline = time.monotonic() + patience  # NFS may remember that the folder was not there
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    blind = gather_object([] if mark.exists() else [f"rank {rank()} on {platform.node()}"])
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
        if not resume and os.path.exists(path / "config.json"):
            advice = "name another, or go on with it by --resume auto"
            raise UserError(f"--output-dir {path} holds a run, which is kept: {advice}")
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


def read_status(path: Path) -> dict[str, Any]:
    """Return what a run's `status.json` holds; nothing where it is missing or damaged."""
    with contextlib.suppress(UserError):
        return read_json(path / STATUS)
    return {}


def losses_in(status: Mapping[str, Any]) -> list[int]:
    """Return at which updates attempts of a run lost a process, by its `status.json`."""
    steps = status.get("lost_at_steps")
    return [step for step in steps if isinstance(step, int)] if isinstance(steps, list) else []


def write_outcome(
    path: Path,
    outcome: Outcome,
    global_step: int | None = None,
    steps_of_losses: list[int] | None = None,
) -> None:
    """Write `status.json`; without a step it keeps the one that an earlier attempt came to.

    It also keeps at which updates earlier attempts lost a process, until the run is finished.
    """
    earlier = read_status(path)
    step = earlier.get("global_step") if global_step is None else global_step
    facts = {**outcome._asdict(), "global_step": step if isinstance(step, int) else 0}
    losses = losses_in(earlier) if steps_of_losses is None else steps_of_losses
    if losses and outcome.status != "finished":
        facts["lost_at_steps"] = losses
    write_json(path / STATUS, facts)


def model_folder(path: str | Path, flag: str = "--init-from ") -> Path:
    """Return the folder of the model in a run, or of the model itself, which a flag names."""
    for folder in (Path(path, "model"), Path(path)):
        if os.path.isfile(folder / WEIGHTS) and os.path.isfile(folder / FACTS):
            return folder
    advice = "pass a run that finished, or its model folder"
    raise UserError(f"{flag}{path} holds no finished model ({WEIGHTS} and {FACTS}): {advice}")


def refuse_to_resume(asked: str | Path | None, outcome: Outcome, resume: bool = True) -> None:
    """Say in the status of an unfinished run how the command given failed to go on with it.

    Or a supervisor that starts the command again until the run is done would do so for ever. A
    command that does not ask to `resume` says nothing of a run that is there.
    """
    path = Path(asked or "")
    is_anothers = not resume and os.path.exists(path / "config.json")
    status = read_status(path).get("status")
    if not is_main_rank() or asked is None or is_anothers or status in (None, "finished"):
        return
    # It may be running, by another command; and what could not be written is printed all the same.
    with contextlib.suppress(UserError), locked(path / LOCK, patience=0):
        write_outcome(path, outcome)
