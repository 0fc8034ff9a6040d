"""Opens Optuna's study of a search, keeps it consistent with the trials, and ranks its trials."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import optuna
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from common.console import say
from common.errors import UserError
from common.failures.sentences import as_user_error, writing
from common.objective import Objective
from common.tools.recipe import Recipe
from common.tools.tune.ranking import ranked_by_settings
from common.tools.tune.records import SEARCH_FILE
from common.tools.tune.recovery import STEPS_PER_EPOCH, TrialsOnDisk, put_aside
from common.tools.tune.space import Space

STUDY = "study.db"  # the file in which Optuna keeps the study


def open_study(directory: Path, objective: Objective, prune: bool, space: Space) -> Study:
    """Open the study of a directory, or begin one.

    Raises:
        UserError: the study is damaged, or belongs to a different search.
    """
    path = directory / STUDY
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if prune:  # after the first epoch, it is still too early to judge a trial, hence the + 1
        pruner = optuna.pruners.MedianPruner(n_warmup_steps=STEPS_PER_EPOCH + 1)
    with using_study(path, Exception):  # Optuna fails in many ways on a damaged file
        study = optuna.create_study(
            storage=f"sqlite:///{path}",
            study_name="search",
            direction="maximize" if objective.mode == "max" else "minimize",
            pruner=pruner,
            load_if_exists=True,
        )
        saved_objective = study.user_attrs.get("objective", str(objective))
        trials = study.trials
    if saved_objective != str(objective):
        raise UserError(
            f"the search in {directory} has the objective {saved_objective}, but the recipe's "
            f"OBJECTIVE is {objective}",
            advice="restore OBJECTIVE in the recipe, or start a new search with another --study",
        )
    # Pairs of a flag and its values. Each of the study's pairs must be one of this search.
    saved_pairs = {pair for trial in trials for pair in trial.distributions.items()}
    if saved_pairs - set(space.items()):
        raise UserError(
            f"{path} has trials of other flags than {directory}/{SEARCH_FILE} names",
            advice=(
                f"if {SEARCH_FILE} is right, move {path.name} elsewhere and repeat the command, "
                f"which rebuilds it from the trials; otherwise restore {SEARCH_FILE}"
            ),
        )
    study.set_user_attr("objective", str(objective))
    seed_sampler(study, len(trials))
    return study


def seed_sampler(study: Study, trial_count: int) -> None:
    """Seed the sampler, so that the same command tries the same values.

    A search that continues must not try its first values again, so the number of trials is the
    seed.
    """
    study.sampler = optuna.samplers.TPESampler(seed=trial_count)


def rebuild_if_inconsistent(
    directory: Path, study: Study, recipe: Recipe, prune: bool, space: Space, shared: Sequence[str]
) -> Study:
    """Return the study, rebuilt from the trials' directories if it disagrees with them.

    A study may have lost rows, or been truncated. Such a study is renamed, never overwritten. The
    values that a trial tried are those in its own `config.json`, whatever the study says.

    Raises:
        UserError: a directory is damaged or is not a trial of this search, or a file can't be used.
    """
    objective = recipe.objective
    on_disk = TrialsOnDisk.read(directory, recipe, space, shared)
    path = directory / STUDY
    with using_study(path, Exception):
        difference = on_disk.disagreement(study, space, objective.best_key)
    if difference is None:
        return study
    trials = on_disk.as_trials(space, objective.best_key, objective.validation_key)
    with writing(str(path)):
        renamed_path = put_aside(path)
    say(
        f"{path.name} does not fit the trials ({difference}), so it was rebuilt; the old file is "
        f"{renamed_path.name}"
    )
    study = open_study(directory, objective, prune, space)
    study.add_trials(trials)
    seed_sampler(study, len(trials))
    return study


def using_study(
    path: Path, errors: type[Exception] = SQLAlchemyError
) -> AbstractContextManager[None]:
    """Turn errors from a damaged study file, or from a full disk, into a `UserError`.

    Args:
        path: the study's file, for the message.
        errors: the class of the errors to convert. Pass `Exception` only around code that does
            nothing but use the study.
    """
    advice = (
        "free some space if the disk is full; otherwise, move this file elsewhere, and repeat the "
        "command, which rebuilds the file from the trials"
    )
    # The other lines of SQLAlchemy's message are the query and an address.
    return as_user_error(errors, f"{path} can't be used", advice, first_line=True)


def finished_trials(study: Study, objective: Objective) -> list[FrozenTrial]:
    """Return the finished trials, those with the best settings first."""
    trials = study.get_trials(states=(TrialState.COMPLETE,))
    return ranked_by_settings(trials, objective)
