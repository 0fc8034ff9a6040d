"""The argument parser that every subcommand of `recipes` starts from."""

import argparse

from common.standard_streams import protect_output, protect_tool_output


def tool_parser(
    name: str, description: str | None, usage: str, *, outlives_terminal: bool = False
) -> argparse.ArgumentParser:
    """Prepare standard output and return an empty parser for the subcommand `name`.

    Args:
        name: the subcommand, such as ``compare``.
        description: the text above the options in ``--help``, printed as it is.
        usage: the usage line, in which ``%(prog)s`` stands for the command.
        outlives_terminal: whether the tool goes on when nobody can read its output any more, which
            suits a search of many hours. Otherwise the tool ends then, without a traceback.
    """
    if outlives_terminal:
        protect_output()
    else:
        protect_tool_output()
    return argparse.ArgumentParser(
        prog=f"recipes {name}",
        usage=usage,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # a recipe's --seed must not pass for the tool's --seeds
    )
