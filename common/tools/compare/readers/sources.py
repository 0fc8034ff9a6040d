"""Read the runs that the arguments of a command line name, each from where it is stored."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from common.errors import UserError
from common.tools.compare.readers.directory import read_directory
from common.tools.compare.readers.run_record import RunRecord
from common.tools.compare.readers.wandb_runs import read_offline, read_project


def read_runs(sources: Sequence[str]) -> list[RunRecord]:
    """Read runs from directories or W&B.

    Runs that share a name get names that tell them apart: see `with_distinct_names`.

    Raises:
        UserError: a source is not a run, or a file of the run is damaged.
    """
    runs = [run for source in sources for run in read_source(source)]
    return with_distinct_names(runs)


def with_distinct_names(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs; those that share a name are called by the end of their source.

    The end has as few folders as tell all runs apart, such as ``first/seed-0``. A source that was
    passed twice is used as it is.
    """
    uses = Counter(run.name for run in runs)
    sources_as_parts = [PurePath(run.source).parts for run in runs]
    longest = max(map(len, sources_as_parts), default=0)
    for length in range(1, longest + 1):
        names = []
        for run, parts in zip(runs, sources_as_parts, strict=True):
            names.append(run.name if uses[run.name] == 1 else "/".join(parts[-length:]))
        if len(set(names)) == len(runs):
            return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
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
