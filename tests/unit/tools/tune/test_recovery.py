"""Recovery of a search: each result belongs to the values in its trial's own directory."""

from __future__ import annotations

import math
import shutil
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.study import Study
from optuna.trial import TrialState

from common.errors import UserError
from common.tools.compare.readers.directory import read_directory
from common.tools.launching.validation_share import with_validation_share
from common.tools.recipe import load_recipe
from common.tools.tune.recovery import denotes, number_in_range, stated_flags
from common.tools.tune.space import command_words, parse_space
from common.tools.tune.study import open_study, rebuild_if_inconsistent
from tests.conftest import first
from tests.unit.tools.tune.test_search import STUB

FLAGS = ["--learning-rate", "0.001:0.1:log", "--batch-size", "64,128", "--epochs", "2"]
RECIPE = load_recipe(STUB)
SPACE, STATED = parse_space(FLAGS, RECIPE)
SHARED = with_validation_share(STATED)  # as the search passes them to its trials

pytestmark = pytest.mark.usefixtures("restored_sigterm")  # which the stub replaces


def train(place: Path, **flags: Any) -> None:
    """Run the stub in this process, in a given directory."""
    values = {"epochs": 2, "validation_share": 0.1, "keep_checkpoints": 1} | flags
    RECIPE.module.main(RECIPE.config_class(**values, output_dir=str(place)))


def searched(directory: Path, trials: int = 3) -> None:
    """Run a search in this process."""
    study = open_study(directory, RECIPE.objective, True, SPACE)
    for number in range(trials):
        trial = study.ask(dict(SPACE))
        arguments = command_words(SPACE, trial.params)
        place = directory / f"trial-{number:03d}"
        train(place, learning_rate=float(arguments[1]), batch_size=int(arguments[3]))
        study.tell(trial, read_directory(place).summary["val/best_accuracy"])


def reopened(directory: Path) -> Study:
    """Reopen the search as the command does."""
    study = open_study(directory, RECIPE.objective, True, SPACE)
    return rebuild_if_inconsistent(directory, study, RECIPE, True, SPACE, SHARED)


def require_credit(study: Study, directory: Path) -> None:
    """Check that each result of a study is that of the values in the trial's own directory."""
    for trial in study.get_trials(states=(TrialState.COMPLETE,)):
        run = read_directory(directory / f"trial-{trial.number:03d}")
        flags = stated_flags(run)
        arguments = command_words(SPACE, trial.params)
        assert (float(arguments[1]), int(arguments[3])) == (
            flags["learning_rate"],
            flags["batch_size"],
        )
        assert trial.value == run.summary["val/best_accuracy"]


def without_rows(table: str, rows: str) -> Callable[[Path], None]:
    """Return a function that deletes rows of a study."""

    def delete(directory: Path) -> None:
        with closing(sqlite3.connect(directory / "study.db")) as database:
            database.execute(f"DELETE FROM {table} WHERE {rows}")
            database.commit()

    return delete


def cut(length: int) -> Callable[[Path], None]:
    """Return a function that truncates a study's file."""
    return lambda directory: (directory / "study.db").write_bytes(
        (directory / "study.db").read_bytes()[:length]
    )


def swap(directory: Path) -> None:
    """Exchange the directories of two trials."""
    first, second, aside = (directory / name for name in ("trial-000", "trial-001", "aside"))
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "emptied": cut(0),
    "swapped": swap,
    "trial_params: rowid = 1": without_rows("trial_params", "rowid = 1"),
    "cut": cut(5000),
    "header alone": cut(100),
    "gone": lambda directory: (directory / "study.db").unlink(),
    "a directory is gone": lambda directory: shutil.rmtree(directory / "trial-001"),
    **{
        f"{table}: {rows}": without_rows(table, rows)
        for table in (
            "trials",
            "trial_params",
            "trial_values",
            "trial_intermediate_values",
            "studies",
            "study_directions",
            "study_user_attributes",
            "version_info",
        )
        for rows in ("true", "rowid = 1", "rowid = 2")
    },
}


def reopened_or_rebuilt(directory: Path) -> Study:
    """Reopen the search. If one sentence refuses that, remove the study and rebuild it."""
    refused: UserError | None = None
    try:
        return reopened(directory)
    except UserError as error:
        refused = error
    assert "\n" not in refused.message
    assert "study.db" in refused.message
    (directory / "study.db").rename(directory / "moved away")
    return reopened(directory)


