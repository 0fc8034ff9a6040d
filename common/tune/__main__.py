"""Search for good flags with Optuna, by the recipe's objective on validation data:

python -m common.tune recipes/resnet.py --learning-rate 0.01:1:log --batch-size 64,128 --trials 20

Each flag of the recipe has one value for all trials, a range `low:high` or `low:high:log`, or
choices `a,b,c`. A trial is a normal run in its own directory, `runs/tune-RECIPE-TIMESTAMP/trial-N`;
one that is worse than most others were after as many epochs is stopped. A search that was stopped
or killed goes on with `--study DIRECTORY`.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

from common.command_line import tool_parser
from common.compare.comparison import compare
from common.compare.readers import read_runs
from common.compare.table import show
from common.console import say, spare_output
from common.errors import UserError
from common.files import write_json
from common.platforms import quoted, shown_path
from common.recipe import Recipe, load_recipe
from common.track.names import describe
from common.tune.search import (
    Search,
    SearchSettings,
    finished_trials,
    open_study,
    reconciled,
    usable,
)
from common.tune.space import parse_space
from common.tune.trial import working_in

SHOWN = 5  # trials in the table at the end


def main(words: Sequence[str] | None = None) -> None:
    """Carry out the search that the command line asks for, or what is left of one."""
    directory, settings = read_command_line(list(sys.argv[1:] if words is None else words))
    recipe = load_recipe(Path(settings.recipe))
    space, shared = parse_space(settings.flags, recipe)
    again = f"python -m common.tune --study {quoted(shown_path(directory))}"
    with working_in(directory, "--study", again), usable(directory / "study.db"):
        study = open_study(directory, recipe.objective, settings.prune, space)
        study = reconciled(directory, study, recipe, settings.prune, space, shared)
        write_json(directory / "search.json", asdict(settings))
        search = Search(directory, settings, space, shared, recipe.objective, study)
        say(f"search: {len(study.trials)} of {settings.trials} trials begun in {directory}")
        search.run()
        report(search, recipe)


def read_command_line(words: list[str]) -> tuple[Path, SearchSettings]:
    """Return the directory of the search, absolute, and what to do in it."""
    usage = "%(prog)s RECIPE [--FLAG VALUE | low:high[:log] | a,b,c ...] [options]"
    parser = tool_parser("common.tune", __doc__, usage)
    parser.add_argument("--trials", type=int, metavar="N", help="trials in all (default: 20)")
    parser.add_argument("--study", type=Path, metavar="DIR", help="directory of the search")
    parser.add_argument("--config-file", metavar="YAML", help="start trials by accelerate launch")
    parser.add_argument("--no-pruning", action="store_true", help="let each trial come to its end")
    recipe = words.pop(0) if words and not words[0].startswith("-") else None
    given, flags = parser.parse_known_args(words)
    study: Path | None = given.study
    if given.trials is not None and given.trials < 1:
        raise UserError(f"--trials {given.trials} can't work: give 1 or more")
    if study is not None and (settings := SearchSettings.read(study)) is not None:
        before = (settings.recipe, settings.flags, settings.config_file)
        asked = (recipe, tuple(flags) or None, given.config_file)
        if any(new not in (None, old) for new, old in zip(asked, before, strict=True)):
            searched = f"{settings.recipe} {' '.join(settings.flags)}"
            advice = "leave recipe and flags out to go on, or name another directory"
            raise UserError(f"--study {study} searches {searched}: {advice}")
    elif recipe is None:
        where = f"{study} holds no search: " if study is not None else ""
        raise UserError(f"{where}name a recipe first, such as recipes/resnet.py")
    elif study is not None and study.is_dir() and any(study.iterdir()):
        raise UserError(f"--study {study} holds something else than a search")
    else:
        settings = SearchSettings(recipe, tuple(flags), given.config_file)
    if settings.config_file is not None and not os.path.isfile(settings.config_file):
        raise UserError(f"--config-file {settings.config_file} is no file")
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    directory = study or Path(f"runs/tune-{Path(settings.recipe).stem}-{stamp}")
    trials, prune = given.trials or settings.trials, settings.prune and not given.no_pruning
    return directory.resolve(), replace(settings, trials=trials, prune=prune)


def report(search: Search, recipe: Recipe) -> None:
    """Show the best trials, draw the search, and print the command that repeats the best one."""
    from common.tune.plot import plot_search

    finished = finished_trials(search.study)
    ranked = [trial for trial in finished if (search.place(trial) / "config.json").is_file()]
    if not ranked:
        raise UserError("no trial finished: give more --trials, or a narrower range")
    show(compare(read_runs([str(search.place(trial)) for trial in ranked[:SHOWN]])))
    metric = describe(f"val/{search.objective.metric}")
    picture = search.directory / "search.png"
    plot_search(search.study, metric.heading, picture)
    say(f"picture: {shown_path(picture)}")
    value = metric.text(ranked[0].value)
    say(f"best: {search.place(ranked[0]).name}, validation {metric.label} {value}")
    say(search.best_command(ranked[0], recipe))


if __name__ == "__main__":
    spare_output()  # a search outlives its terminal, as its trials do
    main()
