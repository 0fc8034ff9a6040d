"""Search for good flags with Optuna, by validation accuracy:

python -m common.tune recipes/resnet.py --learning-rate 0.01:1:log --batch-size 64,128 --trials 20

Each flag of the recipe has one value for all trials, a range `low:high` or `low:high:log`, or
choices `a,b,c`. A trial is a normal run in its own directory, `runs/tune-RECIPE-TIMESTAMP/trial-N`;
one that is worse than most others were after as many epochs is stopped. A search that was stopped
or killed goes on with `--study DIRECTORY`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from common.comparison import compare
from common.console import say
from common.errors import UserError
from common.run_reader import read_object, read_runs
from common.search import Search
from common.search_space import load_config_class, parse_space
from common.study import SearchSettings, finished_trials, open_study

SHOWN = 5  # trials in the table at the end


def main(words: Sequence[str] | None = None) -> None:
    """Carry out the search that the command line asks for, or what is left of one.

    Raises:
        UserError: for a mistake on the command line, or a search that can't go on.
        SystemExit: with status 130 after a Ctrl-C or SIGTERM; the search can go on.
    """
    directory, settings = read_command_line(list(sys.argv[1:] if words is None else words))
    recipe = Path(settings.recipe)
    config_class = load_config_class(recipe)
    dimensions, shared = parse_space(settings.flags, config_class, recipe)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(directory / ".lock", timeout=0):
            write_settings(directory, settings)
            study = open_study(directory, settings.prune)
            search = Search(directory, settings, dimensions, shared, study)
            say(f"search: {len(study.trials)} of {settings.trials} trials begun in {directory}")
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            search.run()
    except Timeout:
        raise UserError(f"{directory} is being searched by another process") from None
    except KeyboardInterrupt:
        say(f"stopped: go on with python -m common.tune --study {os.path.relpath(directory)}")
        raise SystemExit(130) from None
    report(search)


def read_command_line(words: list[str]) -> tuple[Path, SearchSettings]:
    """Return the directory of the search, absolute, and what to do in it.

    Raises:
        UserError: when it contradicts the search that the directory holds.
    """
    parser = argparse.ArgumentParser(
        prog="python -m common.tune",
        usage="%(prog)s RECIPE [--FLAG VALUE | low:high[:log] | a,b,c ...] [options]",
        description=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--trials", type=int, metavar="N", help="trials in all (default: 20)")
    parser.add_argument("--study", type=Path, metavar="DIR", help="directory of the search")
    parser.add_argument("--config-file", metavar="YAML", help="start trials by accelerate launch")
    parser.add_argument("--no-pruning", action="store_true", help="let each trial come to its end")
    recipe = words.pop(0) if words and not words[0].startswith("-") else None
    given, flags = parser.parse_known_args(words)
    if given.trials is not None and given.trials < 1:
        raise UserError(f"--trials {given.trials} can't work: give 1 or more")
    if given.config_file is not None and not Path(given.config_file).is_file():
        raise UserError(f"--config-file {given.config_file} does not exist")
    kept = read_object(given.study / "search.json") if given.study is not None else None
    if kept is None:
        if recipe is None:
            where = f"{given.study} holds no search: " if given.study is not None else ""
            raise UserError(f"{where}name a recipe first, such as recipes/resnet.py")
        if given.study is not None and given.study.is_dir() and any(given.study.iterdir()):
            raise UserError(f"--study {given.study} holds something else than a search")
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        directory = given.study or Path(f"runs/tune-{Path(recipe).stem}-{stamp}")
        pruning = not given.no_pruning
        settings = SearchSettings(recipe, flags, given.config_file, given.trials or 20, pruning)
        return directory.resolve(), settings
    settings = SearchSettings(**kept)
    before = (settings.recipe, settings.flags, settings.config_file)
    asked = (recipe, flags or None, given.config_file)
    if any(new not in (None, old) for new, old in zip(asked, before, strict=True)):
        raise UserError(
            f"--study {given.study} searches {settings.recipe} {' '.join(settings.flags)}: "
            "leave recipe and flags out to go on, or name another directory"
        )
    settings = replace(settings, prune=settings.prune and not given.no_pruning)
    return given.study.resolve(), replace(settings, trials=given.trials or settings.trials)


def write_settings(directory: Path, settings: SearchSettings) -> None:
    """Keep what the search was asked to do, for `--study`."""
    from common.directory import write_whole

    write_whole(directory / "search.json", json.dumps(asdict(settings), indent=2) + "\n")


def report(search: Search) -> None:
    """Show the best trials, draw the search, and print the command that repeats the best one.

    Raises:
        UserError: when no trial finished.
    """
    from common.compare import show
    from common.search_plot import plot_search

    ranked = finished_trials(search.study)
    if not ranked:
        raise UserError("no trial finished: give more --trials, or a narrower range")
    best = [str(search.trial_directory(trial.number)) for trial in ranked[:SHOWN]]
    show(compare(read_runs(best)))
    picture = search.directory / "search.png"
    plot_search(search.study, search.dimensions, picture)
    say(f"picture: {os.path.relpath(picture)}")
    say(f"best: trial-{ranked[0].number:03d}, validation accuracy {ranked[0].value:.4f}")
    say(search.best_command())


if __name__ == "__main__":
    main()
