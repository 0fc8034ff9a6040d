"""Restores the newest whole checkpoint of a run."""

from pathlib import Path
from typing import NamedTuple

from common.checkpoints.folders import (
    choose_and_clean_up,
    damage_of_best_model,
    is_of_another_run,
    read_manifest,
    step_folders,
)
from common.checkpoints.same_run import require_same_run
from common.checkpoints.state import Parts
from common.checkpoints.store import Checkpoints
from common.console import say, warn
from common.ranks.agreement import ask_rank_zero
from common.run_directory.records import Manifest, RunIdentity


class Restored(NamedTuple):
    """The result of restoring a checkpoint."""

    manifest: Manifest
    # Whether the best model so far is damaged. If so, the caller must reset the part ``best``,
    # which describes that model.
    has_lost_best: bool


class ResumePoint(NamedTuple):
    """The checkpoint that rank 0 chose for a resume."""

    path: Path | None  # None: no checkpoint is whole
    damage_of_best: str | None  # see `damage_of_best_model`
    had_checkpoints: bool  # whether the run had a checkpoint, whole or damaged


def choose_resume_point(checkpoints: Checkpoints, last_checkpoint: str | None) -> ResumePoint:
    """Choose the checkpoint to restore, and clean up the folder; see `choose_and_clean_up`."""
    folder = checkpoints.folder
    run_id = checkpoints.run_id
    # Look before the folder is cleaned up, because that puts damaged checkpoints aside.
    had_checkpoints = any(not is_of_another_run(path, run_id) for path in step_folders(folder))
    path = choose_and_clean_up(folder, last_checkpoint, run_id)
    damage_of_best = None if path is None else damage_of_best_model(path)
    return ResumePoint(path, damage_of_best, had_checkpoints)


def restore_newest(
    checkpoints: Checkpoints,
    last_checkpoint: str | None,
    parts: Parts,
    identity: RunIdentity,
) -> Restored | None:
    """Restore all parts from the newest whole checkpoint; None if no checkpoint is whole.

    All ranks must call this function. Rank 0 chooses the checkpoint: see `choose_and_clean_up`. It
    warns of each checkpoint that it passes over, because the checkpoint is damaged or another run
    wrote it.

    Args:
        last_checkpoint: the last checkpoint to consider, such as ``step-00000120``; None to
            consider all.
        identity: the identity of this run. The facts in `MUST_MATCH_ON_RESUME`, the ``flags`` and
            the ``parts_described`` must be the same as in the checkpoint.

    Raises:
        UserError: a fact differs, a part does not fit, or no checkpoint up to `last_checkpoint` is
            whole.
    """
    chosen = ask_rank_zero(lambda: choose_resume_point(checkpoints, last_checkpoint))
    path = chosen.path
    if path is None:
        lack = "no undamaged checkpoint" if chosen.had_checkpoints else "no checkpoint"
        say(f"resuming {checkpoints.folder.parent} from its start, because it has {lack}")
        return None
    say(f"resuming {path}")
    has_lost_best = chosen.damage_of_best is not None
    if has_lost_best:
        warn(
            f"the best model so far is lost ({chosen.damage_of_best}), so only models from now on "
            "can become the best: to get it back, stop the run, restore this file from a backup, "
            "and resume again"
        )
    manifest = read_manifest(path)
    require_same_run(path, manifest, identity)
    parts.restore(path, manifest, checkpoints.world_size)
    checkpoints.resume_from(path, manifest, best_is_damaged=has_lost_best)
    return Restored(manifest, has_lost_best)
