"""What a search says about its best trial."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from optuna.distributions import CategoricalDistribution

from common.config import TrainingConfig
from common.objective import Objective
from common.tools.compare.readers import RunRecord, read_runs
from common.tools.recipe import Recipe
from common.tools.tune.certainty import certainty_lines
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
    second, default, advice = certainty_lines(records, recipe(), SPACE)
    assert second == (
        "trial-000 against trial-001: 1.0 points ahead, with a standard error of 2.6 by the "
        "samples, so they can't be told apart (the second)"
    )
    assert default.endswith("so they can't be told apart (the recipe's default values)")
    assert advice.startswith("each trial is one seed, and the best of 2 is partly the luckiest")


def test_large_lead_is_more_than_the_chance_of_samples(tmp_path: Path) -> None:
    """The advice to repeat stays, because seeds are another chance."""
    records = trials(tmp_path, (0.97, 0.2), (0.60, 0.1))
    second, default, advice = certainty_lines(records, recipe(), SPACE)
    assert "37.0 points ahead, with a standard error of 5.2 by the samples, which is more" in second
    assert default.startswith("no finished trial has the recipe's default values")
    assert "several seeds" in advice


def test_default_may_be_the_best(tmp_path: Path) -> None:
    """Then nothing was gained."""
    records = trials(tmp_path, (0.97, 0.0), (0.60, 0.1))
    lines = certainty_lines(records, recipe(), SPACE)
    assert lines[1] == "trial-000 has the recipe's default values of these flags"


def test_objective_without_a_standard_error(tmp_path: Path) -> None:
    """Only seeds can tell how much of the difference is chance."""
    records = trials(tmp_path, (0.97, 0.2), (0.96, 0.1), metric="r2")
    line = certainty_lines(records, recipe("r2:max"), SPACE)[0]
    assert "0.9700 and 0.9600, and nothing shows how much of a difference in R² is chance" in line


def test_single_or_missing_trials(tmp_path: Path) -> None:
    """One trial has nothing beside it, and a trial may have lost its summary."""
    (record,) = trials(tmp_path / "one", (0.97, 0.2))
    assert len(certainty_lines([record], recipe(), SPACE)) == 1
    (tmp_path / "one" / "trial-000" / "summary.json").unlink()
    records = read_runs([str(tmp_path / "one" / "trial-000")])
    assert certainty_lines(records, recipe(), SPACE) == []
    assert certainty_lines([], recipe(), SPACE) == []
