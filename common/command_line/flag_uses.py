"""Finds the flags that a recipe's source uses, so that a run can name flags that have no effect.

A recipe may read a flag only in its last lines, in a later epoch, on one rank, or in a process that
loads data. `flag_reads`, which watches the flags that were read so far, would miss these uses. The
source shows them.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common.command_line.flag_reads import TAKES_EFFECT_IN
from common.system.installed_code import is_installed

# Calls that take all flags at once, so that the source names none of them.
CALLS_THAT_COPY = {"vars", "asdict", "astuple", "fields"}


@dataclass
class FlagUses:
    """Where the source of a recipe, and of modules beside it, reads attributes by name."""

    is_known: bool = True  # false where the recipe's source can't be read
    # The first place, as file:line, of each attribute ("seed"), of each attribute of `run` with its
    # owner ("run.should_stop"), and of each string constant.
    lines: dict[str, str] = field(default_factory=dict)
    copies: str | None = None  # the first place where all flags are copied

    def add(self, node: ast.expr, place: str) -> None:
        """Add what an expression reads: an attribute, a text that may name one, or all flags."""
        copies_all = False
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            # Any attribute of this name counts, because the config may have any name.
            self.lines.setdefault(node.attr, place)
            if last_name(node.value) == "run":
                self.lines.setdefault(f"run.{node.attr}", place)
            copies_all = node.attr == "__dict__"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self.lines.setdefault(node.value, place)  # as in getattr(config, "name")
        elif isinstance(node, ast.Call):
            copies_all = last_name(node.func) in CALLS_THAT_COPY
        if copies_all and self.copies is None:
            self.copies = place

    def place_of(self, flag: str) -> str | None:
        """Return where a flag may be used; None if the source uses it nowhere.

        If the source copies all flags at once, any flag may be used there.
        """
        if not self.is_known:
            return "the recipe"
        place = self.lines.get(flag)
        call = TAKES_EFFECT_IN.get(flag)
        # Calls before the loop were over at the first update, so only one in the loop may follow.
        if place is None and call is not None and call.is_in_loop:
            place = self.lines.get(call.name)
        return place or self.copies


def find_flag_uses(recipe_file: Path) -> FlagUses:
    """Look for uses in a recipe's file, and in the modules of the user's own that it imports."""
    uses = FlagUses()
    if not look_into(recipe_file, uses):
        return FlagUses(is_known=False)
    for path in nearby_modules(recipe_file):
        look_into(path, uses)
    return uses


def nearby_modules(recipe_file: Path) -> Iterator[Path]:
    """Yield the files of the user's modules that the recipe has imported.

    They are the modules anywhere in the recipe's folder or in the current directory.
    """
    # Unlike `code_tree.imported_files`, this leaves out `common`, which reads all flags, and the
    # user's modules in other folders, whose attributes may have the names of flags by chance.
    folders = {recipe_file.absolute().parent, Path.cwd()}
    common_folder = Path(__file__).parents[1]
    for module in [*sys.modules.values()]:
        path = Path(getattr(module, "__file__", None) or "")
        if path.suffix != ".py" or path.is_relative_to(common_folder) or is_installed(path):
            continue
        if any(path.is_relative_to(folder) for folder in folders):
            yield path


def look_into(path: Path, uses: FlagUses) -> bool:
    """Add what one file reads; return whether it could be read."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.expr):
            uses.add(node, f"{path.name}:{node.lineno}")
    return True


def last_name(node: ast.expr) -> str:
    """Return the text of an expression behind its last dot, such as "run" for `self.run`."""
    return ast.unparse(node).rpartition(".")[2]
