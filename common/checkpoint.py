"""Checkpoints that are whole or not there: written in the background, verified when read.

A checkpoint is a folder ``checkpoints/step-00000120``. Each rank writes its files into
``step-00000120.unfinished`` and then a receipt with their sizes and SHA-256. Once all receipts
are there, rank 0 writes the manifest, syncs, renames the folder and syncs its parent; only then
are old checkpoints removed. The ranks meet on the file system they share, so nothing here takes
part in the training's collectives. There is no pickle: safetensors and JSON alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common.errors import LostProcessError, UserError

MANIFEST = "manifest.json"
UNFINISHED = ".unfinished"
SUPERSEDED = ".superseded"  # by a run that went on from an older one
# Seconds to wait for the files of other ranks once this one has failed.
LAST_PATIENCE = 5.0

Tensors = dict[str, torch.Tensor]


class Checkpoints:
    """The checkpoints of one run, as one rank sees them."""

    def __init__(
        self, folder: Path, rank: int, world_size: int, keep: int, patience: float
    ) -> None:
        """Make none yet.

        Args:
            keep: how many of the newest stay.
            patience: seconds to wait for the files of other ranks.
        """
        self.folder = folder
        self.rank, self.world_size = rank, world_size
        self.keep, self.patience = keep, patience
        self.writer: threading.Thread | None = None
        self.failure: str | None = None
        self.lost: LostProcessError | None = None
        self.last_step = -1

    def save(self, step: int, files: Mapping[str, Tensors], facts: Mapping[str, Any]) -> None:
        """Copy this rank's state, and write it in the background.

        Args:
            files: tensors by name of the file that will hold them.
            facts: what rank 0 adds to the manifest.
        """
        self.wait()
        if self.failure is not None or step == self.last_step:
            return
        self.last_step = step
        copies = {name: copied(tensors) for name, tensors in files.items()}
        arguments = (step, copies, json.loads(json.dumps(facts)))
        self.writer = threading.Thread(target=self.write_or_fail, args=arguments)
        self.writer.start()

    def wait(self) -> None:
        """Wait until what was saved last is on disk, or has failed: then `failure` says how.

        Raises:
            LostProcessError: when another rank did not write its part in time. It would not answer
                in a collective either, so that the ranks can't agree on this first.
        """
        if self.writer is not None:
            self.writer.join()
            self.writer = None
        if self.lost is not None:
            raise self.lost

    def hurry(self) -> None:
        """Wait no longer for other ranks than they need when they are well: one may be gone."""
        self.patience = min(self.patience, LAST_PATIENCE)

    def write_or_fail(self, step: int, files: Mapping[str, Tensors], facts: Any) -> None:
        """Write a checkpoint; a failure is kept for the training to report on all ranks."""
        unfinished = self.folder / f"step-{step:08d}{UNFINISHED}"
        try:
            self.write(unfinished, files, facts)
        except LostProcessError as lost:
            self.lost = lost
        except Exception as problem:  # whatever it is, the training must hear of it
            self.failure = f"rank {self.rank}: {problem}"
            # Make room first: where the disk is full, nothing else can be written.
            for name in files:
                (unfinished / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                (unfinished / f"failed-{self.rank}").touch()

    def write(self, unfinished: Path, files: Mapping[str, Tensors], facts: Any) -> None:
        """Write this rank's files and receipt; on rank 0, wait for all and finish the folder."""
        unfinished.mkdir(parents=True, exist_ok=True)
        receipt = {}
        for name, tensors in files.items():
            receipt[name] = write_tensors(unfinished / name, tensors)
        receipt_path = unfinished / f"receipt-{self.rank}.json"
        write_synced(receipt_path.with_suffix(".part"), json.dumps(receipt).encode())
        os.replace(receipt_path.with_suffix(".part"), receipt_path)
        finished = unfinished.with_name(unfinished.name.removesuffix(UNFINISHED))
        if self.rank != 0:
            self.await_files(unfinished, {0: finished})
            return
        receipts = {r: unfinished / f"receipt-{r}.json" for r in range(self.world_size)}
        self.await_files(unfinished, receipts)
        for path in receipts.values():
            receipt |= json.loads(path.read_text())
            path.unlink()
        manifest = {**facts, "files": receipt}
        manifest["sha256"] = digest_of(manifest)
        write_synced(unfinished / MANIFEST, json.dumps(manifest, indent=2).encode())
        sync_folder(unfinished)
        os.rename(unfinished, finished)
        sync_folder(self.folder)
        for old in [*step_folders(self.folder)[: -self.keep], *self.folder.glob(f"*{SUPERSEDED}")]:
            shutil.rmtree(old)

    def await_files(self, unfinished: Path, paths: Mapping[int, Path]) -> None:
        """Wait until each rank's file exists.

        Raises:
            OSError: when another rank failed.
            LostProcessError: when a rank did not finish in time.
        """
        began = time.monotonic()
        while missing := [rank for rank, path in paths.items() if not path.exists()]:
            for rank in range(self.world_size):
                if (unfinished / f"failed-{rank}").exists():
                    raise OSError(f"rank {rank} could not write its part")
            if time.monotonic() > began + self.patience:
                raise LostProcessError(
                    f"rank {missing[0]} timed out: its part of {unfinished.name} was not there "
                    f"after {self.patience:.0f} s"
                )
            time.sleep(0.01)


