"""The source of a recipe, kept with a run and compared whenever the run is resumed.

A checkpoint does not contain the recipe's code, such as its loss. So the run keeps the source that
it was started with, and `config.json` lists the updates at which changed source took over.
"""

import ast
import difflib
import hashlib
from pathlib import Path

from common.console import say, warn
from common.files import write_text
from common.run_directory.directory import RunDirectory
from common.run_directory.records import Source, SourceChange
from common.system.machine import is_main_rank
from common.system.printable import without_tokens

FIRST_SOURCE = "recipe.py"  # the file in the run's directory with the text of the first start
MOST_LINES = 40  # lines of a difference that are printed
LONGEST_LINE = 120


class RecipeSource:
    """The recipe's source in this process, to keep in the run directory or compare with it."""

    def __init__(self, recipe_file: Path) -> None:
        """Read the file; if it can't be read, nothing is kept or compared."""
        self.text: str | None = None
        self.sha256: str | None = None
        try:
            content = recipe_file.read_bytes()
        except OSError:
            return  # the recipe was typed into an interpreter
        # The digest is that of the file itself, although the text that is kept has no tokens.
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.text = without_tokens(content.decode("utf-8", "replace"))

    def record(self, directory: RunDirectory, saved: Source, step: int) -> Source:
        """Return the entry of the source in `config.json`, and keep the text where it is new.

        Prints the changed lines if the code is not that of the run so far. Comments, docstrings and
        the ends of lines may change: they train nothing.

        Args:
            saved: the entry that the run's earlier attempts wrote; an empty entry on a first start.
            step: the update that this attempt goes on from. Changes at later updates are forgotten:
                the run went back to before them.
        """
        if self.text is None or self.sha256 is None:
            return saved
        if saved.sha256 is None:  # a first start, or a run of an older version
            keep(directory, FIRST_SOURCE, self.text)
            return Source(sha256=self.sha256, changes=[])
        changes = [change for change in saved.changes if change.global_step < step]
        for change in changes:
            say(f"the recipe was changed at update {change.global_step} of this run")
        # Compare with the source that the run used last, which is from its last change or its
        # start.
        last_sha256 = changes[-1].sha256 if changes else saved.sha256
        last_file = directory.path / (changes[-1].file if changes else FIRST_SOURCE)
        if last_sha256 != self.sha256 and not self.is_same_code(last_file):
            self.tell_change(last_file, step)
            name = f"recipe-at-{step:08d}.py"
            keep(directory, name, self.text)
            changes.append(SourceChange(global_step=step, sha256=self.sha256, file=name))
        return Source(sha256=saved.sha256, changes=changes)

    def tell_change(self, last_file: Path, step: int) -> None:
        """Print that the recipe was changed, and the lines that differ from `last_file`."""
        warn(
            f"the recipe was changed since the run was last saved; it applies from update {step} on"
        )
        for line in self.changed_lines(last_file):
            say(line)

    def is_same_code(self, path: Path) -> bool:
        """Whether the text at `path` differs in comments, docstrings and line ends alone.

        The answer is False if either text can't be read or parsed: nothing shows then that they
        agree.
        """
        try:
            before = path.read_text(encoding="utf-8", errors="replace")
            return code_of(before) == code_of(self.text or "")
        except (OSError, SyntaxError, ValueError, RecursionError):
            return False

    def changed_lines(self, path: Path) -> list[str]:
        """Return the lines to print: a unified difference from the text at `path`, cut if long."""
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
    """Return a text that is equal for Python files with the same code, whatever their comments.

    Raises:
        SyntaxError, ValueError, RecursionError: the text is no Python that can be parsed.
    """
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


def keep(directory: RunDirectory, name: str, text: str) -> None:
    """Write a text into the run's directory, on rank 0 alone."""
    if is_main_rank():
        write_text(directory.path / name, text)
