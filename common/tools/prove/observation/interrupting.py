"""Interrupts the run of this process at the planned point."""

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from common.checkpoints import publishing, store
from common.run_directory.records import Receipt, RunIdentity
from common.storage.files import UNFINISHED
from common.tools.prove.observation.launch_plan import PlannedInterruption
from common.tools.prove.observation.session import Session
from common.tools.prove.records.base import Manner
from common.tools.prove.records.run_records import Interruption


class Interrupter:
    """Interrupts a run once: kills all ranks, as a power cut would, or asks the run to stop.

    `RunObserver` calls the methods at the points where a run may be interrupted.
    """

    def __init__(self, session: Session, planned: PlannedInterruption | None) -> None:
        self.session = session
        self.planned = planned
        self.operations_left = 0  # the operations of the current save before the kill
        self.is_in_save = False  # whether a save is in progress in which the run is to be killed
        if planned is not None and planned.manner == "save" and session.rank == 0:
            session.wrap(store.Checkpoints, "write", self.around_write)
            session.wrap(store, "write_tensors", self.around_write_tensors)
            session.wrap(store, "write_json", self.around_write_json)
            session.wrap(publishing, "write_json", self.around_write_json)
            session.wrap(publishing, "rename_path", self.around_rename_path)

    def is_due(self, manner: Manner, step: int) -> bool:
        """Whether an interruption of this manner is planned, for this update or an earlier one."""
        planned = self.planned
        return planned is not None and planned.manner == manner and step >= planned.step

    def after_update(self, step: int, world_size: int) -> None:
        """Interrupt the run between two updates, if the plan says so."""
        if self.is_due("update", step) and self.session.rank == 0:
            self.kill("update", f"after update {step}")
        # The last rank gets the signal, and has to pass it on to the others.
        if self.is_due("stop", step) and self.session.rank == world_size - 1:
            self.write_interruption("stop", f"after update {step}")
            self.planned = None  # the run goes on until it stops, and must not get a second signal
            os.kill(os.getpid(), signal.SIGTERM)

    def before_evaluation_batch(self, number: int, count: int) -> None:
        """Kill the run in an evaluation, if the plan says so.

        Args:
            number: the number of the batch, from 0.
            count: the number of batches in the evaluation.
        """
        step = self.session.step
        if self.session.rank != 0 or not self.is_due("evaluation", step):
            return
        assert self.planned is not None
        if number >= min(count - 1, int(self.planned.share * count)):
            moment = f"before batch {number + 1} of {count} of the evaluation after update {step}"
            self.kill("evaluation", moment)

    # In a save. These methods run in the thread that writes checkpoints.

    def around_write(
        self,
        original: Callable[[store.Checkpoints, Path, store.Contents, RunIdentity], None],
        checkpoints: store.Checkpoints,
        unfinished: Path,
        contents: store.Contents,
        identity: RunIdentity,
    ) -> None:
        """Write a checkpoint. If the run is to be killed in it, first choose the operation."""
        step = int(unfinished.name.removeprefix("step-").removesuffix(UNFINISHED))
        if self.is_due("save", step):
            assert self.planned is not None
            self.is_in_save = True
            # The operations are the files, the receipt, the manifest and the final renaming.
            operations = len(contents.files) + len(contents.lasting_files) + 3
            self.operations_left = int(self.planned.share * operations)
        original(checkpoints, unfinished, contents, identity)
        self.is_in_save = False

    def count_down_to_kill(self) -> bool:
        """Count an operation of a save down, and return whether to kill the run at this one."""
        if not self.is_in_save:
            return False
        self.operations_left -= 1
        return self.operations_left < 0

    def around_write_tensors(
        self, original: Callable[..., Receipt], path: Path, *arguments: object
    ) -> Receipt:
        """Write a file of tensors. If the run is killed here, leave only half of the file."""
        is_killed_here = self.count_down_to_kill()
        receipt = original(path, *arguments)
        if is_killed_here:
            os.truncate(path, path.stat().st_size // 2)
            self.kill("save", f"while {path.parent.name}/{path.name} was written")
        return receipt

    def around_write_json(
        self, original: Callable[[Path, object], None], path: Path, value: object
    ) -> None:
        if self.count_down_to_kill():
            self.kill("save", f"before {path.parent.name}/{path.name} was written")
        original(path, value)

    def around_rename_path(
        self, original: Callable[[Path, Path], None], source: Path, target: Path
    ) -> None:
        if self.count_down_to_kill():
            self.kill("save", f"before {source.name} got its final name")
        original(source, target)

    # The interruption itself

    def write_interruption(self, manner: Manner, moment: str) -> None:
        """Write the record by which the bench knows that this launch was interrupted as planned."""
        step = self.session.step
        self.session.write(Interruption(step=step, manner=manner, moment=moment))

    def kill(self, manner: Manner, moment: str) -> NoReturn:
        """End all ranks at once with SIGKILL."""
        self.write_interruption(manner, moment)
        own_id = os.getpid()
        kill_processes([process for process in self.process_ids() if process != own_id])
        kill_processes([own_id])
        raise SystemExit(1)  # on a system without SIGKILL

    def process_ids(self) -> list[int]:
        """Return the process ids of all ranks, which they wrote when they started."""
        names = f"launch-{self.session.launch}-rank-*.pid"
        return [int(path.read_text(encoding="utf-8")) for path in self.session.folder.glob(names)]


def kill_processes(process_ids: Sequence[int]) -> None:
    """End processes without giving them a chance to save."""
    kill_signal = getattr(signal, "SIGKILL", signal.SIGTERM)
    for process_id in process_ids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, kill_signal)
