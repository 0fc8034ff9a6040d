"""What a search says about its best trial."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState, create_trial
from scipy import stats

from common.config import TrainingConfig
from common.objective import Objective
from common.tools.compare.readers.run_record import RunRecord
from common.tools.compare.readers.sources import read_runs
from common.tools.recipe import Recipe
from common.tools.statistics.samples import proportion_error
from common.tools.tune.certainty import certainty_lines, exceeds_chance, interval_of_lead
from common.tools.tune.ranking import TrialGroup, mean_over_seeds, ranked_by_settings
from tests.unit.tools.compare.run_folders import rows, write_run


@dataclass(kw_only=True)
class Config(TrainingConfig):
    hidden_sizes: tuple[int, ...] = (8,)
    dropout: float = 0.0


SPACE = {name: CategoricalDistribution(("a", "b")) for name in ("dropout", "hidden-sizes")}


def recipe(objective: str = "accuracy:max") -> Recipe:
    """Return a recipe with two flags to search."""
    return Recipe(Path("r.py"), ModuleType("r"), Config, Objective.parse(objective))


def trial(folder: Path, best: float, changes: dict[str, Any], metric: str = "accuracy") -> str:
    """Write a trial of 100 validation samples."""
    facts = {"objective": f"{metric}:max", "config.hidden_sizes": [8], **changes}
    return write_run(folder, facts, rows([best], metric=metric))


def trials(folder: Path, *values: tuple[float, float], metric: str = "accuracy") -> list[RunRecord]:
    """Return trials in this order, each with its best value and its dropout."""
    sources = [
        trial(folder / f"trial-{number:03d}", best, {"config.dropout": dropout}, metric)
        for number, (best, dropout) in enumerate(values)
    ]
    return read_runs(sources)


def test_trials_within_the_chance_of_samples_are_not_told_apart(tmp_path: Path) -> None:
    """One of 100 samples is less than the standard error."""
    records = trials(tmp_path, (0.97, 0.2), (0.96, 0.0))
    second, default, advice = certainty_lines(records, recipe(), SPACE, tried_settings_count=0)
    assert second == (
        "trial-000 (dropout=0.2) against trial-001 (dropout=0): 1.0 points ahead, with a standard "
        "error of 2.6 by the samples, so they can't be told apart (the second)"
    )
    assert default.endswith("so they can't be told apart (the recipe's default values)")
    assert advice.startswith("each trial is one seed, and the best of 2 is partly the luckiest")


def test_large_lead_is_more_than_the_chance_of_samples(tmp_path: Path) -> None:
    """The advice to repeat stays, because seeds are another chance."""
    records = trials(tmp_path, (0.97, 0.2), (0.60, 0.1))
    second, default, advice = certainty_lines(records, recipe(), SPACE, tried_settings_count=0)
    assert "37.0 points ahead, with a standard error of 5.2 by the samples, which is more" in second
    assert default.startswith("no finished trial has the recipe's default values")
    assert "several seeds" in advice


def test_default_may_be_the_best(tmp_path: Path) -> None:
    """Then nothing was gained."""
    records = trials(tmp_path, (0.97, 0.0), (0.60, 0.1))
    lines = certainty_lines(records, recipe(), SPACE, tried_settings_count=0)
    assert lines[1] == "trial-000 has the recipe's default values of the searched flags"


def test_default_may_be_unknown(tmp_path: Path) -> None:
    """A default that the recipe chooses at its start can't be compared with a trial's value."""
    records = trials(tmp_path, (0.97, 0.2), (0.96, 0.0))
    space = {**SPACE, "max-steps": CategoricalDistribution(("3", "4"))}
    lines = certainty_lines(records, recipe(), space, tried_settings_count=0)
    assert lines[1].startswith("the recipe has no fixed default of --max-steps, so the search")


def test_objective_without_a_standard_error(tmp_path: Path) -> None:
    """Only seeds can tell how much of the difference is chance."""
    records = trials(tmp_path, (0.97, 0.2), (0.96, 0.1), metric="r2")
    line = certainty_lines(records, recipe("r2:max"), SPACE, tried_settings_count=0)[0]
    assert "0.9700 and 0.9600, and nothing shows how much of a difference in R² is chance" in line


def test_single_or_missing_trials(tmp_path: Path) -> None:
    """One trial has nothing beside it, and a trial may have lost its summary."""
    (record,) = trials(tmp_path / "one", (0.97, 0.2))
    assert len(certainty_lines([record], recipe(), SPACE, tried_settings_count=0)) == 1
    (tmp_path / "one" / "trial-000" / "summary.json").unlink()
    records = read_runs([str(tmp_path / "one" / "trial-000")])
    assert certainty_lines(records, recipe(), SPACE, tried_settings_count=0) == []
    assert certainty_lines([], recipe(), SPACE, tried_settings_count=0) == []


# Trials that differ in the seed alone


SEEDS = {**SPACE, "seed": CategoricalDistribution(("0", "1", "2"))}


def seeded_trials(folder: Path, *values: tuple[float, float, int]) -> list[RunRecord]:
    """Return trials in this order, each with its best value, its dropout and its seed."""
    sources = [
        trial(
            folder / f"trial-{number:03d}", best, {"config.dropout": dropout, "config.seed": seed}
        )
        for number, (best, dropout, seed) in enumerate(values)
    ]
    return read_runs(sources)


def test_trials_that_differ_in_the_seed_are_one_group(tmp_path: Path) -> None:
    """The luckiest single run does not decide, and the interval is that of the seeds."""
    records = seeded_trials(
        tmp_path,
        (0.990, 0.2, 0),  # the best run, of settings that are worse on average
        (0.800, 0.2, 1),
        (0.790, 0.2, 2),
        (0.950, 0.0, 0),
        (0.951, 0.0, 1),
        (0.952, 0.0, 2),
    )
    second, default, advice = certainty_lines(records, recipe(), SEEDS, tried_settings_count=0)
    bounds = stats.ttest_ind(
        [0.950, 0.951, 0.952], [0.990, 0.800, 0.790], equal_var=False
    ).confidence_interval(0.95)
    assert second == (
        "trial-005 and 2 more (dropout=0) against trial-000 and 2 more (dropout=0.2): "
        f"9 points ahead (95 % interval "
        f"{100 * bounds.low:.0f} to {100 * bounds.high:.0f}), so they can't be told apart "
        "(the second)"
    )
    assert default == "trial-005 and 2 more has the recipe's default values of the searched flags"
    assert advice.startswith("the best of 2 settings is partly the luckiest")


def test_clear_lead_over_seeds(tmp_path: Path) -> None:
    """A clear lead is more than the choice of seeds explains."""
    records = seeded_trials(
        tmp_path,
        (0.950, 0.2, 0),
        (0.951, 0.2, 1),
        (0.952, 0.2, 2),
        (0.900, 0.1, 0),
        (0.901, 0.1, 1),
        (0.902, 0.1, 2),
    )
    line = certainty_lines(records, recipe(), SEEDS, tried_settings_count=0)[0]
    assert "5.00 points ahead (95 % interval 4.77 to 5.23), which is more than the choice" in line


def test_repeated_seed_is_no_further_evidence(tmp_path: Path) -> None:
    """The same settings and seed give the same result."""
    records = seeded_trials(tmp_path, (0.97, 0.2, 0), (0.97, 0.2, 0), (0.96, 0.1, 0))
    line = certainty_lines(records, recipe(), SEEDS, tried_settings_count=0)[0]
    assert "with a standard error of 2.6 by the samples" in line


@pytest.mark.parametrize(
    ("objective", "ranked"),
    [("accuracy:max", [3, 4, 0, 2, 1]), ("rmse:min", [1, 2, 0, 4, 3])],
)
def test_settings_rank_by_their_mean(objective: str, ranked: list[int]) -> None:
    """A search with several seeds ranks the same way as its sentences do."""
    tried = [(0.99, "0.2", "0"), (0.80, "0.2", "1"), (0.81, "0.2", "2")]
    tried += [(0.96, "0.0", "0"), (0.95, "0.0", "1")]
    distributions = {
        "dropout": CategoricalDistribution(("0.0", "0.2")),
        "seed": CategoricalDistribution(("0", "1", "2")),
    }
    trials_of_study = []
    for number, (value, dropout, seed) in enumerate(tried):
        frozen = create_trial(
            state=TrialState.COMPLETE,
            value=value,
            params={"dropout": dropout, "seed": seed},
            distributions=distributions,
        )
        frozen.number = number
        trials_of_study.append(frozen)
    best_first = ranked_by_settings(trials_of_study, Objective.parse(objective))
    assert [found.number for found in best_first] == ranked


def test_repeated_seed_counts_once_in_the_mean() -> None:
    """A sampler may propose the same settings and seed twice."""
    tried = [("0", 0.9), ("0", 0.8), ("0", 0.7), ("1", 0.4)]
    seeds = CategoricalDistribution(("0", "1"))
    repetitions = [
        create_trial(value=value, params={"seed": seed}, distributions={"seed": seeds})
        for seed, value in tried
    ]
    assert mean_over_seeds(repetitions) == pytest.approx((0.8 + 0.4) / 2)


# The best of many trials


def test_lead_must_exceed_that_of_the_luckiest_of_many(tmp_path: Path) -> None:
    """A lead that would be clear between two trials is expected of the best of twenty."""
    values = [(0.99, 0.2), *((0.92, 0.3 + number / 100) for number in range(18)), (0.90, 0.0)]
    pair = trials(tmp_path / "pair", values[0], values[-1])
    assert "which is more" in certainty_lines(pair, recipe(), SPACE, tried_settings_count=0)[0]
    _, default, advice = certainty_lines(
        trials(tmp_path / "all", *values), recipe(), SPACE, tried_settings_count=0
    )
    assert "so they can't be told apart (the recipe's default values)" in default
    assert "the best of 20 is partly the luckiest" in advice
    stopped_early = certainty_lines(pair, recipe(), SPACE, tried_settings_count=20)
    assert "so they can't be told apart (the second)" in stopped_early[0]


@given(candidates=st.integers(2, 200), lead=st.floats(0, 5))
def test_limit_agrees_with_scipy(candidates: int, lead: float) -> None:
    """The limit is the quantile of the normal distribution, with Bonferroni's correction."""
    limit = float(stats.norm.isf(0.025 / (candidates - 1)))
    if abs(lead - limit) > 1e-6:
        assert exceeds_chance(lead, 1.0, candidates) == (lead > limit)


