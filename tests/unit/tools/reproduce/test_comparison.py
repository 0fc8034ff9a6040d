"""Two runs compared: rows, weights, final figures, facts, and the exit status that follows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.objective import Objective
from common.run_directory.records import ATTEMPTS, CHECKPOINT_DIGESTS
from common.storage.json_files import write_json
from common.tools.reproduce.compared_run import ComparedRun, read_compared_run
from common.tools.reproduce.comparison import (
    PairedFigures,
    allowed_difference,
    compare_final,
    compare_rows,
    compare_weights,
)
from common.tools.reproduce.comparison_in_words import final_in_words, rows_in_words
from common.tools.reproduce.conclusion import (
    ANOTHER_EXPERIMENT,
    BEYOND_TOLERANCE,
    UNEXPLAINED,
    draw_conclusion,
)
from common.tools.reproduce.fact_differences import differences_of, flag_differences_within
from common.tools.reproduce.receipt import FactDifference
from common.tools.reproduce.report import result_line
from tests.unit.tools.reproduce.made_up_runs import ATTEMPT, LOSSES, write_rows, write_run


@pytest.fixture
def first(tmp_path: Path) -> ComparedRun:
    """Return the run to reproduce."""
    return write_run(tmp_path / "first")


def conclusion(
    first: ComparedRun, second: ComparedRun, tolerance: float | None = 0.02
) -> tuple[str, int, str]:
    """Return the result, the exit status and the explanation of a comparison."""
    drawn = draw_conclusion(first, second, differences_of(first, second), tolerance)
    return drawn.result, drawn.exit_status, drawn.explanation


def test_equal_runs_differ_in_the_clock_alone(first: ComparedRun, tmp_path: Path) -> None:
    """Neither speed nor other figures of the clock are compared, in rows and in the summary."""
    second = write_run(tmp_path / "second", speed=7.0)
    assert compare_rows(first, second).rows == 3
    assert conclusion(first, second)[:2] == ("equal bits", 0)


@pytest.mark.parametrize(("row_count", "rows"), [(1, "1 row,"), (3, "3 rows,")])
@pytest.mark.parametrize(
    ("checkpoint_count", "checkpoints"),
    [(0, "0 checkpoints and"), (1, "1 checkpoint and"), (2, "2 checkpoints and")],
)
def test_result_counts_in_singular_and_plural(
    row_count: int, rows: str, checkpoint_count: int, checkpoints: str, tmp_path: Path
) -> None:
    """One row is not "1 rows", and one checkpoint is not "1 checkpoints"."""
    runs = []
    for name in ("first", "second"):
        folder = write_run(tmp_path / name, losses=LOSSES[:row_count]).directory
        digests = [
            json.dumps({"progress/global_step": step, "files": {}}) + "\n"
            for step in range(1, checkpoint_count + 1)
        ]
        (folder / CHECKPOINT_DIGESTS).write_text("".join(digests))
        runs.append(read_compared_run(folder))
    drawn = draw_conclusion(*runs, differences=[], tolerance=None)
    line = result_line(drawn, "first", runs[1], commit=None, time="2026-05-04T12:00:00Z")
    assert f": equal bits in {rows} {checkpoints} the exported weights; " in line


def test_runs_with_equal_weights_and_other_rows(first: ComparedRun, tmp_path: Path) -> None:
    """Training is not the cause then: the record was changed, or an evaluation draws."""
    changed = write_run(tmp_path / "changed", accuracy=0.9, losses=(*LOSSES[:2], 9.0))
    result, status, explanation = conclusion(first, changed)
    assert (result, status) == ("beyond tolerance", 3)
    assert "all weights are equal, so the record of the old run was changed" in explanation
    others = write_run(tmp_path / "others", losses=(*LOSSES[:2], 9.0), weight=2.0)
    assert "the recipe does something that its seed does not fix" in conclusion(first, others)[2]


@pytest.mark.parametrize(("accuracy", "expected"), [(0.51, "within"), (0.9, "beyond")])
def test_changed_summary_is_no_reproduction(
    first: ComparedRun, tmp_path: Path, accuracy: float, expected: str
) -> None:
    """A figure that somebody edited in the summary alone is found, however small the change is."""
    changed = write_run(tmp_path / "changed", accuracy=accuracy)
    result, status, explanation = conclusion(changed, first)
    assert (result, status) == (f"{expected} tolerance", UNEXPLAINED)
    assert "all weights are equal, so the record of the old run was changed" in explanation


@pytest.mark.parametrize(("weight", "expected"), [(1.0, "within"), (2.0, "beyond")])
def test_missing_row(first: ComparedRun, tmp_path: Path, weight: float, expected: str) -> None:
    """A run with equal weights was not cut short."""
    second = write_run(tmp_path / "second", losses=LOSSES[:2], weight=weight)
    assert conclusion(first, second)[0] == f"{expected} tolerance"


# The mean losses of a run of six updates, whose losses are 6, 5, 4, 3, 2 and 1, with three log
# lines and with two; and the accuracy of the evaluations after updates 3 and 6.
ROWS_OF_2: dict[int, dict[str, float | None]] = {
    2: {"train/loss": 5.5},
    3: {"test/accuracy": 0.25},
    4: {"train/loss": 3.5},
    6: {"train/loss": 1.5, "test/accuracy": 0.5},
}
ROWS_OF_3: dict[int, dict[str, float | None]] = {
    3: {"train/loss": 5.0, "test/accuracy": 0.25},
    6: {"train/loss": 2.0, "test/accuracy": 0.5},
}


def runs_with_other_log_lines(
    tmp_path: Path, rows: dict[int, dict[str, float | None]], weight: float = 1.0
) -> tuple[ComparedRun, ComparedRun]:
    """Return a run with `ROWS_OF_2`, and one with other rows and another `--log-every`."""
    old = write_run(tmp_path / "old", config={"log_every": 2})
    new = write_run(tmp_path / "new", config={"log_every": 3}, weight=weight)
    return write_rows(old, ROWS_OF_2), write_rows(new, rows)


def test_other_log_lines_leave_out_what_covers_other_updates(tmp_path: Path) -> None:
    """Evaluations and weights are compared, and they are equal."""
    old, new = runs_with_other_log_lines(tmp_path, ROWS_OF_3)
    rows = compare_rows(old, new)
    assert (rows.rows, rows.missing, rows.left_out) == (2, [], [2, 4, 6])
    assert rows_in_words(rows) == (
        "2 rows are equal; training figures of 3 rows not compared, because --log-every sets "
        "other log lines"
    )
    assert conclusion(old, new)[:2] == ("equal bits", 0)


@pytest.mark.parametrize("accuracy", [0.2, None])
def test_evaluation_between_other_log_lines_must_be_equal(
    tmp_path: Path, accuracy: float | None
) -> None:
    """This also holds for an evaluation that the new run lacks."""
    changed = {3: {"test/accuracy": accuracy}, 6: ROWS_OF_3[6]}
    old, new = runs_with_other_log_lines(tmp_path, changed)
    rows = compare_rows(old, new)
    assert rows.first is not None
    assert (rows.first.update, rows.first.figure, rows.first.now) == (3, "test/accuracy", accuracy)
    assert conclusion(old, new)[1] == UNEXPLAINED
    without_row = write_rows(new, {6: ROWS_OF_3[6]})
    assert compare_rows(old, without_row).missing == [3]
    assert conclusion(old, without_row)[1] == UNEXPLAINED


@pytest.mark.parametrize("loss", [3.5, 3.25])
def test_log_lines_that_cover_the_same_updates_are_compared(tmp_path: Path, loss: float) -> None:
    """One run may have further log lines before these."""
    rows = {1: {"train/loss": 6.0}, 2: {"train/loss": 5.0}, 4: {"train/loss": loss}}
    old, new = runs_with_other_log_lines(tmp_path, rows | {6: ROWS_OF_2[6]})
    write_rows(old, {step: ROWS_OF_2[step] for step in (2, 4, 6)})
    old = read_compared_run(old.directory)
    compared = compare_rows(old, new)
    assert compared.left_out == [2]
    assert (compared.first is None) is (loss == 3.5)
    assert conclusion(old, new)[1] == (0 if loss == 3.5 else UNEXPLAINED)


def test_log_lines_do_not_explain_other_weights(tmp_path: Path) -> None:
    """A log line computes nothing that is learned."""
    old, new = runs_with_other_log_lines(tmp_path, ROWS_OF_3, weight=2.0)
    result, status, explanation = conclusion(old, new)
    assert (result, status) == ("within tolerance", UNEXPLAINED)
    assert "the only facts that differ should change no bits (--log-every was 2" in explanation


@pytest.mark.parametrize(("weight", "status"), [(1.0, 0), (2.0, UNEXPLAINED)])
def test_without_a_common_row_the_weights_decide(
    tmp_path: Path, weight: float, status: int
) -> None:
    """Neither run has evaluated, and no two log lines cover the same updates."""
    old, new = runs_with_other_log_lines(tmp_path, {3: {"train/loss": 5.0}}, weight)
    old = write_rows(old, {2: ROWS_OF_2[2], 4: ROWS_OF_2[4]})
    assert compare_rows(old, new).rows == 0
    assert conclusion(old, new)[1] == status


@pytest.mark.parametrize("place", range(3))
def test_first_differing_row_is_named(first: ComparedRun, tmp_path: Path, place: int) -> None:
    """The text has the row's update, the update before it, and the difference at the end."""
    losses = [*LOSSES]
    for later in range(place, 3):
        losses[later] += 2**-50
    rows = compare_rows(first, write_run(tmp_path / "second", losses=tuple(losses)))
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
    """NaN is null in a row. A missing row is a difference, too."""
    first = write_run(tmp_path / "first", losses=(1.5, None, 1.0))
    second = write_run(tmp_path / "second", losses=losses)
    assert (conclusion(first, second)[0] == "equal bits") is is_equal


