"""Starts a search or continues it, and reports on it at its end."""

from pathlib import Path

from common.console import say
from common.tools.launching.folder import locked_folder_of_runs
from common.tools.launching.validation_share import with_validation_share
from common.tools.recipe import load_recipe
from common.tools.tune.records import write_settings
from common.tools.tune.report import report_on_search
from common.tools.tune.search import Search, command_to_continue
from common.tools.tune.settings import SearchSettings
from common.tools.tune.space import parse_space
from common.tools.tune.study import (
    STUDY,
    open_study,
    rebuild_if_inconsistent,
    using_study,
)


def run_search(directory: Path, settings: SearchSettings) -> None:
    """Run the rest of the search in `directory`, and report on the search.

    Raises:
        UserError: the search can't begin or go on, or none of its trials finished.
        SystemExit: with status 130, after Ctrl-C or SIGTERM.
    """
    recipe = load_recipe(Path(settings.recipe))
    space, stated = parse_space(settings.flags, recipe)
    shared = with_validation_share(stated)
    with (
        locked_folder_of_runs(directory, "--study", command_to_continue(directory)),
        using_study(directory / STUDY),
    ):
        study = open_study(directory, recipe.objective, settings.prune, space)
        # A kill may have left the study without rows that the trials' directories have.
        study = rebuild_if_inconsistent(directory, study, recipe, settings.prune, space, shared)
        write_settings(directory, settings)
        search = Search(directory, settings, space, shared, recipe.objective, study)
        say(f"search: {len(study.trials)} of {settings.trials} trials begun in {directory}")
        search.run()
        report_on_search(search, recipe)
