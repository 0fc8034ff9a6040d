"""Compare runs with the first of them, the baseline: speed, memory, energy, quality, settings.

Runs that differ in the seed alone are one group. Groups with several seeds are compared with each
other, with an interval of their difference. A single run is compared with the first group.

A RUN is one of these:
  a directory that a recipe wrote, such as runs/first
  a wandb/offline-run-* folder
  entity/project or entity/project/run at W&B, which needs an account
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from common.flags import check_number
from common.tools.parser import tool_parser


def main(words: Sequence[str] | None = None) -> None:
    """Compare the runs that the command line names.

    Raises:
        UserError: the target is not finite, a run can't be read, or a file can't be written.
    """
    parser = tool_parser("compare", __doc__, "%(prog)s RUN [RUN ...] [options]")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the baseline first")
    parser.add_argument(
        "--target",
        type=float,
        metavar="X",
        help="value of the objective; shows how long each run took to reach it "
        "(default: the worst of the runs' best values)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the runs as .png or .svg")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a web page with interactive curves, which needs no network",
    )
    output_format = parser.add_mutually_exclusive_group()
    output_format.add_argument("--markdown", action="store_true", help="print a Markdown table")
    output_format.add_argument("--json", action="store_true", help="print everything as JSON")
    arguments = parser.parse_args(words)
    # The import is here, because --help should not wait for pydantic.
    from common.tools.compare.output_formats import Options, write_comparison

    check_number("target", arguments.target, least=None)
    chosen_format: Literal["text", "markdown", "json"] = "text"
    if arguments.json:
        chosen_format = "json"
    elif arguments.markdown:
        chosen_format = "markdown"
    write_comparison(
        Options(
            runs=arguments.runs,
            target=arguments.target,
            output_format=chosen_format,
            plot=arguments.plot,
            html=arguments.html,
        )
    )
