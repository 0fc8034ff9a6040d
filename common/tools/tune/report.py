"""Reports on a search: its best trials, how certain their lead is, and the best trial's command."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields

from optuna.trial import FrozenTrial, TrialState

from common.console import say
from common.errors import UserError
from common.flags import spelled
from common.run_directory.records import CONFIG
from common.system.platforms.commands import command_line, shown_path
from common.system.wording import counted
from common.tools.compare.comparison import compare
from common.tools.compare.readers.directory import read_directory
from common.tools.compare.readers.run_record import RunRecord
from common.tools.compare.readers.sources import read_runs
from common.tools.compare.report import show
from common.tools.recipe import Recipe
from common.tools.tune.certainty import certainty_lines
from common.tools.tune.ranking import (
    count_of_settings,
    mean_over_seeds,
    trials_with_settings_of,
)
from common.tools.tune.recovery import stated_flags
from common.tools.tune.search import FIRST_TRIALS, Search, command_to_continue
from common.tools.tune.space import command_words
from common.tools.tune.study import finished_trials

TRIALS_SHOWN = 5  # trials in the table


def report_on_search(search: Search, recipe: Recipe) -> None:
    """Show the best trials, draw the search, and print the command that repeats the best trial.

    Raises:
        UserError: no trial finished.
    """
    ranked = ranked_trials(search)
    directories = [str(search.directory_of(trial)) for trial in ranked[:TRIALS_SHOWN]]
    show(compare(read_runs(directories)))
    draw(search)
    tried_trials = search.study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))
    records = readable_records(search, ranked)
    for line in certainty_lines(records, recipe, search.space, count_of_settings(tried_trials)):
        say(line)
    say(best_line(search, ranked))
    say(best_command(search, ranked[0], recipe))


def ranked_trials(search: Search) -> list[FrozenTrial]:
    """Return the finished trials, those with the best settings first.

    Only trials that still have a directory count: the user may have removed some.

    Raises:
        UserError: there is no such trial.
    """
    finished = finished_trials(search.study, search.objective)
    ranked = [trial for trial in finished if (search.directory_of(trial) / CONFIG).is_file()]
    if not ranked:
        raise no_result_error(search, has_finished=bool(finished))
    return ranked


def draw(search: Search) -> None:
    """Write the picture of a search, and say where it is."""
    from common.tools.tune.plot import plot_search

    picture = search.directory / "search.png"
    plot_search(search.study, search.metric.heading, picture)
    say(f"picture: {shown_path(picture)}")


def best_line(search: Search, ranked: Sequence[FrozenTrial]) -> str:
    """Return the line that names the best trial, with its result or the mean over its seeds.

    Args:
        ranked: the finished trials, those with the best settings first.
    """
    metric = search.metric
    best = ranked[0]
    repetitions = trials_with_settings_of(best, ranked)
    figure = f"validation {metric.label} {metric.text(mean_over_seeds(repetitions))}"
    name = search.directory_of(best).name
    if len(repetitions) == 1:
        return f"best: {name}, {figure}"
    return f"best: {name} and {len(repetitions) - 1} more with these settings, mean {figure}"


def no_result_error(search: Search, has_finished: bool) -> UserError:
    """Return the error for a search without a single finished trial to report on.

    Args:
        has_finished: whether trials finished, whose directories are gone now.
    """
    if has_finished:
        total = len(search.study.get_trials(deepcopy=False))
        return UserError(
            f"the directories of the finished trials in {shown_path(search.directory)} were "
            f"removed, or have no {CONFIG}",
            advice=(
                "put them back, or run more trials with "
                f"{command_to_continue(search.directory)} --trials {total + FIRST_TRIALS}"
            ),
        )
    failed = search.study.get_trials(states=(TrialState.FAIL,))
    reasons = [trial.user_attrs["reason"] for trial in failed if "reason" in trial.user_attrs]
    last_reason = f"; the last reason is: {reasons[-1]}" if reasons else ""
    return UserError(
        f"no trial of the search finished ({counted(len(failed), 'trial')} failed{last_reason})",
        advice="correct the cause of the failures, and start a new search",
    )


def readable_records(search: Search, trials: Sequence[FrozenTrial]) -> list[RunRecord]:
    """Return the records of trials, in their order, without those whose files are damaged."""
    records = []
    for trial in trials:
        with suppress(UserError):
            records.append(read_directory(search.directory_of(trial)))
    return records


def best_command(search: Search, best: FrozenTrial, recipe: Recipe) -> str:
    """Return the command that trains the best trial again.

    The command starts the recipe as the trials were started. It states the flags that all
    trials share, the trial's values of the searched flags, and what the trial chose itself: see
    `resolved_words`. It leaves out the directory and the ``--keep-checkpoints`` that
    `Search.command` adds, on which no figure depends.
    """
    config_file = search.settings.config_file
    start = ["python"]
    if config_file is not None:
        start = ["accelerate", "launch", "--config_file", config_file]
    flags = [*command_words(search.space, best.params), *search.shared]
    flags += resolved_words(recipe, read_directory(search.directory_of(best)))
    return command_line([*start, search.settings.recipe, *flags])


def resolved_words(recipe: Recipe, run: RunRecord) -> list[str]:
    """Return the flags that state what a run chose for ``auto``, such as data set and precision.

    With these flags, a repetition makes the same choices wherever it runs.
    """
    stated = stated_flags(run)
    # A run keeps the precision that it chose with its environment, and other choices as flags.
    resolved = {**run.flags, "mixed_precision": run.saved_config.environment.mixed_precision}
    words: list[str] = []
    for name in (field.name for field in fields(recipe.config_class)):
        # The run chose the value of `auto`, and of a --dataset-config that nobody stated.
        run_chose = stated.get(name) == "auto" or (
            name == "dataset_config" and not stated.get(name)
        )
        value = resolved.get(name)
        # There is nothing to state if the run kept `auto`, or if the data set has no configuration.
        if run_chose and isinstance(value, str) and value != "auto":
            words += [spelled(name), value]
    return words
