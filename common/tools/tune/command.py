"""Search for good values of a recipe's flags with Optuna, by its objective on validation data.

  recipes tune recipes/resnet.py --learning-rate 0.01:1:log --batch-size 64,128 --trials 20

Give each flag of the recipe one value for all trials, a range low:high or low:high:log, or choices
a,b,c. Each trial is a normal run in a directory of its own, runs/tune-RECIPE-TIMESTAMP/trial-N. The
search stops a trial whose best result so far is worse than the median of the finished trials at the
same epoch. Continue a search that was stopped or killed with --study DIRECTORY.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from common.errors import UserError
from common.flags import check_number
from common.system.platforms.commands import command_line
from common.tools.parser import tool_parser
from common.tools.tune.settings import SearchSettings


def main(words: Sequence[str] | None = None) -> None:
    """Run the search that the command line describes, or the rest of a search that was stopped."""
    directory, settings = read_command_line([*(sys.argv[1:] if words is None else words)])
    from common.tools.tune.starting import run_search  # loads Optuna, which --help does not need

    run_search(directory, settings)


def read_command_line(words: list[str]) -> tuple[Path, SearchSettings]:
    """Return the search's directory, absolute, and its settings.

    Raises:
        UserError: an argument is wrong, or contradicts the search that is to be continued.
    """
    usage = "%(prog)s RECIPE [--FLAG VALUE | low:high[:log] | a,b,c ...] [options]"
    parser = tool_parser("tune", __doc__, usage, outlives_terminal=True)
    parser.add_argument("--trials", type=int, metavar="N", help="trials in all (default: 20)")
    parser.add_argument("--study", type=Path, metavar="DIR", help="directory of the search")
    parser.add_argument(
        "--config-file", metavar="YAML", help="start trials by accelerate launch with this file"
    )
    parser.add_argument("--no-pruning", action="store_true", help="never stop a trial early")
    # The recipe is the first word or missing. A later word may be the value of a recipe's flag.
    has_recipe = bool(words) and not words[0].startswith("-")
    recipe = words[0] if has_recipe else None
    arguments, flags = parser.parse_known_args(words[1:] if has_recipe else words)
    check_number("trials", arguments.trials, least=1)
    settings = saved_settings(arguments, recipe, flags)
    if settings is not None:
        require_files_of_search(settings, arguments.study)
    else:
        settings = new_settings(arguments, recipe, flags)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    directory = arguments.study or Path(f"runs/tune-{Path(settings.recipe).stem}-{stamp}")
    # A search that continues may get a different number of trials, and may stop pruning.
    settings = replace(
        settings,
        trials=arguments.trials or settings.trials,
        prune=settings.prune and not arguments.no_pruning,
    )
    return directory.resolve(), settings


def saved_settings(
    arguments: argparse.Namespace, recipe: str | None, flags: list[str]
) -> SearchSettings | None:
    """Return the settings of the search in `--study`; None if there is no search to continue.

    Raises:
        UserError: the command line names a different recipe, flags or config file.
    """
    if arguments.study is None:
        return None
    from common.tools.tune.records import read_settings  # --help does not need pydantic

    settings = read_settings(arguments.study)
    if settings is None:
        return None
    # A setting that the command line leaves out stays as it was.
    is_changed = (
        recipe not in (None, settings.recipe)
        or tuple(flags) not in ((), settings.flags)
        or arguments.config_file not in (None, settings.config_file)
    )
    if is_changed:
        saved_words = [settings.recipe, *settings.flags]
        if settings.config_file is not None:
            saved_words += ["--config-file", settings.config_file]
        raise UserError(
            f"--study {arguments.study} already contains another search: "
            f"{command_line(saved_words)}",
            advice=(
                "leave the recipe, its flags and --config-file out to continue that search, or "
                "pass another --study to start a new one"
            ),
        )
    return settings


def require_files_of_search(settings: SearchSettings, study: Path) -> None:
    """Raise a `UserError` if a file of a search that is continued does not exist.

    Its path is as it was typed when the search began, perhaps in a different folder.
    """
    for name, file in (("recipe", settings.recipe), ("--config-file", settings.config_file)):
        if file is not None and not os.path.isfile(file):
            raise UserError(
                f"the search in --study {study} has the {name} {file}, and there is no such file",
                advice=(
                    "repeat the command in the folder in which the search was started, or put the "
                    "file back"
                ),
            )


def new_settings(
    arguments: argparse.Namespace, recipe: str | None, flags: list[str]
) -> SearchSettings:
    """Return the settings of a new search; the caller adds the number of trials and the pruning.

    Raises:
        UserError: the recipe is missing, the directory contains other files, or there is no such
            config file.
    """
    study = arguments.study
    if study is not None and study.is_dir() and any(study.iterdir()):
        raise UserError(
            f"--study {study} contains files, but no search to continue",
            advice=(
                "to continue a search, pass its folder; to start one, pass a recipe and, with "
                "--study, a folder that is new or empty"
            ),
        )
    if recipe is None:
        problem = "the recipe is missing"
        advice = "pass a recipe first, such as recipes/resnet.py"
        if study is not None:
            problem += f", and --study {study} contains no search to continue"
            advice = f"correct --study, or {advice}, to start a search in this folder"
        raise UserError(problem, advice=advice)
    if arguments.config_file is not None and not os.path.isfile(arguments.config_file):
        raise UserError(
            f"--config-file {arguments.config_file} does not exist",
            advice="pass a file of accelerate_configs/, or one that `accelerate config` wrote",
        )
    return SearchSettings(recipe, tuple(flags), arguments.config_file)
