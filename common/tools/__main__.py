"""The command `recipes`, which runs one of the tools.

`python -m common.tools` is the same command, for example where no virtual environment is active.
"""

import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from common.errors import UserError
from common.output.standard_streams import end_on_lost_output


class Tool(NamedTuple):
    """A subcommand. Its module is imported only when it runs, so that help stays quick."""

    module: str  # the full name of a module that has a function `main(words)`
    summary: str  # a line in the list of tools


TOOLS = {
    "compare": Tool("common.tools.compare.command", "compare runs with the first of them"),
    "vary": Tool("common.tools.vary.command", "train variants of a recipe and compare them"),
    "tune": Tool("common.tools.tune.command", "search for good values of a recipe's flags"),
    "predict": Tool("common.tools.predict.command", "classify images or texts with a run's model"),
    "prove": Tool("common.tools.prove.command", "check that a recipe or copy keeps the guarantees"),
    "reproduce": Tool("common.tools.reproduce.command", "train a past run again, compare the bits"),
    "workspace": Tool("common.tools.workspace", "set up a view or report of a W&B project"),
}


def main(words: Sequence[str] | None = None) -> None:
    """Run the tool that the first word names, with the other words as its command line.

    Without a word, or with ``--help``, print the list of tools.

    Args:
        words: the command line after ``recipes``. None stands for this process's command line.

    Raises:
        UserError: there is no such tool, or a word is empty.
    """
    if words is None:
        words = sys.argv[1:]
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        end_on_lost_output()  # each tool does this itself, in `tool_parser`
        print(overview())
        return
    if name not in TOOLS:
        raise UserError(f"there is no command recipes {name}", advice=advice_for_unknown(name))
    refuse_empty_words(name, words[1:])
    importlib.import_module(TOOLS[name].module).main([*words[1:]])


def refuse_empty_words(name: str, words: Sequence[str]) -> None:
    """Raise a `UserError` if a word is empty: as a path, it would be the current directory.

    Args:
        name: the tool.
        words: its command line.
    """
    for word_before, word in zip(["", *words], words, strict=False):
        if word.strip():
            continue
        place = f" after {word_before}" if word_before else ""
        raise UserError(
            f"an argument of recipes {name} is empty{place}",
            advice="pass a value, or leave it out; perhaps a variable of the shell is not set",
        )


def overview() -> str:
    """Return the text of ``recipes --help``."""
    width = max(len(name) for name in TOOLS)
    lines = [
        "usage: recipes COMMAND [options]",
        "",
        "Work on runs: compare them, train variants, search for good flags, use a model.",
        "",
        "commands:",
        *(f"  {name:<{width}}  {tool.summary}" for name, tool in TOOLS.items()),
        "",
        "recipes COMMAND --help describes a command. Training itself needs no command:",
        "python recipes/mnist_mlp.py --help describes a recipe.",
    ]
    return "\n".join(lines)


def advice_for_unknown(unknown: str) -> str:
    """Return advice for a mistyped command: the most similar command, or all if none is similar."""
    similar = difflib.get_close_matches(unknown, TOOLS, n=1)
    if similar:
        return f"did you mean recipes {similar[0]}?"
    *others, last = TOOLS
    return f"use {', '.join(others)} or {last}"


if __name__ == "__main__":
    main()
