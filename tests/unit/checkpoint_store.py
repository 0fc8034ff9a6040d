"""The checkpoints of the made-up run of `manifest_facts`, and of others."""

from __future__ import annotations

from pathlib import Path

import torch

from common.checkpoints import folders
from common.checkpoints.store import Checkpoints
from tests.unit.manifest_facts import FACTS

HOST = torch.device("cpu")
RUN_ID: str = FACTS["run_id"]


def checkpoints_in(
    folder: Path,
    rank: int = 0,
    world_size: int = 1,
    *,
    keep: int = 3,
    timeout: float = 5.0,
    device: torch.device = HOST,
    run_id: str = RUN_ID,
) -> Checkpoints:
    """Return the store of a run's checkpoints, whose folder no other run takes."""
    return Checkpoints(
        folder,
        rank,
        world_size,
        checkpoints_to_keep=keep,
        timeout=timeout,
        device=device,
        run_id=run_id,
        require_ownership=lambda: None,
    )


def newest_whole(
    folder: Path, up_to: str | None = None, run_id: str = RUN_ID
) -> tuple[Path | None, list[str]]:
    """Return the newest whole checkpoint of a run, and what is wrong with newer ones."""
    return folders.newest_whole(folder, up_to, run_id)


def choose(folder: Path, up_to: str | None, run_id: str = RUN_ID) -> Path | None:
    """Return the checkpoint from which a resume of a run goes on, and clean up the folder."""
    return folders.choose_and_clean_up(folder, up_to, run_id)
