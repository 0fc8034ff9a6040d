"""Generated copies keep every guarantee: a few by default, more as slow tests.

`python -m tests.generated --cases 500 --seed 7` draws more of them.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import first
from tests.generated.drawing import covering, drawn
from tests.generated.figures import Record, check_figures
from tests.generated.grammar import Case
from tests.generated.running import Copies, ViolationError, check, folder_of_killed
from tests.generated.writing import recipe_of
from tests.jobs import assert_same_result
from tests.launch import Runner

COUNT = 18
BY_DEFAULT = 4
IN_CI = 9


@pytest.fixture(scope="module")
def pool() -> list[Case]:
    """Cases to choose from, the same ones in every run."""
    return drawn(80, seed=0)


@pytest.fixture(scope="module")
def chosen(pool: list[Case]) -> list[Case]:
    """The cases that are run; the first few cover most features of the grammar."""
    return covering(COUNT, pool)


@pytest.fixture(scope="module")
def copies(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copies]:
    """Launches copies."""
    launcher = Copies(runner, tmp_path_factory.mktemp("copies"))
    yield launcher
    launcher.close()


@pytest.mark.parametrize("number", first(BY_DEFAULT, range(COUNT), IN_CI))
def test_generated_copy(number: int, chosen: list[Case], copies: Copies, tmp_path: Path) -> None:
    """A copy's metrics are right, ranks agree, a kill changes no bit; mistakes get a sentence."""
    case = chosen[number]
    try:
        check(case, copies, tmp_path / "case")
    except ViolationError as violation:
        pytest.fail(f"{violation}\n\n{case}\n\n{recipe_of(case)}", pytrace=False)


# A case that once failed. Batches of three samples of six numbers begin at addresses that
# vector instructions treat differently: a resumed run must lay them out as the whole run did.
UNALIGNED = Case(
    batch_size=3,
    updates_per_epoch=4,
    validation=13,
    optimizer="own",
    batch_norm=True,
    checkpoint_every=1,
    keep="last",
    seed=2,
    max_grad_norm=0.05,
    kill=(0, 0.8, "save"),
)

# A case that once failed. Its evaluation draws random numbers before `run.evaluating`, and so does
# the rehearsal at the start of a resumed run. The dropout of the next update draws after it.
DRAWS_OUTSIDE = Case(
    updates_per_epoch=4,
    eval_every=4,
    checkpoint_every=1,
    evaluation_draws=True,
    dropout=True,
    kill=(0, 0.7, "save"),
)


@pytest.mark.parametrize(
    "case", [UNALIGNED, DRAWS_OUTSIDE], ids=["unaligned batches", "a rehearsal that draws"]
)
def test_a_kill_changes_no_bit(case: Case, copies: Copies, tmp_path: Path) -> None:
    """A resumed run lays out batches as the whole run did, and a rehearsal leaves no trace."""
    folder = tmp_path / "case"
    check(case, copies, folder)
    assert folder_of_killed(folder / "killed-notes").is_dir(), "the kill came too late"
    assert_same_result(folder / "killed", folder / "whole")


def test_each_copy_is_python(pool: list[Case]) -> None:
    """Each copy parses, and contains no marks of the template."""
    for case in pool:
        source = recipe_of(case)
        ast.parse(source)
        assert "$" not in source
        assert "#?" not in source


def test_the_few_have_much_of_the_grammar(pool: list[Case], chosen: list[Case]) -> None:
    """Together, the chosen cases have every feature of the pool, and the first few have most."""
    every = {feature for case in pool for feature in case.features()}
    assert {feature for case in chosen for feature in case.features()} == every
    few = {feature for case in chosen[:BY_DEFAULT] for feature in case.features()}
    assert len(few) > 0.7 * len(every)


CASE = Case(processes=2, updates_per_epoch=2, epochs=1, log_every=1, validation=3, test=2)
RECORDS: dict[str, list[list[Record]]] = {
    "record": [
        [
            {"update": 1, "loss": [1.0], "metrics": {"a": [100.0]}},
            {"update": 2, "loss": [3.0], "metrics": {"a": [1.0, 2.0, 3.0]}},
        ],
        [
            {"update": 1, "loss": [2.0], "metrics": {"b": [1.0]}},
            {"update": 2, "loss": [5.0], "metrics": {"a": [6.0]}},
        ],
    ],
    "evaluation": [
        [
            {
                "purpose": purpose,
                "step": 2,
                "count": count,
                "totals": {"loss": [3.0], "hits": [1.0]},
                "loss": None,
                "metrics": {},
            }
            for purpose, count in (("validation", 2), ("final", 2))
        ],
        [
            {
                "purpose": "validation",
                "step": 2,
                "count": 1,
                "totals": {"loss": [6.0]},
                "loss": None,
                "metrics": {},
            }
        ],
    ],
}
ROWS: list[Record] = [
    {"progress/global_step": 1, "train/loss": 1.5, "train/a": 100.0, "train/b": 1.0},
    {
        "progress/global_step": 2,
        "train/loss": 4.0,
        "train/a": 3.0,
        "val/loss": 3.0,
        "val/hits": 1 / 3,
        "val/count": 3,
    },
]
SUMMARY = {"train/loss": 4.0, "test/loss": 1.5, "test/hits": 0.5, "test/count": 2}


def violations(rows: list[Record], summary: dict[str, Any]) -> list[str]:
    """Return the symptoms that the check finds in these rows, with the notes above."""
    symptoms: list[str] = []
    check_figures(
        CASE, RECORDS.__getitem__, rows, summary, lambda symptom, _: symptoms.append(symptom)
    )
    return symptoms


def test_right_figures_are_right() -> None:
    """The check accepts metrics that were computed by hand."""
    assert violations(ROWS, SUMMARY) == []


@pytest.mark.parametrize(
    ("row", "name"),
    [(row, name) for row, values in enumerate(ROWS) for name in values if "/global" not in name],
)
def test_a_wrong_figure_is_seen(row: int, name: str) -> None:
    """The check sees a metric that is a thousandth too large, and one that is missing."""
    rows = copy.deepcopy(ROWS)
    rows[row][name] *= 1.001
    assert violations(rows, SUMMARY) == ["a figure is wrong"]
    if not name.endswith("/loss"):
        del rows[row][name]
        assert violations(rows, SUMMARY) == ["names are missing or too many"]


@pytest.mark.parametrize("name", SUMMARY)
def test_a_wrong_final_figure_is_seen(name: str) -> None:
    """The check sees a wrong metric in the summary, too."""
    assert violations(ROWS, {**SUMMARY, name: SUMMARY[name] + 0.01}) == ["a figure is wrong"]