def test_rows_after_the_end_of_the_old_run_do_not_count(first: ComparedRun, tmp_path: Path) -> None:
    """A run that is reproduced may have been stopped."""
    second = write_run(tmp_path / "second", losses=(*LOSSES, 0.5))
    assert conclusion(first, second)[0] == "equal bits"
    longer = write_run(tmp_path / "longer", losses=(*LOSSES, 0.5), weight=1.5)
    assert compare_rows(longer, first).missing == [8]
    assert conclusion(longer, first)[:2] == ("beyond tolerance", UNEXPLAINED)


def test_weights_that_differ_are_named(first: ComparedRun, tmp_path: Path) -> None:
    """The rows may be equal all the same."""
    second = write_run(tmp_path / "second", weight=1.5)
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
    "device": {"environment": {"processor": "an abacus, family 2"}},  # of the same name
    "cpu instructions of torch": {"attempt": {"libraries": {"cpu instructions": "AVX2"}}},
    "version of torch": {"attempt": {"packages": {"torch": "2.11.0", "rich": "14.0"}}},
    "MKL_CBWR": {"attempt": {"variables": {"MKL_CBWR": "AVX2"}}},
}
# The same, for what makes another experiment.
CHOICES: dict[str, dict[str, Any]] = {
    "precision": {"environment": {"mixed_precision": "bf16"}},
    "--learning-rate": {"config": {"learning_rate": 0.2}},
    "data's fingerprint": {"data": {"fingerprint": "other"}},
    "commit": {"attempt": {"trees": [{"folder": "/nowhere", "commit": "cd" * 20}]}},
    "initial weights": {"initial_weights": "01" * 32},
}


