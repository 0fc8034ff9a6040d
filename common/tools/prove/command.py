"""Check that a recipe, or an edited copy of one, keeps the guarantees of this library.

  recipes prove train.py --dataset path/to/data

It launches the recipe several times, as you would, with few samples. For each check, it prints what
was compared, what is wrong, and what to change. It also writes the results into a receipt. The
command fails if a check fails, or if no check applies. Flags of the recipe follow its file.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from common.flags import check_number
from common.tools.parser import refuse_early_flags, tool_parser
from common.tools.prove.request import ProofRequest

UPDATES = 32


def main(words: Sequence[str] | None = None) -> None:
    """Run the proof that the command line asks for. Exit with status 1 if it has not passed."""
    arguments, flags = read_command_line([*(sys.argv[1:] if words is None else words)])
    from common.tools.prove.proof import prove  # loads torch: not for --help

    request = ProofRequest(
        recipe=Path(arguments.recipe),
        flags=flags,
        checks=arguments.checks,
        skipped_checks=arguments.skip,
        output=Path(arguments.output),
        folder=None if arguments.folder is None else Path(arguments.folder),
        seed=arguments.draws,
        updates=arguments.updates,
    )
    if not prove(request):
        raise SystemExit(1)


def read_command_line(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the tool's own arguments, and the words of the recipe's flags.

    Raises:
        UserError: a flag of the recipe comes before the recipe, or a number is out of range.
    """
    usage = "%(prog)s RECIPE [--FLAG VALUE ...] [options]"
    parser = tool_parser("prove", __doc__, usage, outlives_terminal=True)
    parser.add_argument("recipe", metavar="RECIPE", help="the recipe's file, before all flags")
    parser.add_argument(
        "--checks", metavar="A,B", help="the checks to run (default: all but sharded)"
    )
    parser.add_argument("--skip", metavar="A,B", help="the checks to leave out (default: none)")
    parser.add_argument(
        "--output", default="proof.json", metavar="FILE", help="the receipt (default: proof.json)"
    )
    parser.add_argument(
        "--folder",
        metavar="DIR",
        help="keep the runs there (default: a temporary folder, kept only after a failure)",
    )
    parser.add_argument(
        "--updates",
        type=int,
        default=UPDATES,
        metavar="N",
        help=f"updates of each training (default: {UPDATES})",
    )
    parser.add_argument(
        "--draws",
        type=int,
        default=0,
        metavar="N",
        help="the seed of the random interruption points (default: 0)",
    )
    arguments, flags = parser.parse_known_args(words)
    refuse_early_flags(words, flags, arguments.recipe, "recipe", "recipes prove recipes/resnet.py")
    check_number("updates", arguments.updates, least=8)
    return arguments, flags
