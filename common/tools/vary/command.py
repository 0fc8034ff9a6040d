"""Train variants of a recipe, all combinations of the values of some flags, and compare them.

  recipes vary recipes/resnet.py --mixed-precision no,bf16 --batch-size 64,128 --seeds 3

Flags with choices a,b,c vary, and so does --num-processes 1,2. All variants share the other flags.
Each variant is a normal run for each seed, in one directory and one W&B group. The first variant is
the baseline. The same command continues where it was stopped and keeps finished runs; with a larger
--seeds it adds runs.
"""

import argparse
import sys
from collections.abc import Sequence

from common.tools.parser import refuse_early_flags, tool_parser


def main(words: Sequence[str] | None = None) -> None:
    """Run and compare the variants that the command line describes."""
    arguments, flags = read_command_line([*(sys.argv[1:] if words is None else words)])
    from common.tools.vary.variants import run_variants  # loads Optuna, which --help does not need

    run_variants(
        arguments.recipe,
        flags,
        seeds=arguments.seeds,
        num_processes=arguments.num_processes,
        output_dir=arguments.output_dir,
    )


def read_command_line(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the tool's own arguments, and the words that belong to the recipe's flags.

    Raises:
        UserError: a flag of the recipe stands before the recipe.
    """
    usage = "%(prog)s RECIPE [--FLAG VALUE | a,b,c ...] [options]"
    parser = tool_parser("vary", __doc__, usage, outlives_terminal=True)
    parser.add_argument("recipe", metavar="RECIPE", help="its file, before all flags")
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="runs of each variant (default: 1)"
    )
    parser.add_argument(
        "--num-processes",
        default="1",
        metavar="N,M",
        help="numbers of processes of a run (default: 1)",
    )
    parser.add_argument("--output-dir", metavar="DIR", help="default: runs/vary-RECIPE-…")
    arguments, flags = parser.parse_known_args(words)
    refuse_early_flags(words, flags, arguments.recipe, "recipe", "recipes vary recipes/resnet.py")
    return arguments, flags
