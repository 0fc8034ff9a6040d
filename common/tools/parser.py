"""The argument parser that every subcommand of `recipes` starts from."""

import argparse
from collections.abc import Sequence

from common.errors import UserError
from common.output.standard_streams import end_on_lost_output, ignore_lost_output


def tool_parser(
    name: str, description: str | None, usage: str, *, outlives_terminal: bool = False
) -> argparse.ArgumentParser:
    """Prepare standard output and return an empty parser for the subcommand `name`.

    Args:
        name: the subcommand, such as ``compare``.
        description: the text above the options in ``--help``, printed as it is.
        usage: the usage line, in which ``%(prog)s`` stands for the command.
        outlives_terminal: whether the tool goes on after its terminal is closed, which suits a
            search of many hours. Otherwise the tool ends, without a traceback, as soon as it can't
            write its output.

    Raises:
        SystemExit: standard output is closed, unless the tool outlives its terminal.
    """
    if outlives_terminal:
        ignore_lost_output()
    else:
        end_on_lost_output()
    return argparse.ArgumentParser(
        prog=f"recipes {name}",
        usage=usage,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # a recipe's --seed must not pass for the tool's --seeds
    )


def refuse_early_flags(
    words: Sequence[str], flags: Sequence[str], subject: str, noun: str, example: str
) -> None:
    """Raise a `UserError` if a flag of the recipe stands before the recipe or run of the command.

    The parser does not know the recipe's flags, so it takes the first word without dashes for the
    recipe or run. In ``--epochs 3 recipes/resnet.py``, that word is 3, the value of a flag.

    Args:
        words: the whole command line.
        flags: the words that the parser does not know: the recipe's flags, and their values.
        subject: the word that the parser took for the recipe or run.
        noun: "recipe" or "run", for the message.
        example: a correct command without flags, such as "recipes prove recipes/resnet.py".
    """
    if flags and words.index(flags[0]) < words.index(subject):
        raise UserError(
            f"{flags[0]} stands before the {noun}",
            advice=f"put the {noun} first, as in {example} {flags[0]} …",
        )