@pytest.fixture(scope="module")
def whole_search(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search that was carried out, which no test may change."""
    directory = tmp_path_factory.mktemp("whole")
    before = signal.getsignal(signal.SIGTERM)
    searched(directory)
    signal.signal(signal.SIGTERM, before)
    return directory


@pytest.mark.parametrize("damage", first(4, DAMAGE))
def test_results_stay_with_their_values(damage: str, whole_search: Path, tmp_path: Path) -> None:
    """A damaged study is rebuilt from the trials' directories, or refused in one sentence.

    Once it is moved away, it is always rebuilt.
    """
    shutil.copytree(whole_search, tmp_path, dirs_exist_ok=True)
    DAMAGE[damage](tmp_path)
    places = len([*tmp_path.glob("trial-*")])
    study = reopened_or_rebuilt(tmp_path)
    if places < 3:  # the study keeps the result of the missing trial
        assert study.get_trials()[0].state == TrialState.COMPLETE
        return
    require_credit(study, tmp_path)
    assert [trial.state for trial in study.get_trials()] == [TrialState.COMPLETE] * 3
    require_credit(reopened(tmp_path), tmp_path)  # a second time changes nothing


def test_rebuilt_study_keeps_failures_and_unfinished_trials(tmp_path: Path) -> None:
    """The old file is kept. A failed trial stays failed, and an unfinished one is resumed."""
    searched(tmp_path, trials=1)
    old = (tmp_path / "study.db").read_bytes()
    with pytest.raises(SystemExit):
        train(tmp_path / "trial-001", learning_rate=0.1, batch_size=64, fail_above=0.01)
    train(tmp_path / "trial-003", learning_rate=0.01, batch_size=128)
    (tmp_path / "trial-003" / "status.json").write_text('{"status": "preempted"}')
    shared = [*SHARED, "--fail-above", "0.01"]
    study = open_study(tmp_path, RECIPE.objective, True, SPACE)
    with pytest.raises(UserError, match=r"trial-000 .*--fail-above 1000000000\.0"):
        rebuild_if_inconsistent(tmp_path, study, RECIPE, True, SPACE, shared)
    shutil.rmtree(tmp_path / "trial-001")
    study = reopened(tmp_path)
    names = [trial.state.name for trial in study.get_trials()]
    assert names == ["COMPLETE", "FAIL", "FAIL", "RUNNING"]
    assert study.get_trials()[3].params == {"learning-rate": 0.01, "batch-size": "128"}
    assert (tmp_path / "study.db.superseded-1").read_bytes() == old


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"seed": 5}, r"--seed 5 instead of 0"),
        ({"epochs": 3}, r"--epochs 3 instead of 2"),
        ({"validation_share": 0.2}, r"--validation-share 0\.2 instead of 0\.1"),
        ({"learning_rate": 0.5}, r"--learning-rate 0\.5, which is outside the search space"),
        ({"batch_size": 32}, r"--batch-size 32, which is outside the search space"),
    ],
)
@pytest.mark.parametrize("number", first(1, [0, 2]))
def test_foreign_run_is_refused(
    flags: dict[str, Any], message: str, number: int, tmp_path: Path
) -> None:
    """The other run may be in the folder of an earlier trial or of a future trial."""
    searched(tmp_path, trials=2)
    place = tmp_path / f"trial-{number:03d}"
    shutil.rmtree(place, ignore_errors=True)
    train(place, **({"learning_rate": 0.01, "batch_size": 64} | flags))
    with pytest.raises(
        UserError,
        match=rf"trial-00{number} does not fit this search, because .*{message}: if .* move the",
    ):
        reopened(tmp_path)


@pytest.mark.parametrize(
    ("value", "whole", "real"),
    [
        (3, 3, 3.0),
        (3.0, 3, 3.0),
        (3.7, None, 3.7),
        (9, None, None),
        (math.nan, None, None),
        (True, None, None),
        ("3", None, None),
    ],
)
def test_range_of_integers_has_only_whole_numbers(
    value: object, whole: int | None, real: float | None
) -> None:
    """A number is kept in the type of the range."""
    kept_values = (
        number_in_range(IntDistribution(1, 8), value),
        number_in_range(FloatDistribution(1.0, 8.0), value),
    )
    assert kept_values == (whole, real)
    assert [type(kept) for kept in kept_values] == [type(whole), type(real)]


def test_whole_study_is_not_rebuilt(tmp_path: Path) -> None:
    """No file is set aside."""
    searched(tmp_path)
    reopened(tmp_path)
    assert not [*tmp_path.glob("study.db.*")]


def test_other_folders_are_no_trials(whole_search: Path, tmp_path: Path) -> None:
    """A folder whose name has no number is not read, so it may hold damaged files."""
    shutil.copytree(whole_search, tmp_path, dirs_exist_ok=True)
    for name in ("trial-notes", "trial-", "trial--1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    assert len(reopened(tmp_path).get_trials()) == 3
    assert not [*tmp_path.glob("study.db.*")]


def test_choices_are_compared_as_values() -> None:
    """Choices are compared as the recipe's parser reads them."""
    for choice, value in (("64", 64), ("1e-2", 0.01), ("8 16", [8, 16]), ("true", True)):
        assert denotes(choice, value)
    for choice, value in (("64", 65), ("8 16", [8]), ("true", False), ("no", "yes"), ("x", 1)):
        assert not denotes(choice, value)
