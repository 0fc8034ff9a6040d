"""Keeps the source of a recipe with a run, and compares it whenever the run is resumed.

A checkpoint does not contain the recipe's code, such as its loss. So the run keeps the source that
it was started with. `config.json` lists the updates from which a changed source was used.
"""

import ast
import difflib
from pathlib import Path

from common.console import say, warn
from common.run_directory.directory import RunDirectory
from common.run_directory.records import Source, SourceChange
from common.storage.digests import sha256_of_bytes
from common.storage.files import write_text
from common.system.launch_variables import is_main_rank
from common.system.text_secrets import without_tokens

FIRST_SOURCE = "recipe.py"  # the file in the run's directory with the text of the first start
CHANGED_SOURCE = "recipe-at-{step}.py"  # a changed text, from its first update on
MAX_LINES = 40  # lines of a difference that are printed
MAX_LINE_LENGTH = 120  # characters of a line that are printed


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
        # The digest is that of the file itself. The text that is kept has *** instead of tokens.
        self.sha256 = sha256_of_bytes(content)
        self.text = without_tokens(content.decode("utf-8", "replace"))

    def record(self, directory: RunDirectory, saved: Source, step: int) -> Source:
        """Return the entry of the source for `config.json`, and write a new text to the directory.

        If the code has changed since the run last used it, this prints the changed lines. Comments,
        docstrings and the ends of lines may change, because they don't affect the training. It also
        prints at which updates the source was changed before.

        Args:
            saved: the entry that the run's earlier attempts wrote; an empty entry on a first start.
            step: the update that this attempt goes on from. Changes at this update or later are
                left out of the entry, because the run has gone back to before them.
        """
        if self.text is None or self.sha256 is None:
            return saved
        # A first start, or a run whose recipe was in no file until now.
        if saved.sha256 is None:
            write_on_rank_zero(directory, FIRST_SOURCE, self.text)
            return Source(sha256=self.sha256, code_sha256=self.digest_of_code(), changes=[])
        changes = [change for change in saved.changes if change.global_step < step]
        for change in changes:
            say(f"the recipe was changed at update {change.global_step} of this run")
        # Compare with the source that the run used last, which is from its last change or its
        # start.
        last_sha256 = changes[-1].sha256 if changes else saved.sha256
        last_file = directory.path / (changes[-1].file if changes else FIRST_SOURCE)
        if last_sha256 != self.sha256 and not self.is_same_code(last_file):
            self.say_change(last_file, step)
            name = CHANGED_SOURCE.format(step=f"{step:08d}")
            write_on_rank_zero(directory, name, self.text)
            changes.append(SourceChange(global_step=step, sha256=self.sha256, file=name))
        return saved.model_copy(update={"changes": changes})

    def digest_of_code(self) -> str | None:
        """Return the SHA-256 of the code without comments and docstrings; None if unknown.

        It depends on the version of Python, which a comparison of runs states in any case.
        """
        try:
            return sha256_of_bytes(code_of(self.text or "").encode())
        except (SyntaxError, ValueError, RecursionError):
            return None

    def say_change(self, last_file: Path, step: int) -> None:
        """Print that the recipe was changed, and the lines that differ from `last_file`."""
        warn(
            "the recipe was changed since this run last used it; the change applies from update "
            f"{step} on"
        )
        for line in self.changed_lines(last_file):
            say(line)

    def is_same_code(self, path: Path) -> bool:
        """Whether the text at `path` has the same code as the current recipe.

        Comments, docstrings and line ends may differ. The answer is False if either text can't be
        read or parsed.
        """
        try:
            before = path.read_text(encoding="utf-8", errors="replace")
            return code_of(before) == code_of(self.text or "")
        except (OSError, SyntaxError, ValueError, RecursionError):
            return False

    def changed_lines(self, path: Path) -> list[str]:
        """Return the lines to print: the differences from the text at `path`, cut if they are long.

        If that file can't be read, the only line says so.
        """
        try:
            before = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return [f"        (what changed is not known: {path} can't be read)"]
        names = ("as it was", "as it is now")
        lines = difflib.unified_diff(
            before.splitlines(), (self.text or "").splitlines(), *names, n=0, lineterm=""
        )
        shown = [f"        {line[:MAX_LINE_LENGTH]}" for line in lines]
        if len(shown) > MAX_LINES:
            left_out = len(shown) - MAX_LINES
            shown = [
                *shown[:MAX_LINES],
                f"        … and {left_out} lines more; compare it with {path}",
            ]
        return shown


def latest_source(directory: Path) -> Path | None:
    """Return the file with the recipe's text that a run used last; None if the run kept none."""
    changed_sources = sorted(directory.glob(CHANGED_SOURCE.format(step="*")))
    sources = [directory / FIRST_SOURCE, *changed_sources]
    existing = [path for path in sources if path.is_file()]
    return existing[-1] if existing else None


def code_of(text: str) -> str:
    """Return Python code in a form without comments and docstrings, to compare it.

    Raises:
        SyntaxError, ValueError, RecursionError: the text can't be parsed as Python.
    """
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


def write_on_rank_zero(directory: RunDirectory, name: str, text: str) -> None:
    """Write a text into the run's directory, on rank 0 alone."""
    if is_main_rank():
        write_text(directory.path / name, text)
