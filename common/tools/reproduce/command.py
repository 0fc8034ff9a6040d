"""Train a past run again in a new directory, and compare both runs bit by bit.

  recipes reproduce runs/first

It prints what differs from the old run: code, versions, hardware, threads. It uses the run's own
code, from its commit and its saved patch, in a temporary git worktree. The new run is
runs/first-reproduced; the same command continues it after an interruption. Flags of the recipe
after RUN replace those of the run.

  recipes reproduce runs/first --publish results/first

copies the records of a run that a reproduction on another machine needs, and trains nothing.

Exit status:
  0  all bits are equal; or the machine, versions, threads or processes differ, and the final
     figures are within the tolerance
  1  the run can't be reproduced
  3  bits differ, and no fact explains it
  4  the final figures are beyond the tolerance
  5  bits differ, and a flag, the code or the data differ, so the new run is another experiment
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from common.errors import UserError
from common.flags import check_number
from common.tools.parser import refuse_early_flags, tool_parser


def main(words: Sequence[str] | None = None) -> None:
    """Reproduce the run that the command line names; exit with the status of the result."""
    arguments, flags = read_command_line([*(sys.argv[1:] if words is None else words)])
    if arguments.publish is not None:
        if flags:
            raise UserError(
                f"{flags[0]} does not go with --publish, which trains nothing",
                advice=f"leave {flags[0]} or --publish out",
            )
        publish(Path(arguments.run).resolve(), Path(arguments.publish).resolve())
        return
    from common.tools.reproduce.receipt import default_output
    from common.tools.reproduce.reproduction import ReproductionRequest, reproduce  # loads torch

    directory = Path(arguments.run).resolve()
    output = arguments.output_dir or default_output(directory)
    request = ReproductionRequest(
        directory=directory,
        output=Path(output).resolve(),
        flags=tuple(flags),
        tolerance=arguments.tolerance,
        uses_current_code=arguments.current_code,
    )
    status = reproduce(request)
    if status:
        raise SystemExit(status)


def publish(directory: Path, folder: Path) -> None:
    """Publish a run into a folder, and say so."""
    from common.console import say
    from common.system.platforms.commands import quoted, shown_path
    from common.tools.reproduce.publishing import publish_run

    publish_run(directory, folder)
    command = f"recipes reproduce {quoted(shown_path(folder))}"
    say(f"published in {shown_path(folder)}: reproduce the run with {command}")


def read_command_line(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the tool's own arguments, and the words that belong to the recipe's flags.

    Raises:
        UserError: a flag of the recipe stands before the run, or the tolerance is out of range.
    """
    usage = "%(prog)s RUN [--FLAG VALUE ...] [options]"
    parser = tool_parser("reproduce", __doc__, usage, outlives_terminal=True)
    parser.add_argument("run", metavar="RUN", help="its directory, before all flags")
    parser.add_argument(
        "--output-dir", metavar="DIR", help="directory of the new run (default: RUN-reproduced)"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="relative difference of the final figures that is allowed on a different machine, or "
        "with different versions, threads or processes (default: two standard errors of an "
        "accuracy; 0.02 of other figures, and 0.5 beside an accuracy)",
    )
    parser.add_argument(
        "--current-code",
        action="store_true",
        help="run the current code instead of the run's own code",
    )
    parser.add_argument(
        "--publish",
        metavar="FOLDER",
        help="copy the run's records there, without weights and paths, and train nothing",
    )
    arguments, flags = parser.parse_known_args(words)
    refuse_early_flags(words, flags, arguments.run, "run", "recipes reproduce runs/first")
    check_number("tolerance", arguments.tolerance, least=0, most=1)
    return arguments, flags
