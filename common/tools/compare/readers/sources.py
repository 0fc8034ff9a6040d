"""Read the runs that the arguments of a command line name, each from where it is stored."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from common.errors import UserError
from common.tools.compare.readers.directory import read_directory
from common.tools.compare.readers.run_record import RunRecord
from common.tools.compare.readers.wandb_runs import read_offline, read_project


def read_runs(sources: Sequence[str]) -> list[RunRecord]:
    """Read runs from directories or W&B.

    Runs that share a name are called by their source instead.

    Raises:
        UserError: a source is not a run, or a file of the run is damaged.
    """
    runs = [run for source in sources for run in read_source(source)]
    uses = Counter(run.name for run in runs)
    return [replace(run, name=run.source) if uses[run.name] > 1 else run for run in runs]


def read_source(source: str) -> list[RunRecord]:
    """Read the run, or the runs of a project, that an argument of the command line names.

    Raises:
        UserError: the argument does not name a run, or a file of the run is damaged.
    """
    path = Path(os.path.expanduser(source))
    if os.path.isdir(path):
        # Only W&B's offline folders have a file with this suffix.
        files = sorted(path.glob("*.wandb"))
        return [read_offline(files[0]) if files else read_directory(path)]
    if path.suffix == ".wandb" and os.path.isfile(path):
        return [read_offline(path)]
    if os.path.exists(path):
        raise UserError(
            f"{source} is a file", advice="pass the directory of the run, such as runs/NAME"
        )
    if re.fullmatch(r"[\w.-]+/[\w.-]+(/[\w.-]+)?", source):
        return read_project(source)
    raise UserError(
        f"there is no folder {source}",
        advice=(
            "pass the directory of a run, such as runs/NAME, a folder wandb/offline-run-*, or "
            "ENTITY/PROJECT for a W&B project"
        ),
    )
