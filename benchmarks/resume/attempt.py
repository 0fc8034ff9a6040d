"""The instructions for an attempt of a training process, in a file of the training's folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

ATTEMPT_FILE = "attempt.json"
RUN_FOLDER = "run"  # within the folder of the training: checkpoints and logs
TEMPORARY_FOLDER = "temporary"  # also within it: for an attempt that is killed in a save
WEIGHTS_FILE = "final-weights.pt"


@dataclass(frozen=True)
class Attempt:
    """One start of a training, the first or a resumed one."""

    number: int  # from 0
    variant: str  # of the contestant's settings
    stop_after: int | None = None  # the update after whose record the process stops itself
    # Not None: after that stop, it stops again when it has written so many bytes of its checkpoint.
    stop_after_bytes: int | None = None
    is_resumed: bool = False
    checkpoint: str | None = None  # where to resume from, if the framework needs a path

    def write(self, folder: Path) -> None:
        """Write the attempt for the processes that train in `folder`."""
        (folder / ATTEMPT_FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Attempt:
        """Return the attempt that is under way in `folder`."""
        return cls(**json.loads((folder / ATTEMPT_FILE).read_text(encoding="utf-8")))


def record_name(attempt: int, rank: int) -> str:
    """Return the name of the file in which a process records its updates."""
    return f"attempt-{attempt}-rank-{rank}.jsonl"