KNOWN = {"environment": {"threads_per_process": 2}, "data": {"fingerprint": "one"}}


def with_known_facts(changes: dict[str, Any]) -> dict[str, Any]:
    """Return changes of a run that keeps the other facts in `KNOWN`."""
    return changes | {name: facts | changes.get(name, {}) for name, facts in KNOWN.items()}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("accuracy", [0.5, 0.505, 0.6])
def test_another_experiment_is_no_reproduction(
    tmp_path: Path, choice: str, accuracy: float
) -> None:
    """However near its figures are, and whatever the tolerance is; equal bits are fine."""
    changes = with_known_facts(CHOICES[choice])
    first = write_run(tmp_path / "first", **KNOWN)
    second = write_run(tmp_path / "second", losses=(1, 1, 1), accuracy=accuracy, **changes)
    result, status, explanation = conclusion(first, second, tolerance=0.5)
    assert (result, status) == ("another experiment", ANOTHER_EXPERIMENT)
    assert explanation.startswith(f"this is a different experiment: {choice} was ")
    equal = write_run(tmp_path / "equal", **changes)
    assert conclusion(first, equal)[:2] == ("equal bits", 0)


@pytest.mark.parametrize(
    ("count", "accuracy", "is_within"),
    # 2 √(2 · 0.94 · 0.06 / 10,000) = 0.0067
    [(10_000, 0.935, True), (10_000, 0.930, False), (100, 0.90, True), (None, 0.93, True)],
)
def test_tolerance_of_an_accuracy_follows_from_its_samples(
    tmp_path: Path, count: int | None, accuracy: float, is_within: bool
) -> None:
    """The tolerance is two standard errors of the difference of two proportions."""
    runs = []
    for name, value in (("first", 0.94), ("second", accuracy)):
        run = write_run(tmp_path / name, accuracy=value)
        summary = {"test/accuracy": value, "test/loss": 0.2}
        if count is not None:
            summary["test/count"] = float(count)
        write_json(run.directory / "summary.json", summary)
        runs.append(read_compared_run(run.directory))
    first, second = runs
    final = compare_final(first, second, None)
    assert final.is_within_tolerance is is_within
    assert (final.largest, final.samples) == ("test/accuracy", count)
    assert final.largest_difference == pytest.approx(0.94 - accuracy)
    if count == 10_000:
        assert final.allowed["test/accuracy"] == pytest.approx(0.0069, abs=4e-4)
        assert "two standard errors with 10,000 samples" in final_in_words(final)
    assert compare_final(first, second, 0.5).is_within_tolerance
    assert final_in_words(compare_final(first, first, 0.5)) == "all final figures are equal"
    assert not compare_final(first, second, 1e-6).is_within_tolerance


