"""A study in the directory of a search: what was asked for, and what Optuna knows of its trials."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

# Trials are judged at the same share of their training: evaluations fall on other updates where
# batches have other sizes. Nothing is judged by its first epoch.
STEPS_PER_EPOCH = 100
UNJUDGED_EPOCHS = 1


@dataclass(frozen=True)
class SearchSettings:
    """What a search was asked to do: kept in its directory as `search.json`."""

    recipe: str
    flags: list[str]  # as given: ranges, choices, and what all trials share
    config_file: str | None = None  # for `accelerate launch`
    trials: int = 20
    prune: bool = True


def open_study(directory: Path, prune: bool) -> Study:
    """Open the study in a search's directory, or begin one."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = (
        optuna.pruners.MedianPruner(n_warmup_steps=UNJUDGED_EPOCHS * STEPS_PER_EPOCH + 1)
        if prune
        else optuna.pruners.NopPruner()
    )
    study = optuna.create_study(
        storage=f"sqlite:///{directory / 'study.db'}",
        study_name="search",
        direction="maximize",
        pruner=pruner,
        load_if_exists=True,
    )
    # The same command tries the same values; one that goes on must not repeat the first ones.
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    return study


def finished_trials(study: Study) -> list[FrozenTrial]:
    """Return the trials that came to their end, the best first."""
    from optuna.trial import TrialState

    finished = study.get_trials(states=(TrialState.COMPLETE,))
    return sorted(finished, key=lambda trial: -(trial.value or 0.0))
