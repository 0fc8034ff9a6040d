"""The source of a recipe: kept with a run, and compared whenever the run is resumed.

A checkpoint does not show that an activation or a loss was changed in the recipe. So the run keeps
the source that it started with, and `config.json` lists the updates at which the source changed.
"""

import difflib
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.console import say, warn
from common.directory import RunDirectory
from common.files import write_text
from common.machine import is_main_rank

KEPT = "recipe.py"  # the source of the first start, in the run's directory
MOST_LINES = 40  # lines of a difference that are printed
LONGEST_LINE = 120  # characters of each of these lines
TOKEN = re.compile(r"hf_[A-Za-z0-9]{30,}|wandb_v\d_\w{20,}|gh[pousr]_\w{30,}|github_pat_\w{20,}")


class RecipeSource:
    """The source of a recipe as this process runs it."""

    def __init__(self, recipe_file: Path) -> None:
        """Read the file. If it can't be read, nothing is kept or compared."""
        self.text: str | None = None
        self.sha256: str | None = None
        try:
            content = recipe_file.read_bytes()
        except OSError:  # for example, because the recipe was typed into an interpreter
            return
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.text = TOKEN.sub("***", content.decode("utf-8", "replace"))

    def facts(self, directory: RunDirectory, saved: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Return the entry of the source in `config.json`, and keep the source if it is new.

        If the source has changed since the last attempt, the changed lines are printed.

        Args:
            directory: keeps the source.
            saved: the entry that earlier attempts wrote; empty on a first start.
            step: the update from which this attempt goes on. Changes at later updates are dropped,
                because the run has gone back to before them.

        Returns:
            ``sha256`` of the first source, and ``changes``. Each change has the ``global_step``
            from which the run trained with another source, the ``sha256`` of that source, and the
            name of the ``file`` that holds it.
        """
        if self.text is None or self.sha256 is None:
            return dict(saved)
        first = saved.get("sha256")
        changes = changes_before(saved, step)
        if not isinstance(first, str):  # a first start, or a run of an older version
            keep(directory, KEPT, self.text)
            return {"sha256": self.sha256, "changes": []}
        for change in changes:
            say(f"the recipe was changed at update {change['global_step']} of this run")
        last = changes[-1] if changes else {"sha256": first, "file": KEPT}
        if last["sha256"] != self.sha256:
            name = f"recipe-at-{step:08d}.py"
            warn(f"the recipe was changed since: from update {step} on the run is another recipe's")
            for line in self.changed_lines(directory.path / str(last["file"])):
                say(line)
            keep(directory, name, self.text)
            changes.append({"global_step": step, "sha256": self.sha256, "file": name})
        return {"sha256": first, "changes": changes}

    def changed_lines(self, path: Path) -> list[str]:
        """Return a unified difference from the source at `path`, cut to `MOST_LINES` lines."""
        try:
            before = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return [f"        (what changed is not known: {path} can't be read)"]
        difference = difflib.unified_diff(
            before.splitlines(),
            (self.text or "").splitlines(),
            fromfile="as it was",
            tofile="as it is now",
            n=0,
            lineterm="",
        )
        lines = [f"        {line[:LONGEST_LINE]}" for line in difference]
        more = len(lines) - MOST_LINES
        if more <= 0:
            return lines
        return [
            *lines[:MOST_LINES],
            f"        … and {more} more lines; compare the recipe with {path}",
        ]


def changes_before(saved: Mapping[str, Any], step: int) -> list[dict[str, Any]]:
    """Return the well-formed changes of the source that were made before an update."""
    changes = saved.get("changes")
    if not isinstance(changes, list):
        return []
    return [
        dict(change)
        for change in changes
        if isinstance(change, Mapping)
        and isinstance(change.get("global_step"), int)
        and change["global_step"] < step
        and {"sha256", "file"} <= change.keys()
    ]


def keep(directory: RunDirectory, name: str, text: str) -> None:
    if is_main_rank():
        write_text(directory.path / name, text)