ACCURACY = {"test/accuracy": 0.94, "test/count": 10_000.0}


@pytest.mark.parametrize(
    ("figures", "changes", "is_within", "largest"),
    [
        (ACCURACY | {"test/loss": 0.2}, {"test/loss": 0.3}, True, "test/loss"),
        (ACCURACY | {"test/loss": 0.2}, {"test/loss": 0.5}, False, "test/loss"),
        (ACCURACY | {"test/f1": 0.9}, {"test/accuracy": 0.93}, False, "test/accuracy"),
        (ACCURACY | {"test/loss": 0.2}, {"test/loss": None}, False, "test/loss"),
        (ACCURACY | {"val/loss": 0.2}, {"val/loss": 0.21}, False, "val/loss"),
        (ACCURACY | {"test/top5_accuracy": 0.9}, {"test/top5_accuracy": 0.2}, False, None),
        (ACCURACY | {"val/accuracy": 0.9}, {"val/accuracy": 0.2}, False, "val/accuracy"),
        (ACCURACY, {"test/accuracy": 0.2, "test/count": 5_000.0}, False, "test/count"),
        (ACCURACY, {"test/count": 9_999.0}, False, "test/count"),
        ({"test/loss": 0.2, "test/count": 10_000.0}, {"test/loss": 0.3}, False, "test/loss"),
        ({"test/loss": 0.2, "test/count": 10_000.0}, {"test/loss": 0.201}, True, "test/loss"),
    ],
)
def test_loss_may_differ_more_beside_an_accuracy(
    tmp_path: Path,
    figures: dict[str, float],
    changes: dict[str, float | None],
    is_within: bool,
    largest: str | None,
) -> None:
    """An accuracy never may, and a figure that only one run has is beyond any tolerance."""
    runs = []
    for name, summary in (("first", figures), ("second", figures | changes)):
        run = write_run(tmp_path / name)
        write_json(run.directory / "summary.json", summary)
        runs.append(read_compared_run(run.directory))
    final = compare_final(*runs, None)
    assert final.is_within_tolerance is is_within
    assert final.largest == largest or largest is None


