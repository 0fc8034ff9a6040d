"""Writes the checkpoints of a run in the background, so that each is complete or absent.

A checkpoint is a folder ``checkpoints/step-00000120``. It is written as follows:

1. Each rank writes its files into ``step-00000120.unfinished``, and then a receipt with their
   sizes and SHA-256.
2. Once the receipts of all ranks exist, rank 0 writes the manifest.
3. Rank 0 syncs the folder, renames it, and syncs its parent.
4. Only then does rank 0 remove old checkpoints.

Lasting files are beside the checkpoints, and many manifests may list the same one. They have the
tensors that never change, such as frozen weights, and the best model so far. Files are safetensors
and JSON; nothing is pickled.

The ranks wait for each other's files on the file system that they share. So the writing threads
need no collective operations, which would get mixed up with those of training.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import JsonValue

from common.checkpoints.copies import HostCopies
from common.checkpoints.folders import best_name, checkpoint_name, is_best, remove_old, step_of
from common.checkpoints.pack import Tensors
from common.checkpoints.publishing import LASTING_FOLDER, publish
from common.checkpoints.save_failure import OtherRankError, SaveFailure
from common.checkpoints.shards import files_of_rank, read_files_of_ranks
from common.checkpoints.tensors import read_tensors, write_tensors
from common.errors import LostProcessError, UserError
from common.run_directory.records import Manifest, RankReceipt, Receipt, RunIdentity
from common.storage.files import UNFINISHED
from common.storage.json_files import write_json
from common.system.platforms.files import replace_file, sync

if TYPE_CHECKING:
    from common.checkpoints.shards import Rows

# Seconds to wait for the files of other ranks once this rank has failed.
TIMEOUT_AFTER_ERROR = 5.0
POLL_SECONDS = 0.01  # seconds between two checks for the files of other ranks


@dataclass
class Contents:
    """The data that one rank writes into a checkpoint."""

    files: dict[str, Tensors] = field(default_factory=dict)  # the tensors of each file, by its name
    lasting_files: dict[str, Tensors] = field(default_factory=dict)  # the same for lasting files
    # The states of the shared parts by name, without their tensors. Only rank 0's are written.
    shared: dict[str, JsonValue] = field(default_factory=dict)
    # The states of this rank's own parts by name, without their tensors.
    of_rank: dict[str, JsonValue] = field(default_factory=dict)


@dataclass
class Checkpoints:
    """Writes and reads the checkpoints of one run, on one rank.

    Saving copies the state, and a thread writes the copies while training goes on.
    """

    folder: Path
    rank: int
    world_size: int
    checkpoints_to_keep: int  # the number of the newest checkpoints that stay
    timeout: float  # seconds to wait for the files of other ranks
    device: torch.device  # the device that holds the state to save
    run_id: str  # the run that these checkpoints belong to
    # Raises a `UserError` if the run's directory no longer belongs to this run.
    require_ownership: Callable[[], None]

    def __post_init__(self) -> None:
        self.host_copies = HostCopies(self.device)
        self.writer: threading.Thread | None = None  # the thread of the latest save, until `wait`
        self.failure: SaveFailure | None = None  # why a save failed; nothing is saved after that
        # Set if another rank's files did not appear in time.
        self.lost_process: LostProcessError | None = None
        self.last_step: int | None = None  # the update of the latest checkpoint, if there is one
        # The receipts of the lasting files that the next manifest lists, by name.
        self.lasting_receipts: dict[str, Receipt] = {}

    def save(self, step: int, contents: Contents, identity: RunIdentity) -> None:
        """Copy this rank's state now, and write it as a checkpoint in the background.

        All ranks must call this function. It first waits for the previous save: see `wait`. If a
        save has failed, it does nothing more.

        Args:
            step: the update that the state is from. A second save at the same step does nothing.
            identity: the run and the update, for the manifest.
        """
        self.wait()
        if self.failure is not None or step == self.last_step:
            return
        self.last_step = step
        write = partial(self.write, self.unfinished_folder(step), identity=identity)
        self.write_in_background(step, contents, write)

    def save_best(self, step: int, tensors: Tensors) -> None:
        """Copy the best model so far, and write it to a lasting file in the background.

        All ranks must call this function. Later checkpoints name this model's files instead of
        those of an earlier best model. Like `save`, this function waits for the previous save, and
        does nothing after a failure.
        """
        self.wait()
        if self.failure is not None:
            return
        # On all ranks, because a resume gave each of them the receipts of the manifest.
        for name in [*self.lasting_receipts]:
            if is_best(name):
                del self.lasting_receipts[name]
        files = files_of_rank(best_name(step), tensors, self.rank, self.world_size)
        if files:  # a rank may have no share of the model
            self.write_in_background(step, Contents(lasting_files=files), self.write_best)

    def read_best(self, step: int) -> "tuple[Path, dict[str, torch.Tensor | Rows]]":
        """Return the path of the model that `save_best` wrote at a step, and its tensors.

        If the model is sharded, its files have other names, and the path is only for messages.

        Raises:
            UserError: a file of the model is missing or can't be read.
        """
        path = self.folder / f"{best_name(step)}.safetensors"
        file_names = {*self.lasting_receipts}
        # A model that is not sharded has one file, which rank 0 wrote, so other ranks lack its
        # receipt.
        if path.exists():
            file_names.add(path.name)
        tensors = read_files_of_ranks(self.folder, path.stem, file_names)
        if not tensors:
            read_tensors(path)  # raises the `UserError` that the file is missing
        return path, tensors

    def unfinished_folder(self, step: int) -> Path:
        """Return the folder of a checkpoint that is being written."""
        return self.folder / f"{checkpoint_name(step)}{UNFINISHED}"

    def write_in_background(
        self, step: int, contents: Contents, write: Callable[[Contents], None]
    ) -> None:
        """Copy tensors to the host, and start a thread that writes the copies.

        Lasting files that were written before are left out.

        Args:
            step: the update that the contents are from.
            write: called in the thread, with the contents and their copied tensors.
        """
        new_files = {
            name: tensors
            for name, tensors in contents.lasting_files.items()
            if name not in self.lasting_receipts
        }
        copies, wait_for_copies = self.host_copies.begin({**contents.files, **new_files})
        lasting_copies = {name: copies.pop(name) for name in new_files}
        copied_contents = replace(contents, files=copies, lasting_files=lasting_copies)
        self.writer = threading.Thread(
            target=self.write_or_note_failure, args=(step, copied_contents, write, wait_for_copies)
        )
        self.writer.start()

    def wait(self) -> None:
        """Wait until the latest save is on disk, or has failed. If it has, `failure` says why.

        Raises:
            LostProcessError: another rank did not write its files in time. The ranks do not agree
                on this error first, because a rank that does not write would not answer either.
        """
        if self.writer is not None:
            self.writer.join()
            self.writer = None
        if self.lost_process is not None:
            raise self.lost_process

    def shorten_wait(self) -> None:
        """Wait only `TIMEOUT_AFTER_ERROR` seconds for the files of other ranks from now on.

        Call it after an error on this rank, because other ranks may have ended without writing
        their files.
        """
        self.timeout = min(self.timeout, TIMEOUT_AFTER_ERROR)

    def write_or_note_failure(
        self,
        step: int,
        contents: Contents,
        write: Callable[[Contents], None],
        wait_for_copies: Callable[[], None],
    ) -> None:
        """Write a save to disk, in the writing thread; keep an error for the training thread.

        Any error but a lost process is also noted for the other ranks.
        """
        try:
            wait_for_copies()
            self.require_ownership()
            write(contents)
        except LostProcessError as lost:
            self.lost_process = lost
        # Catch every error, because the training thread must know it. A `UserError` is not an
        # `Exception`.
        except (Exception, UserError) as problem:
            self.failure = SaveFailure.of(problem, self.rank)
            self.tell_other_ranks_of_failure(self.unfinished_folder(step), contents)

    def tell_other_ranks_of_failure(self, unfinished: Path, contents: Contents) -> None:
        """Remove this rank's files, and leave a file that ends the wait of the other ranks."""
        with contextlib.suppress(OSError):
            # Make room first: nothing can be written to a full disk.
            for name in contents.files:
                (unfinished / name).unlink(missing_ok=True)
            for name in contents.lasting_files:
                (self.folder / f"{name}{UNFINISHED}").unlink(missing_ok=True)
            (unfinished / f"failed-{self.rank}").touch()

    def write_lasting(self, files: Mapping[str, Tensors]) -> None:
        """Write lasting files, and keep their receipts for later manifests.

        Each file's metadata contains the run's id. Until a manifest lists the file, nothing else
        shows which run wrote it.
        """
        metadata = {"run_id": self.run_id}
        for name, tensors in files.items():
            unfinished = self.folder / f"{name}{UNFINISHED}"
            self.lasting_receipts[name] = write_tensors(unfinished, tensors, metadata)
            replace_file(unfinished, self.folder / name)
            sync(self.folder)

    def write_best(self, contents: Contents) -> None:
        """Write the best model, whose files are lasting files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.write_lasting(contents.lasting_files)

    def write(self, unfinished: Path, contents: Contents, identity: RunIdentity) -> None:
        """Write this rank's files and receipt; on rank 0, wait for all, and publish the checkpoint.

        The other ranks wait until rank 0 has renamed the folder. So if the save fails on one rank,
        it fails on every rank.

        Args:
            identity: the run and the update, for the manifest.
        """
        unfinished.mkdir(parents=True, exist_ok=True)
        self.write_lasting(contents.lasting_files)
        receipts = {
            name: write_tensors(unfinished / name, tensors)
            for name, tensors in contents.files.items()
        }
        receipt_paths = [unfinished / f"receipt-{rank}.json" for rank in range(self.world_size)]
        own_receipt = RankReceipt(
            files=receipts, lasting=self.lasting_receipts, of_rank=contents.of_rank
        )
        write_json(receipt_paths[self.rank], own_receipt.to_json())
        finished = unfinished.with_suffix("")  # without the ending `UNFINISHED`
        if self.rank == 0:
            self.await_paths(unfinished, receipt_paths)
            publish(unfinished, finished, receipt_paths, contents.shared, identity)
            remove_old(self.folder, self.checkpoints_to_keep, finished, self.run_id)
        else:
            self.await_paths(unfinished, [finished])

    def await_paths(self, unfinished: Path, paths: Sequence[Path]) -> None:
        """Wait until what other ranks write for a checkpoint exists.

        Args:
            unfinished: the folder of the unfinished checkpoint.
            paths: on rank 0, the receipts of all ranks in order. On other ranks, only the folder of
                the finished checkpoint, which rank 0 renames.

        Raises:
            OtherRankError: a rank could not write its files.
            LostProcessError: a file did not appear within `timeout`.
        """
        began = time.monotonic()
        while True:
            missing_ranks = [rank for rank, path in enumerate(paths) if not path.exists()]
            if not missing_ranks:
                return
            for rank in range(self.world_size):
                if (unfinished / f"failed-{rank}").exists():
                    raise OtherRankError(f"rank {rank} could not write its part")
            if time.monotonic() > began + self.timeout:
                raise LostProcessError(
                    f"rank {missing_ranks[0]} timed out, because it did not write its part of "
                    f"{unfinished.name} within {self.timeout:.0f} s"
                )
            time.sleep(POLL_SECONDS)

    def resume_from(self, path: Path, manifest: Manifest, best_is_damaged: bool) -> None:
        """Note the update of a restored checkpoint, and its lasting files, which exist already.

        Args:
            path: the checkpoint's folder.
            best_is_damaged: whether the best model is damaged. If so, later manifests do not name
                it.
        """
        self.last_step = step_of(path)
        self.lasting_receipts = {}
        for name, receipt in manifest.files.items():
            if name.startswith(LASTING_FOLDER) and not (best_is_damaged and is_best(name)):
                self.lasting_receipts[name.removeprefix(LASTING_FOLDER)] = receipt