def error_rate_by_samples(candidates: int, samples: int, accuracy: float) -> float:
    """Return how often the best of equal trials is called better than the defaults.

    The trials are independent, although a real search has the same samples in all of them. That
    makes chance larger here than there.
    """
    repetitions = 3000
    generator = np.random.default_rng(5)
    right = generator.binomial(samples, accuracy, (repetitions, candidates))
    errors = 0
    for best, default in zip(right.max(axis=1).tolist(), right[:, 0].tolist(), strict=True):
        parts = [proportion_error(count / samples, samples) for count in (best, default)]
        error = float(np.hypot(*[part or 0.0 for part in parts]))
        errors += exceeds_chance((best - default) / samples, error, candidates)
    return errors / repetitions


@pytest.mark.parametrize("candidates", [2, 5, 20, 50])
def test_best_of_equal_trials_is_rarely_called_better(candidates: int) -> None:
    """Without the correction, 20 trials would give 23 %."""
    rate = error_rate_by_samples(candidates, samples=360, accuracy=0.97)
    assert rate < 0.05


def by_seed(values: np.ndarray) -> dict[str, float]:
    """Return the values of the seeds 0, 1, ..."""
    return {str(seed): float(value) for seed, value in enumerate(values)}


def error_rate_by_seeds(candidates: int, seeds: int, repetitions: int) -> float:
    """Return how often the best of equal settings is called better than the defaults."""
    values = np.random.default_rng(6).normal(0.9, 0.01, (repetitions, candidates, seeds))
    means = values.mean(axis=2)
    errors = 0
    for own_values, own_means in zip(values, means, strict=True):
        place = int(own_means.argmax())
        if place == 0:
            continue  # the defaults are the best
        best, default = (
            TrialGroup((), by_seed(own_values[number]), float(own_means[number]))
            for number in (place, 0)
        )
        interval = interval_of_lead(best, default, candidates)
        assert interval is not None
        errors += interval.excludes_zero
    return errors / repetitions


@pytest.mark.parametrize(("candidates", "seeds"), [(2, 3), (10, 3), (10, 5)])
def test_best_of_equal_settings_is_rarely_called_better(candidates: int, seeds: int) -> None:
    """The interval is wide enough for the number of settings that were tried."""
    assert error_rate_by_seeds(candidates, seeds, 1500) < 0.05