def test_objective_has_no_loose_tolerance() -> None:
    """A loss that is the objective may not differ more because an accuracy is beside it."""
    figures: PairedFigures = {
        "val/accuracy": (0.94, 0.94),
        "val/count": (100.0, 100.0),
        "val/loss": (0.2, 0.21),
        "val/best_loss": (0.2, 0.21),
    }
    for name in ("val/loss", "val/best_loss"):
        loose = allowed_difference(name, figures, Objective.parse("accuracy:max"), None)
        strict = allowed_difference(name, figures, Objective.parse("loss:min"), None)
        assert loose == pytest.approx(0.105)
        assert strict == pytest.approx(0.0042)


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize(("accuracy", "status"), [(0.505, 0), (0.6, BEYOND_TOLERANCE)])
def test_differing_fact_explains_other_bits(
    tmp_path: Path, cause: str, accuracy: float, status: int
) -> None:
    """Then the final figures may differ by the tolerance."""
    changes = with_known_facts(CAUSES[cause])
    first = write_run(tmp_path / "first", **KNOWN)
    second = write_run(tmp_path / "second", losses=(1, 1, 1), accuracy=accuracy, **changes)
    (difference,) = differences_of(first, second)
    assert (difference.fact, difference.changes_bits) == (cause, True)
    result, actual_status, explanation = conclusion(first, second)
    assert result == ("beyond tolerance" if status else "within tolerance")
    assert actual_status == status
    assert explanation.startswith(f"this explains it: {cause} was ")
    assert conclusion(first, second, tolerance=0.5)[1] == 0
    equal = write_run(tmp_path / "equal", **changes)
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
def test_other_facts_are_no_excuse(
    first: ComparedRun, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Facts that change no bits are shown, but they do not explain a difference."""
    second = write_run(tmp_path / "second", losses=(1, 1, 1), **changes)
    assert not any(difference.changes_bits for difference in differences_of(first, second))
    assert conclusion(first, second)[1] == UNEXPLAINED


def test_another_machine_may_draw_other_initial_weights(first: ComparedRun, tmp_path: Path) -> None:
    """A device may change the last bits of the weights, but a number of machines may not."""
    other_weights: dict[str, Any] = {"losses": (1, 1, 1), "initial_weights": "01" * 32}
    device = {"processor": "another abacus"}
    second = write_run(tmp_path / "second", environment=device, **other_weights)
    assert conclusion(first, second)[:2] == ("within tolerance", 0)
    machines = {"machines": 2}
    third = write_run(tmp_path / "third", attempt=machines, **other_weights)
    assert conclusion(first, third)[1] == ANOTHER_EXPERIMENT


@pytest.mark.parametrize(
    ("device_type", "deterministic", "is_named"),
    [("cuda", False, True), ("cuda", True, False), ("cuda", None, False), ("cpu", False, False)],
)
def test_missing_flag_deterministic_explains_other_bits(
    tmp_path: Path, device_type: str, deterministic: bool | None, is_named: bool
) -> None:
    """It matters on a GPU alone, and only if no differing fact explains the bits."""
    environment = {
        "device": "Some GPU",
        "processor": "Some GPU",  # on a CPU, the processor is the device
        "device_type": device_type,
        "deterministic": deterministic,
    }
    first = write_run(tmp_path / "first", environment=environment)
    second = write_run(tmp_path / "second", losses=(1, 1, 1), weight=1.5, environment=environment)
    result, status, explanation = conclusion(first, second)
    assert (result, status) == ("within tolerance", 0 if is_named else UNEXPLAINED)
    far = write_run(tmp_path / "far", losses=(1, 1, 1), accuracy=0.9, environment=environment)
    assert conclusion(first, far)[1] == (BEYOND_TOLERANCE if is_named else UNEXPLAINED)
    cause = "this may explain it: both runs trained on Some GPU without --deterministic"
    assert (cause in explanation) is is_named
    assert ("the recipe does something that its seed does not fix" in explanation) is not is_named
    equal = write_run(tmp_path / "equal", environment=environment)
    assert conclusion(first, equal)[2] == "no fact that changes bits differs"
    environment |= {"device": "another GPU", "processor": "another GPU"}
    third = write_run(tmp_path / "third", losses=(1, 1, 1), environment=environment)
    assert conclusion(first, third)[2] == (
        "this explains it: device was Some GPU and is another GPU"
    )


def test_missing_digest_of_initial_weights_is_said(tmp_path: Path) -> None:
    """The model may be large."""
    first = write_run(tmp_path / "first", initial_weights=None)
    (gap,) = first.gaps()
    assert gap.startswith("it has no digest of its initial weights")
    assert differences_of(first, write_run(tmp_path / "second")) == []


def test_change_between_attempts_explains_other_bits(tmp_path: Path) -> None:
    """The new run is trained from its start like the last attempt."""
    first = write_run(tmp_path / "first")
    environment = {"world_size": 1, "threads_per_process": 2, "mixed_precision": "no"}
    last = {**ATTEMPT, **environment, "global_step": 4}
    earlier = {**last, "global_step": 0, "world_size": 2, "threads_per_process": 1}
    write_json(first.directory / ATTEMPTS, {"attempts": [earlier, last]})
    resumed = read_compared_run(first.directory)
    (gap,) = resumed.gaps()
    assert gap.startswith(
        "it resumed with processes: 1 instead of 2, threads per process: 2 instead of 1 at update 4"
    )
    second = write_run(tmp_path / "second", losses=(1, 1, 1), attempt=environment)
    result, status, explanation = conclusion(resumed, second)
    assert (result, status) == ("within tolerance", 0)
    assert explanation == (
        "one or several of these explain it: processes until update 4 was 2 and is 1; threads per "
        "process until update 4 was 1 and is 2"
    )
    changed = {**last, "changed_flags": {"num_workers": 3, "num_threads": 2, "dataset": "/data/x"}}
    write_json(first.directory / ATTEMPTS, {"attempts": [{**last, "global_step": 0}, changed]})
    (difference,) = differences_of(read_compared_run(first.directory), second)
    assert (difference.fact, difference.now) == ("--num-workers until update 4", "3")
    assert not difference.defines_experiment


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3], [(4, "another value", "3")]),
        ([3, 1], [(8, "3", "1")]),  # the first value may have been 1, too
        ([3, 1, 3], [(4, "another value", "3"), (12, "1", "3")]),
        ([1, 2, 3], [(8, "1", "3"), (12, "2", "3")]),
    ],
)
def test_flag_that_changed_several_times_is_compared_with_its_last_value(
    values: list[int], expected: list[tuple[int, str, str]], tmp_path: Path
) -> None:
    """A run records the values to which a flag was changed, but not the first one."""
    run = write_run(tmp_path / "run", config={"num_workers": values[-1]})
    attempts = [{**ATTEMPT, "global_step": 0}]
    for number, value in enumerate(values, start=1):
        changed = {**ATTEMPT, "global_step": 4 * number, "changed_flags": {"num_workers": value}}
        attempts.append(changed)
    write_json(run.directory / ATTEMPTS, {"attempts": attempts})
    differences = flag_differences_within(read_compared_run(run.directory))
    shown = [(difference.fact, difference.before, difference.now) for difference in differences]
    assert shown == [
        (f"--num-workers until update {step}", before, now) for step, before, now in expected
    ]


def test_attempt_that_was_not_recorded_is_said(first: ComparedRun) -> None:
    """A run may be killed before it has saved its code and machine."""
    write_json(first.directory / ATTEMPTS, {"attempts": [{**ATTEMPT, "global_step": 4}]})
    (gap,) = read_compared_run(first.directory).gaps()
    assert gap == "the code and machine of its first 4 updates were not recorded"


def test_flags_are_compared_in_all_digits(first: ComparedRun, tmp_path: Path) -> None:
    """A table of other tools would round them."""
    second = write_run(tmp_path / "second", config={"learning_rate": 0.1000000001})
    (difference,) = differences_of(first, second)
    assert difference.now == "0.1000000001"


@pytest.mark.parametrize("free", [{"own_workers": True}, {}])
def test_own_flag_that_changes_no_learning_defines_no_experiment(
    free: dict[str, bool], tmp_path: Path
) -> None:
    """`config.json` says so of a flag that only the recipe has."""
    runs = [
        write_run(tmp_path / f"run{workers}", config={"own_workers": workers}, free_on_resume=free)
        for workers in (1, 2)
    ]
    (difference,) = differences_of(*runs)
    assert difference.fact == "--own-workers"
    assert difference.defines_experiment == (not free)


def test_version_of_an_imported_package_may_change_bits(tmp_path: Path) -> None:
    """Whichever package it is; others are named where nothing else explains the difference."""
    packages = {"torch": "2.13.0", "rich": "14.0", "timm": "1.0"}
    newer = {"torch": "2.13.0", "rich": "15.0", "timm": "1.1"}
    runs = {}
    for name, versions, imported in (
        ("first", packages, ["timm", "torch"]),
        ("second", newer, ["timm", "torch"]),
        ("not importing", packages, ["torch"]),
        ("not importing, newer", newer, ["torch"]),
    ):
        attempt = {"packages": versions, "imported": imported}
        losses = (1, 1, 1) if versions is newer else LOSSES
        weight = 1.5 if versions is newer else 1.0
        runs[name] = write_run(tmp_path / name, attempt=attempt, losses=losses, weight=weight)
    _, status, explanation = conclusion(runs["first"], runs["second"])
    assert (status, explanation) == (0, "this explains it: version of timm was 1.0 and is 1.1")
    _, status, explanation = conclusion(runs["not importing"], runs["not importing, newer"])
    assert status == UNEXPLAINED
    names = "version of rich was 14.0 and is 15.0, version of timm was 1.0 and is 1.1"
    assert explanation.startswith(
        f"the only facts that differ should change no bits ({names}), so one"
    )


def test_facts_that_a_run_lacks_are_not_compared(first: ComparedRun, tmp_path: Path) -> None:
    """A new run may have failed to write its `attempts.json`. The text names the old run's gaps."""
    write_run(tmp_path / "new", environment={"versions": {"torch": "2.11.0"}})
    (tmp_path / "new" / ATTEMPTS).unlink()
    new = read_compared_run(tmp_path / "new")
    assert differences_of(first, new) == []
    assert differences_of(new, first) == []
    old = write_run(tmp_path / "old", initial_weights=None)
    (gap,) = old.gaps()
    assert "no digest of its initial weights" in gap
    second = write_run(tmp_path / "second", losses=(1, 1, 1))
    assert f"as far as the run recorded them ({gap})" in conclusion(old, second)[2]


def test_edited_config_is_a_cause(first: ComparedRun, tmp_path: Path) -> None:
    """The run was not trained with what the file says now."""
    path = first.directory / "config.json"
    path.write_text(path.read_text().replace('"learning_rate": 0.1', '"learning_rate": 0.2'))
    edited = read_compared_run(first.directory)
    second = write_run(tmp_path / "second", config={"learning_rate": 0.2})
    assert differences_of(edited, second) == [
        FactDifference(
            fact="config.json",
            before="edited",
            now="as written",
            changes_bits=True,
            defines_experiment=True,
        )
    ]
    assert edited.gaps() == ["its config.json was edited after the run wrote it"]


@pytest.mark.parametrize(("last_loss", "is_within"), [(1.001, True), (2.0, False)])
def test_last_common_row_counts_if_only_one_run_was_evaluated(
    first: ComparedRun, tmp_path: Path, last_loss: float, is_within: bool
) -> None:
    """A run that was killed before it wrote its summary can still be reproduced."""
    (first.directory / "summary.json").unlink()
    killed = read_compared_run(first.directory)
    finished = write_run(tmp_path / "second", losses=(*LOSSES[:-1], last_loss))
    for old, new in ((killed, finished), (finished, killed)):
        final = compare_final(old, new, 0.02)
        assert final.largest == "train/loss"
        assert final.is_within_tolerance is is_within