def copied(tensors: Tensors) -> Tensors:
    """Return copies in the host's memory, which training does not change.

    In the layout that they have: another one costs time, and is made where nobody waits for it.
    """
    return {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}


def write_tensors(path: Path, tensors: Tensors) -> dict[str, Any]:
    """Write a file of tensors, wait until it is on the disk, and return its size and SHA-256.

    Nothing here holds Python's lock for long, or the training would wait: `safetensors.save`
    into memory does, for 119 ms of 179 MiB.
    """
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": file.tell(), "sha256": digest}


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def step_folders(folder: Path) -> list[Path]:
    """Return the finished checkpoints in `folder`, oldest first."""
    return sorted(path for path in folder.glob("step-*") if not path.suffix)


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed save left behind."""
    for path in folder.glob(f"*{UNFINISHED}"):
        shutil.rmtree(path)


def supersede(folder: Path, chosen: Path | None) -> None:
    """Put aside what is newer than the checkpoint that a run goes on from, or was passed over.

    It is removed once a new checkpoint is whole; till then nothing takes it for the newest.
    """
    for path in step_folders(folder):
        if chosen is None or path.name > chosen.name:
            aside = path.with_name(path.name + SUPERSEDED)
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(path, aside)


def digest_of(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of what a manifest says, but for its own digest."""
    said = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, naming the file; None if it is whole."""
    try:
        manifest = read_manifest(checkpoint)
    except UserError as error:
        return error.message
    for name, expected in manifest["files"].items():
        path = checkpoint / name
        if not path.is_file():
            return f"{path} is missing"
        data = path.read_bytes()
        if len(data) != expected["size"]:
            return f"{path} has {len(data):,} bytes instead of {expected['size']:,}"
        if hashlib.sha256(data).hexdigest() != expected["sha256"]:
            return f"{path} is not what was written: its SHA-256 differs"
    return None


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest.

    Raises:
        UserError: when it is missing or not one.
    """
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        if manifest["sha256"] == digest_of(manifest):
            return manifest
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    raise UserError(f"{path} is missing or damaged")


def newest_whole(folder: Path, named: str | None = None) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that is whole, and what is wrong with those after it.

    Args:
        named: of the newest one to consider; None for all.
    """
    problems: list[str] = []
    for checkpoint in reversed(step_folders(folder)):
        if named is not None and checkpoint.name > named:
            continue
        problem = damage(checkpoint)
        if problem is None:
            return checkpoint, problems
        problems.append(problem)
    return None, problems


def read_tensors(checkpoint: Path, name: str) -> Tensors:
    """Return the tensors of one file of a checkpoint.

    Raises:
        UserError: when it holds anything else; nothing in it is ever executed.
    """
    try:
        return load_file(checkpoint / name)
    except (SafetensorError, OSError) as problem:
        raise UserError(f"{checkpoint / name} can't be read: {problem}") from None
