"""Two runs compared: rows, weights, final figures, facts, and the exit status that follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.run_directory.records import ATTEMPTS
from common.tools.reproduce.comparison import compare_final, compare_rows, compare_weights
from common.tools.reproduce.conclusion import (
    BEYOND_TOLERANCE,
    UNEXPLAINED,
    exit_status_of,
    explanation_of,
    result_of,
)
from common.tools.reproduce.facts import differences_of
from common.tools.reproduce.past_run import PastRun, read_past_run
from common.tools.reproduce.receipt import FactDifference
from tests.unit.tools.reproduce.made_up_runs import LOSSES, write_past_run


@pytest.fixture
def first(tmp_path: Path) -> PastRun:
    """Return the run to reproduce."""
    return write_past_run(tmp_path / "first")


def conclusion(first: PastRun, second: PastRun, tolerance: float = 0.02) -> tuple[str, int, str]:
    """Return the result, the exit status and the explanation of a comparison."""
    final = compare_final(first, second, tolerance)
    result = result_of(compare_rows(first, second), compare_weights(first, second), final)
    differences = differences_of(first, second)
    explanation = explanation_of(result, differences, first.gaps())
    return result, exit_status_of(result, differences), explanation


def test_equal_runs_differ_in_the_clock_alone(first: PastRun, tmp_path: Path) -> None:
    """Neither speed nor other figures of the clock are compared, in rows and in the summary."""
    second = write_past_run(tmp_path / "second", speed=7.0)
    assert compare_rows(first, second).rows == 3
    assert conclusion(first, second)[:2] == ("equal bits", 0)


@pytest.mark.parametrize("place", range(3))
def test_first_differing_row_is_named(first: PastRun, tmp_path: Path, place: int) -> None:
    """By its update, with the row before it, and with the difference at the end."""
    losses = [*LOSSES]
    for later in range(place, 3):
        losses[later] += 2**-50
    rows = compare_rows(first, write_past_run(tmp_path / "second", losses=tuple(losses)))
    assert rows.first is not None
    assert (rows.first.update, rows.first.figure) == (2 * place + 2, "train/loss")
    assert (rows.first.before, rows.first.now) == (LOSSES[place], losses[place])
    assert rows.previous_update == (2 * place or None)
    assert rows.at_end is not None
    assert (rows.at_end.update, rows.at_end.now) == (6, losses[2])


@pytest.mark.parametrize(
    ("losses", "is_equal"),
    [((1.5, None, 1.0), True), ((1.5, 1.25, 1.0), False), ((1.5, None), False)],
)
def test_nan_equals_nan_alone(
    tmp_path: Path, losses: tuple[float | None, ...], is_equal: bool
) -> None:
    """It is null in a row. A row that is missing is a difference, too."""
    first = write_past_run(tmp_path / "first", losses=(1.5, None, 1.0))
    second = write_past_run(tmp_path / "second", losses=losses)
    assert (conclusion(first, second)[0] == "equal bits") is is_equal


def test_rows_after_the_end_of_the_old_run_do_not_count(first: PastRun, tmp_path: Path) -> None:
    """A run that is reproduced may have been stopped."""
    second = write_past_run(tmp_path / "second", losses=(*LOSSES, 0.5))
    assert conclusion(first, second)[0] == "equal bits"
    assert compare_rows(second, first).missing == [8]
    assert conclusion(second, first)[:2] == ("beyond tolerance", UNEXPLAINED)


def test_weights_that_differ_are_named(first: PastRun, tmp_path: Path) -> None:
    """The rows may be equal all the same."""
    second = write_past_run(tmp_path / "second", weight=1.5)
    weights = compare_weights(first, second)
    assert (weights.first_differing, weights.differing_files) == (4, ["model.safetensors"])
    assert weights.exported_difference == "1 of 1 tensors differ, w by up to 0.5"
    result, status, explanation = conclusion(first, second)
    assert (result, status) == ("within tolerance", UNEXPLAINED)
    assert explanation.startswith("no recorded fact differs: code, flags, data")


# What makes a difference, and how a table calls it.
CAUSES: dict[str, dict[str, Any]] = {
    "threads per process": {"environment": {"threads_per_process": 1}},
    "processes": {"environment": {"world_size": 2}},
    "precision": {"environment": {"mixed_precision": "bf16"}},
    "device": {"environment": {"device": "another abacus"}},
    "--learning-rate": {"config": {"learning_rate": 0.2}},
    "data's fingerprint": {"data": {"fingerprint": "other"}},
    "cpu instructions of torch": {"attempt": {"libraries": {"cpu instructions": "AVX2"}}},
    "version of torch": {"attempt": {"packages": {"torch": "2.11.0", "rich": "14.0"}}},
    "commit": {"attempt": {"trees": [{"folder": "/nowhere", "commit": "cd" * 20}]}},
    "MKL_CBWR": {"attempt": {"variables": {"MKL_CBWR": "AVX2"}}},
}


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize(("accuracy", "status"), [(0.505, 0), (0.6, BEYOND_TOLERANCE)])
def test_differing_fact_explains_other_bits(
    tmp_path: Path, cause: str, accuracy: float, status: int
) -> None:
    """Then the final figures may differ by the tolerance."""
    known = {"environment": {"threads_per_process": 2}, "data": {"fingerprint": "one"}}
    first = write_past_run(tmp_path / "first", **known)
    changes = {**CAUSES[cause]}
    for group, values in known.items():
        changes[group] = values | changes.get(group, {})
    second = write_past_run(tmp_path / "second", losses=(1, 1, 1), accuracy=accuracy, **changes)
    (difference,) = differences_of(first, second)
    assert (difference.fact, difference.changes_bits) == (cause, True)
    result, actual_status, explanation = conclusion(first, second)
    assert result == ("beyond tolerance" if status else "within tolerance")
    assert actual_status == status
    assert explanation.startswith(f"this explains it: {cause} was ")
    assert conclusion(first, second, tolerance=0.5)[1] == 0
    equal = write_past_run(tmp_path / "equal", **changes)
    assert conclusion(first, equal)[:2] == ("equal bits", 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"attempt": {"packages": {"torch": "2.13.0", "rich": "15.0"}}},
        {"attempt": {"packages": {"torch": "2.13.0", "rich": "14.0", "more": "1"}}},
        {"attempt": {"cores": 64}},
        {"environment": {"device": "an abacus, 64 cores"}},
    ],
)
def test_other_facts_are_no_excuse(first: PastRun, tmp_path: Path, changes: dict[str, Any]) -> None:
    """They are shown, and they change no bits."""
    second = write_past_run(tmp_path / "second", losses=(1, 1, 1), **changes)
    assert not any(difference.changes_bits for difference in differences_of(first, second))
    assert conclusion(first, second)[1] == UNEXPLAINED


def test_older_run_says_what_it_lacks(first: PastRun, tmp_path: Path) -> None:
    """A fact that a run did not record is not compared."""
    write_past_run(tmp_path / "old", environment={"versions": {"torch": "2.13.0"}})
    (tmp_path / "old" / ATTEMPTS).unlink()
    old = read_past_run(tmp_path / "old")
    assert differences_of(old, first) == []
    (gap,) = old.gaps()
    assert "saved no patch" in gap
    second = write_past_run(tmp_path / "second", losses=(1, 1, 1))
    assert "as far as the run recorded them (the run is of a version" in conclusion(old, second)[2]


def test_edited_config_is_a_cause(first: PastRun, tmp_path: Path) -> None:
    """The run was not trained with what the file says now."""
    path = first.directory / "config.json"
    path.write_text(path.read_text().replace('"learning_rate": 0.1', '"learning_rate": 0.2'))
    edited = read_past_run(first.directory)
    second = write_past_run(tmp_path / "second", config={"learning_rate": 0.2})
    assert differences_of(edited, second) == [
        FactDifference(fact="config.json", before="edited", now="as written", changes_bits=True)
    ]
    assert edited.gaps() == ["its config.json was edited after the run wrote it"]
