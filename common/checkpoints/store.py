"""Checkpoints that are whole or not there: written in the background, verified when read.

A checkpoint is a folder ``checkpoints/step-00000120``. Each rank writes its files into
``step-00000120.unfinished`` and then a receipt with their sizes and SHA-256. Once all receipts
are there, rank 0 writes the manifest, syncs, renames the folder and syncs its parent; only then
are old checkpoints removed. What never changes, as frozen weights, is written once, beside the
checkpoints that name it. The ranks meet on the file system they share, so nothing here takes
part in the training's collectives. There is no pickle: safetensors and JSON alone.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

from common.checkpoints.copies import HostCopies
from common.checkpoints.finished import BEST, MANIFEST, is_best, remove_old, step_of
from common.checkpoints.pack import Tensors
from common.checkpoints.shards import parts_of, read_parts
from common.checkpoints.tensors import read_tensors, write_tensors
from common.errors import LostProcessError, ReplacedDirectoryError, UserError, is_of_disk
from common.files import UNFINISHED, json_safe, read_json, signed, write_json
from common.platforms import rename_path, replace_file, sync

HOST = torch.device("cpu")
BESIDE = "../"  # where files that are written once lie, seen from a checkpoint
# Seconds to wait for the files of other ranks once this one has failed.
LAST_PATIENCE = 5.0


@dataclass
class Contents:
    """What one rank puts into a checkpoint: tensors by name of the file, and JSON by part."""

    files: dict[str, Tensors] = field(default_factory=dict)
    once: dict[str, Tensors] = field(default_factory=dict)  # never changing, beside the checkpoints
    shared: dict[str, Any] = field(default_factory=dict)  # of rank 0 alone
    of_rank: dict[str, Any] = field(default_factory=dict)


class OtherRankError(OSError):
    """Another rank could not write its part of a checkpoint. That rank knows the cause."""


@dataclass(frozen=True)
class SaveFailure:
    """Why a rank could not write a checkpoint."""

    message: str
    is_of_disk: bool = False  # a disk is full or fails, which a restart may mend
    is_of_other_rank: bool = False
    is_replaced: bool = False  # the run's directory is not there any more

    @classmethod
    def of(cls, problem: BaseException, rank: int) -> Self:
        text = problem.message if isinstance(problem, UserError) else str(problem)
        return cls(
            f"rank {rank}: {text}",
            is_of_disk=is_of_disk(problem),
            is_of_other_rank=isinstance(problem, OtherRankError),
            is_replaced=isinstance(problem, ReplacedDirectoryError),
        )

    def __str__(self) -> str:
        return self.message


@dataclass
class Checkpoints:
    """The checkpoints of one run, as one rank sees them; the newest `keep` stay."""

    folder: Path
    rank: int
    world_size: int
    keep: int
    patience: float  # seconds to wait for the files of other ranks
    device: torch.device = HOST  # where the state lies that is saved
    writer: threading.Thread | None = None
    failure: SaveFailure | None = None
    lost: LostProcessError | None = None
    last_step: int = -1
    once: dict[str, Any] = field(default_factory=dict)  # receipts of what is written once
    run_id: str | None = None  # of the run that these checkpoints belong to
    # Raises a `UserError` where the run's directory is not that of this run any more.
    insist_on_own: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.host_copies = HostCopies(self.device)

    def save(self, step: int, contents: Contents, facts: Mapping[str, Any]) -> None:
        """Copy this rank's state, and write it in the background; `facts` go into the manifest."""
        self.wait()
        if self.failure is not None or step == self.last_step:
            return
        self.last_step = step
        self.begin(step, contents, facts)

    def save_best(self, step: int, tensors: Tensors) -> None:
        """Copy the best model so far, and write it beside the checkpoints that will name it."""
        self.wait()
        files = parts_of(f"best-{step:08d}", tensors, self.rank, self.world_size)
        self.once = {name: held for name, held in self.once.items() if not BEST.match(name)}
        if self.failure is None and files:
            self.begin(step, Contents(once=files), None)

    def read_best(self, step: int) -> tuple[Path, dict[str, Any]]:
        """Return where the model is that `save_best` wrote, and its tensors."""
        path = self.folder / f"best-{step:08d}.safetensors"
        files = {*self.once} | ({path.name} if path.exists() else set())  # rank 0 alone wrote it
        return path, read_parts(self.folder, path.stem, files) or read_tensors(path)

    def begin(self, step: int, contents: Contents, facts: Mapping[str, Any] | None) -> None:
        once = {n: tensors for n, tensors in contents.once.items() if n not in self.once}
        copies, wait = self.host_copies.begin({**contents.files, **once})
        once = {name: copies.pop(name) for name in once}
        arguments = (step, replace(contents, files=copies, once=once), json_safe(facts), wait)
        self.writer = threading.Thread(target=self.write_or_fail, args=arguments)
        self.writer.start()

    def wait(self) -> None:
        """Wait until what was saved last is on disk, or has failed: then `failure` says how.

        A rank that did not write in time is a LostProcessError at once: it would not answer in a
        collective either, so that the ranks can't agree on this first.
        """
        if self.writer is not None:
            self.writer.join()
            self.writer = None
        if self.lost is not None:
            raise self.lost

    def hurry(self) -> None:
        """Wait no longer for other ranks than they need when they are well: one may be gone."""
        self.patience = min(self.patience, LAST_PATIENCE)

    def write_or_fail(
        self, step: int, contents: Contents, facts: dict[str, Any] | None, wait: Callable[[], None]
    ) -> None:
        unfinished = self.folder / f"step-{step:08d}{UNFINISHED}"
        try:
            wait()
            self.insist_on_own()
            if facts is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                self.write_once(contents.once)
            else:
                self.write(unfinished, contents, facts)
        except LostProcessError as lost:
            self.lost = lost
        except (Exception, UserError) as problem:  # whatever it is, the training must hear of it
            self.failure = SaveFailure.of(problem, self.rank)
            with contextlib.suppress(OSError):
                # Make room first: where the disk is full, nothing else can be written.
                for name in contents.files:
                    (unfinished / name).unlink(missing_ok=True)
                for name in contents.once:
                    (self.folder / f"{name}{UNFINISHED}").unlink(missing_ok=True)
                (unfinished / f"failed-{self.rank}").touch()

    def write_once(self, files: Mapping[str, Tensors]) -> None:
        for name, tensors in files.items():
            unfinished = self.folder / f"{name}{UNFINISHED}"
            named = () if self.run_id is None else ({"run_id": self.run_id},)
            self.once[name] = write_tensors(unfinished, tensors, *named)
            replace_file(unfinished, self.folder / name)
            sync(self.folder)

    def write(self, unfinished: Path, contents: Contents, facts: dict[str, Any]) -> None:
        """Write this rank's files and receipt; on rank 0, wait for all and finish the folder."""
        unfinished.mkdir(parents=True, exist_ok=True)
        self.write_once(contents.once)
        mine = {name: write_tensors(unfinished / name, t) for name, t in contents.files.items()}
        paths = [unfinished / f"receipt-{rank}.json" for rank in range(self.world_size)]
        receipt = {"files": mine, "once": self.once, "state": contents.of_rank}
        write_json(paths[self.rank], receipt)
        finished = unfinished.with_suffix("")
        self.await_files(unfinished, [finished] if self.rank else paths)
        if self.rank != 0:
            return
        receipts = [read_json(path) for path in paths]
        for path in paths:
            path.unlink()
        files = {f"{BESIDE}{name}": one for part in receipts for name, one in part["once"].items()}
        files |= {name: one for receipt in receipts for name, one in receipt["files"].items()}
        states = [receipt["state"] for receipt in receipts]
        manifest = {**facts, "parts": contents.shared, "ranks": states, "files": files}
        write_json(unfinished / MANIFEST, signed(manifest))
        sync(unfinished / MANIFEST)
        sync(unfinished)
        rename_path(unfinished, finished)
        sync(self.folder)
        remove_old(self.folder, self.keep, finished, self.run_id)

    def await_files(self, unfinished: Path, paths: Sequence[Path]) -> None:
        """Wait for a file of each rank, rank 0 first; raise when one failed, or is late."""
        began = time.monotonic()
        while missing := [rank for rank, path in enumerate(paths) if not path.exists()]:
            for rank in range(self.world_size):
                if (unfinished / f"failed-{rank}").exists():
                    raise OtherRankError(f"rank {rank} could not write its part")
            if time.monotonic() > began + self.patience:
                late = f"its part of {unfinished.name} was not there after {self.patience:.0f} s"
                raise LostProcessError(f"rank {missing[0]} timed out: {late}")
            time.sleep(0.01)

    def go_on_from(
        self, path: Path, manifest: Mapping[str, Any], without_best: bool = False
    ) -> None:
        """Take note of what need not be saved again; perhaps the best model was lost."""
        self.last_step = step_of(path)
        beside = [name for name in manifest["files"] if name.startswith(BESIDE)]
        if without_best:
            beside = [name for name in beside if not is_best(name)]
        self.once = {name.removeprefix(BESIDE): manifest["files"][name] for name in beside}
