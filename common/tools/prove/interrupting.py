"""Interrupts the run of this process where the proof has planned it."""

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from pydantic import JsonValue

from common.checkpoints import store
from common.files import UNFINISHED
from common.run_directory.records import Receipt
from common.tools.prove.observation import Interrupted
from common.tools.prove.observed import Manner
from common.tools.prove.plan import PlannedInterruption
from common.tools.prove.session import Session

Facts = dict[str, JsonValue]  # of a checkpoint


class Interrupter:
    """Ends all ranks of a run as a power cut would, or asks it to stop, once.

    The observers call the methods at the moments where a run may be interrupted.
    """

    def __init__(self, session: Session, planned: PlannedInterruption | None) -> None:
        self.session = session
        self.planned = planned
        self.operations_left = 0  # of the checkpoint that is being written, before the kill
        self.is_in_save = False
        if planned is not None and planned.manner == "save" and session.rank == 0:
            session.wrap(store.Checkpoints, "write", self.write)
            session.wrap(store, "write_tensors", self.write_tensors)
            session.wrap(store, "write_json", self.write_json)
            session.wrap(store, "rename_path", self.rename_path)

    def is_due(self, manner: Manner, step: int) -> bool:
        planned = self.planned
        return planned is not None and planned.manner == manner and step >= planned.step

    def after_update(self, step: int, world_size: int) -> None:
        """Interrupt the run between two updates, if that is planned here."""
        if self.is_due("update", step) and self.session.rank == 0:
            self.kill("update", f"after update {step}")
        # The last rank gets the signal, so that the ranks have to tell each other.
        if self.is_due("stop", step) and self.session.rank == world_size - 1:
            self.note("stop", f"after update {step}")
            self.planned = None
            os.kill(os.getpid(), signal.SIGTERM)

    def before_evaluation_batch(self, number: int, count: int) -> None:
        """Kill the run in an evaluation, if that is planned here.

        Args:
            number: of the batch, from 0.
            count: how many batches the evaluation has.
        """
        step = self.session.step
        if self.session.rank != 0 or not self.is_due("evaluation", step):
            return
        assert self.planned is not None
        if number >= min(count - 1, int(self.planned.share * count)):
            place = f"before batch {number + 1} of {count} of the evaluation after update {step}"
            self.kill("evaluation", place)

    # In a save. These run in the thread that writes checkpoints.

    def write(
        self,
        original: Callable[[store.Checkpoints, Path, store.Contents, Facts], None],
        checkpoints: store.Checkpoints,
        unfinished: Path,
        contents: store.Contents,
        facts: Facts,
    ) -> None:
        """Count the files of a checkpoint in advance, to be killed at a share of them."""
        step = int(unfinished.name.removeprefix("step-").removesuffix(UNFINISHED))
        if self.is_due("save", step):
            assert self.planned is not None
            self.is_in_save = True
            # All files, the receipt, the manifest and the renaming.
            operations = len(contents.files) + len(contents.lasting_files) + 3
            self.operations_left = int(self.planned.share * operations)
        original(checkpoints, unfinished, contents, facts)
        self.is_in_save = False

    def count_down_to_kill(self) -> bool:
        """Count the operation of a save that comes now; return whether it kills the run."""
        if not self.is_in_save:
            return False
        self.operations_left -= 1
        return self.operations_left < 0

    def write_tensors(
        self, original: Callable[..., Receipt], path: Path, *arguments: object
    ) -> Receipt:
        """Write a file of tensors; if the run is killed here, only half of the file remains."""
        is_killed_here = self.count_down_to_kill()
        receipt = original(path, *arguments)
        if is_killed_here:
            os.truncate(path, path.stat().st_size // 2)
            self.kill("save", f"while {path.parent.name}/{path.name} was written")
        return receipt

    def write_json(
        self, original: Callable[[Path, object], None], path: Path, value: object
    ) -> None:
        if self.count_down_to_kill():
            self.kill("save", f"before {path.parent.name}/{path.name} was written")
        original(path, value)

    def rename_path(
        self, original: Callable[[Path, Path], None], source: Path, target: Path
    ) -> None:
        if self.count_down_to_kill():
            self.kill("save", f"before {source.name} got its final name")
        original(source, target)

    # The ends

    def note(self, manner: Manner, place: str) -> None:
        step = self.session.step
        self.session.write(Interrupted(step=step, manner=manner, place=place))

    def kill(self, manner: Manner, place: str) -> NoReturn:
        """End all ranks at once by SIGKILL."""
        self.note(manner, place)
        own_id = os.getpid()
        kill_processes([process for process in self.processes() if process != own_id])
        kill_processes([own_id])
        raise SystemExit(1)  # on a system without SIGKILL

    def processes(self) -> list[int]:
        """Return the process ids of all ranks of this launch, which they wrote at their start."""
        names = f"launch-{self.session.launch}-rank-*.pid"
        return [int(path.read_text(encoding="utf-8")) for path in self.session.folder.glob(names)]


def kill_processes(processes: Sequence[int]) -> None:
    """End processes without giving them a chance to save."""
    number = getattr(signal, "SIGKILL", signal.SIGTERM)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
