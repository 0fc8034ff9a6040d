"""Publishes a checkpoint, once the files of all ranks are complete.

It writes the manifest, and renames the folder. The order of these steps is in `store`.
"""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from common.checkpoints.folders import step_of
from common.errors import UserError
from common.run_directory.record_files import read_record
from common.run_directory.records import (
    CHECKPOINT_DIGESTS,
    MANIFEST,
    CheckpointDigests,
    Manifest,
    PartStates,
    RankReceipt,
    Receipt,
    RunIdentity,
)
from common.storage.digests import signed
from common.storage.files import open_to_append
from common.storage.json_files import write_json
from common.system.platforms.files import rename_path, sync

# The folder of the lasting files, relative to a checkpoint. These files have frozen weights or the
# best model so far, and may belong to several checkpoints.
LASTING_FOLDER = "../"


def publish(
    unfinished: Path,
    finished: Path,
    receipt_paths: Sequence[Path],
    shared: PartStates,
    identity: RunIdentity,
) -> None:
    """Write the manifest of a checkpoint whose files are complete, and give it its final name.

    The folder gets this name only when everything in it is on the disk. So a folder with such a
    name is never half written, even after a crash.

    Args:
        unfinished: the checkpoint's folder.
        finished: the folder's final name.
        receipt_paths: the receipts of all ranks, in order. Their contents go into the manifest, and
            the files are removed.
        shared: the states of the shared parts by name, without their tensors.
        identity: the run and the update, for the manifest.
    """
    rank_receipts = [read_record(path, RankReceipt) for path in receipt_paths]
    for path in receipt_paths:
        path.unlink()
    manifest = manifest_of(rank_receipts, shared, identity)
    write_json(unfinished / MANIFEST, signed(manifest.to_json()))
    sync(unfinished / MANIFEST)
    sync(unfinished)
    rename_path(unfinished, finished)
    sync(finished.parent)
    note_digests(finished, rank_receipts)


def note_digests(checkpoint: Path, rank_receipts: Sequence[RankReceipt]) -> None:
    """Add the digests of a checkpoint's files to a list that outlives the checkpoint.

    `recipes reproduce` compares them with those of another run. Lasting files are left out: they
    contain the id of their run, so their digests always differ.
    """
    digests: dict[str, str] = {}
    for rank_receipt in rank_receipts:
        digests |= {name: receipt.sha256 for name, receipt in rank_receipt.files.items()}
    line = CheckpointDigests(step=step_of(checkpoint), files=digests).to_json()
    run_directory = checkpoint.parents[1]
    path = run_directory / CHECKPOINT_DIGESTS
    # Ignore errors, because the checkpoint is complete and training does not need this line.
    with contextlib.suppress(OSError, UserError):
        path.parent.mkdir(exist_ok=True)
        with open_to_append(path) as file:
            file.write(json.dumps(line) + "\n")


def manifest_of(
    rank_receipts: Sequence[RankReceipt], shared: PartStates, identity: RunIdentity
) -> Manifest:
    """Return the manifest of the files and states that all ranks have written.

    Args:
        rank_receipts: the receipts of all ranks, in order.
        shared: the states of the shared parts by name, without their tensors.
        identity: the run and the update.
    """
    files: dict[str, Receipt] = {}
    for rank_receipt in rank_receipts:
        for name, receipt in rank_receipt.lasting.items():
            files[f"{LASTING_FOLDER}{name}"] = receipt
    for rank_receipt in rank_receipts:
        files |= rank_receipt.files
    of_ranks = [rank_receipt.of_rank for rank_receipt in rank_receipts]
    entries = {**identity.to_json(), "shared": shared, "of_ranks": of_ranks, "files": files}
    return Manifest.model_validate(entries)
