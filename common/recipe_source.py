"""The text of a recipe's file: kept with a run, and compared whenever the run is resumed.

A checkpoint can't know an activation or a loss that was changed in the recipe. So the run keeps the
text that it was started with, and `config.json` lists the updates at which another text took over.
"""

import ast
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

KEPT = "recipe.py"  # in the run's directory: the text of the first start
MOST_LINES = 40  # of a difference that are printed
LONGEST_LINE = 120
TOKEN = re.compile(r"hf_[A-Za-z0-9]{30,}|wandb_v\d_\w{20,}|gh[pousr]_\w{30,}|github_pat_\w{20,}")


class RecipeSource:
    """A recipe's text as this process runs it, and what a run's directory has of earlier ones."""

    def __init__(self, recipe_file: Path) -> None:
        """Read the file; where it can't be read, nothing is kept and compared."""
        self.text: str | None = None
        self.sha256: str | None = None
        try:
            content = recipe_file.read_bytes()
        except OSError:
            return  # typed in
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.text = TOKEN.sub("***", content.decode("utf-8", "replace"))

    def facts(self, directory: RunDirectory, saved: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Return what `config.json` says of the source, and keep the text where it is new.

        Prints the changed lines if the code is not that of the run so far. Comments, docstrings and
        the ends of lines may change: they train nothing.

        Args:
            saved: what `config.json` says of the run's earlier attempts; empty on a first start.
            step: the update that this attempt goes on from. Changes at later updates are forgotten:
                the run went back to before them.

        Returns:
            ``sha256`` of the first text, and ``changes``: from which ``global_step`` on another
            one was trained with, its ``sha256`` and the name of the ``file`` that has it.
        """
        if self.text is None or self.sha256 is None:
            return dict(saved)
        first, changes = saved.get("sha256"), changes_before(saved, step)
        if not isinstance(first, str):  # a first start, or a run of an older version
            keep(directory, KEPT, self.text)
            return {"sha256": self.sha256, "changes": []}
        last = changes[-1] if changes else {"sha256": first, "file": KEPT}
        for change in changes:
            say(f"the recipe was changed at update {change['global_step']} of this run")
        if last["sha256"] != self.sha256 and not self.is_same_code(directory.path / last["file"]):
            name = f"recipe-at-{step:08d}.py"
            warn(f"the recipe was changed since: from update {step} on the run is another recipe's")
            for line in self.changed_lines(directory.path / str(last["file"])):
                say(line)
            keep(directory, name, self.text)
            changes.append({"global_step": step, "sha256": self.sha256, "file": name})
        return {"sha256": first, "changes": changes}

    def is_same_code(self, path: Path) -> bool:
        """Whether the text at `path` differs in comments, docstrings and line ends alone."""
        try:
            before = path.read_text(encoding="utf-8", errors="replace")
            return code_of(before) == code_of(self.text or "")
        except (OSError, SyntaxError, ValueError, RecursionError):
            return False

    def changed_lines(self, path: Path) -> list[str]:
        """Return a unified difference from the text at `path`, of not too many lines."""
        try:
            before = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return [f"        (what changed is not known: {path} can't be read)"]
        names = ("as it was", "as it is now")
        lines = difflib.unified_diff(
            before.splitlines(), (self.text or "").splitlines(), *names, n=0, lineterm=""
        )
        shown = [f"        {line[:LONGEST_LINE]}" for line in lines]
        if len(shown) > MOST_LINES:
            more = len(shown) - MOST_LINES
            shown = [
                *shown[:MOST_LINES],
                f"        … and {more} lines more; compare it with {path}",
            ]
        return shown


def code_of(text: str) -> str:
    """Return a text that is the same for Python files that do the same by their syntax.

    Raises:
        SyntaxError, ValueError, RecursionError: it is no Python that can be parsed.
    """
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


def changes_before(saved: Mapping[str, Any], step: int) -> list[dict[str, Any]]:
    """Return the changes of the source that a run at this update has trained with."""
    changes = saved.get("changes")
    return [
        dict(change)
        for change in (changes if isinstance(changes, list) else ())
        if isinstance(change, Mapping)
        and isinstance(change.get("global_step"), int)
        and change["global_step"] < step
        and {"sha256", "file"} <= change.keys()
    ]


def keep(directory: RunDirectory, name: str, text: str) -> None:
    if is_main_rank():
        write_text(directory.path / name, text)
