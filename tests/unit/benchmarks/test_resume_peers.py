"""Counting what a kill did to samples and rows, the drawn kills, the tables, and mistakes."""

from __future__ import annotations

import json
import random
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import resume_peers
from benchmarks.resume import report
from benchmarks.resume.contestants import (
    CONTESTANTS,
    newest_by_number,
    newest_by_time,
    newest_of_lightning,
    newest_of_recipe,
    newest_of_trainer,
    steps_of_lightning,
    steps_of_recipe,
    steps_of_tracker,
    steps_of_trainer,
)
from benchmarks.resume.counting import (
    Update,
    count_other_batches,
    count_repeated_orders,
    count_rows,
    count_samples,
    final_trajectory,
    merge_ranks,
)
from benchmarks.resume.kills import MOMENTS, UNINTERRUPTED, Kill, drawn_kills
from benchmarks.resume.measuring import largest_difference, repeating_command, same_bits
from benchmarks.resume.results import Result, Results
from benchmarks.resume.schedule import SAVE_EVERY, UPDATES, UPDATES_PER_EPOCH

BATCH = 4
PER_EPOCH = 5
SAMPLES = BATCH * PER_EPOCH
EPOCHS = 3
ALL = PER_EPOCH * EPOCHS
SEEDS = st.integers(0, 10**6)


def epoch_batches(epoch: int, seed: int) -> list[tuple[int, ...]]:
    """Return the batches of an epoch, in an order that depends on the seed."""
    samples = list(range(SAMPLES))
    random.Random(f"{seed} {epoch}").shuffle(samples)
    return [tuple(samples[start : start + BATCH]) for start in range(0, SAMPLES, BATCH)]


def whole_training(seed: int = 0) -> list[Update]:
    """Return the updates of an uninterrupted training."""
    batches = [(epoch, batch) for epoch in range(EPOCHS) for batch in epoch_batches(epoch, seed)]
    return [Update(number, *pair) for number, pair in enumerate(batches, start=1)]


@st.composite
def rollbacks(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Draw kills as pairs: the last update before the kill, and that of the checkpoint before."""
    kills = []
    saved = 0
    for _ in range(draw(st.integers(0, 3))):
        killed = draw(st.integers(saved + 1, ALL))
        saved = draw(st.integers(saved, min(killed, ALL - 1)))
        kills.append((killed, saved))
    return kills


# ------------------------------------------------------------------------------- Counting


@given(rollbacks(), SEEDS)
def test_exact_resumes_leave_no_trace(kills: list[tuple[int, int]], seed: int) -> None:
    """Updates that were rolled back do not count, however often that happened."""
    whole = whole_training(seed)
    attempts = []
    start = 0
    for killed, saved in kills:
        attempts.append(whole[start:killed])
        start = saved
    trajectory = final_trajectory([*attempts, whole[start:]])
    assert trajectory == whole
    counts = count_samples(trajectory, SAMPLES, range(EPOCHS))
    assert counts.all_repeated == counts.all_lost == 0
    assert count_other_batches(trajectory, whole) == 0
    assert count_repeated_orders(trajectory) == 0


@given(st.integers(1, PER_EPOCH - 1), st.integers(0, EPOCHS - 1), SEEDS)
def test_epoch_resumed_in_another_order_repeats_and_loses_samples(
    done: int, epoch: int, seed: int
) -> None:
    """The figures are those of sets, by hand: what both parts of the epoch have, and what none."""
    whole = whole_training(seed)
    start = epoch * PER_EPOCH + done
    other = epoch_batches(epoch, seed + 1)[done:]
    resumed = [Update(start + number, epoch, batch) for number, batch in enumerate(other, start=1)]
    rest = [update for update in whole if update.epoch > epoch]
    trajectory = final_trajectory([whole[: start + 1], [*resumed, *rest]])
    first_part = {sample for update in whole[start - done : start] for sample in update.samples}
    second_part = {sample for batch in other for sample in batch}
    counts = count_samples(trajectory, SAMPLES, range(EPOCHS))
    assert counts.repeated == {
        number: len(first_part & second_part) if number == epoch else 0 for number in range(EPOCHS)
    }
    assert counts.lost[epoch] == SAMPLES - len(first_part | second_part)
    assert counts.all_lost == counts.lost[epoch]
    different = sum(
        sorted(update.samples) != sorted(there.samples)
        for update, there in zip(trajectory, whole, strict=True)
    )
    assert count_other_batches(trajectory, whole) == different


@given(st.integers(1, PER_EPOCH - 1), SEEDS)
def test_epoch_begun_anew_repeats_samples_and_loses_none(done: int, seed: int) -> None:
    """A framework that starts the interrupted epoch again makes more updates."""
    whole = whole_training(seed)
    resumed = [replace(update, number=update.number + done) for update in whole]
    trajectory = final_trajectory([whole[:done], resumed])
    counts = count_samples(trajectory, SAMPLES, range(EPOCHS))
    assert counts.repeated == {0: done * BATCH, 1: 0, 2: 0}
    assert counts.all_lost == 0
    assert count_other_batches(trajectory, whole) >= done, "there are more updates than expected"


def test_epochs_that_were_never_trained_are_lost() -> None:
    """Also if a training believes to be at its end, or goes on for too long."""
    whole = whole_training()
    counts = count_samples(whole[:PER_EPOCH], SAMPLES, range(EPOCHS))
    assert counts.lost == {0: 0, 1: SAMPLES, 2: SAMPLES}
    extra = Update(ALL + 1, EPOCHS, whole[0].samples)
    counts = count_samples([*whole, extra], SAMPLES, range(EPOCHS))
    assert counts.lost[EPOCHS] == SAMPLES - BATCH


def test_order_of_another_epoch_is_seen_though_each_sample_is_used_once() -> None:
    """The order within a batch does not matter."""
    whole = whole_training()
    repeated = [
        update
        if update.epoch != 2
        else replace(update, samples=whole[update.number - 1 - PER_EPOCH].samples[::-1])
        for update in whole
    ]
    assert count_samples(repeated, SAMPLES, range(EPOCHS)).all_repeated == 0
    assert count_repeated_orders(whole) == 0
    assert count_repeated_orders(repeated) == 1


def test_updates_must_follow_each_other() -> None:
    """Otherwise a record is damaged, and every count would be wrong."""
    whole = whole_training()
    with pytest.raises(ValueError, match="not numbered one after the other"):
        final_trajectory([whole[:3], whole[5:]])


@given(st.integers(1, ALL), st.integers(0, 2), SEEDS)
def test_records_of_two_processes_become_one(stopped_at: int, ahead: int, seed: int) -> None:
    """One process may have been further than the other when both were killed."""
    whole = whole_training(seed)
    halves = [
        [replace(update, samples=update.samples[rank::2]) for update in whole] for rank in range(2)
    ]
    ranks = [halves[0][: stopped_at + ahead], halves[1][:stopped_at]]
    merged = merge_ranks(ranks, stopped_at=stopped_at)
    assert [update.number for update in merged] == list(range(1, stopped_at + 1))
    for update, expected in zip(merged, whole, strict=False):
        assert sorted(update.samples) == sorted(expected.samples)
    missing = [halves[0], halves[1][:-1]]
    with pytest.raises(ValueError, match="is missing in the record of a process"):
        merge_ranks(missing, stopped_at=None)


@given(st.lists(st.integers(1, 12)), st.sets(st.integers(1, 12)))
def test_rows_are_lost_or_doubled(steps: list[int], expected: set[int]) -> None:
    """Each row is the first of an expected step, or it is one too many."""
    lost, doubled = count_rows(steps, expected)
    assert len(expected) - lost + doubled == len(steps)
    assert (lost, doubled) == (0, 0) or sorted(steps) != sorted(expected)


def test_bits_are_compared_and_not_values() -> None:
    """Zeros of both signs are equal numbers with different bits."""
    zeros = {"weight": torch.zeros(3)}
    negative = {"weight": -torch.zeros(3)}
    assert same_bits(zeros, {"weight": torch.zeros(3)})
    assert not same_bits(negative, zeros)
    assert largest_difference(negative, zeros) == 0
    assert largest_difference({"weight": torch.tensor([0.0, -2.0, 1.0])}, zeros) == 2


# ---------------------------------------------------------------------------------- Kills


@settings(max_examples=20)
@given(SEEDS)
def test_kills_are_at_their_moments_and_their_labels_can_be_typed(seed: int) -> None:
    """So the command of a result repeats it."""
    for moment in MOMENTS:
        kills = drawn_kills(moment, seed, draws=2)
        assert kills == drawn_kills(moment, seed, draws=2)
        assert len(set(kills)) == len(kills) >= 1
        for kill in kills:
            assert kill.moment == moment
            assert Kill.parse(kill.label) == kill


@settings(max_examples=20)
@given(SEEDS)
def test_kills_are_where_the_moment_says(seed: int) -> None:
    """In the middle of an epoch, with a checkpoint in the same epoch to go back to, or at ends."""
    (between,) = drawn_kills("between saves", seed, 1)[0].updates
    assert between % SAVE_EVERY > 1
    assert between % UPDATES_PER_EPOCH != 0
    assert between // UPDATES_PER_EPOCH == (between - between % SAVE_EVERY) // UPDATES_PER_EPOCH
    (end,) = drawn_kills("epoch's end", seed, 1)[0].updates
    assert end % UPDATES_PER_EPOCH == 0 != end % SAVE_EVERY
    during = drawn_kills("during a save", seed, 1)[0]
    assert during.updates[0] % SAVE_EVERY == 0 != during.updates[0] % UPDATES_PER_EPOCH
    first, second = drawn_kills("twice", seed, 1)[0].updates
    assert first // UPDATES_PER_EPOCH < second // UPDATES_PER_EPOCH


@pytest.mark.parametrize(
    "label", ["7", str(UPDATES), "29+27", "29+29", "24@0", "24@1", "25@0.5", "24+40@0.5", "x", ""]
)
def test_impossible_kills_are_refused_in_a_sentence(label: str) -> None:
    """Before anything is trained."""
    options = resume_peers.Options(kills=(label,))
    with pytest.raises(SystemExit, match=r"error: --kills .*pass a kill such as 29"):
        resume_peers.chosen_kills(options, processes=1)


# ------------------------------------------------------------------ What frameworks leave


def test_rows_are_read_from_each_log(tmp_path: Path) -> None:
    """Evaluations have rows of their own, which do not count."""
    (tmp_path / "rows.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 1, "loss": 2.0}\n')
    assert steps_of_tracker(tmp_path) == [1, 1]
    history = [{"step": 1, "loss": 2.0}, {"step": 2, "eval_loss": 1.0}, {"step": 2, "loss": 1.0}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    assert steps_of_trainer(tmp_path) == [1, 2]
    for version, text in enumerate(["0,2.5,\n1,2.0,\n", "1,2.0,\n1,,0.5\n"]):
        folder = tmp_path / "lightning_logs" / f"version_{version}"
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text(f"step,train_loss,val_loss\n{text}")
    assert steps_of_lightning(tmp_path) == [0, 1, 1]
    rows = [
        {"progress/global_step": 1, "train/loss": 2},
        {"progress/global_step": 2, "val/loss": 1},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert steps_of_recipe(tmp_path) == [1]


def test_newest_checkpoint_is_that_of_the_framework(tmp_path: Path) -> None:
    """Accelerate's example goes by time, because its names may count backwards."""
    for name in ("step_64", "step_8", "checkpoint-8", "checkpoint-16"):
        (tmp_path / name).mkdir()
    saved = tmp_path / "checkpoints"
    for name in ("step-8", "step-16", "step-24.unfinished"):
        (saved / name).mkdir(parents=True)
    assert newest_by_number(tmp_path) == tmp_path / "step_64"
    time.sleep(0.05)  # the clock of file systems is coarser than that of `time`
    (tmp_path / "step_8" / "file").touch()
    assert newest_by_time(tmp_path) == tmp_path / "step_8"
    assert newest_of_trainer(tmp_path) == tmp_path / "checkpoint-16"
    assert newest_of_recipe(tmp_path) == saved / "step-16"
    assert newest_of_lightning(tmp_path) is None
    (saved / "last.ckpt").touch()
    assert newest_of_lightning(tmp_path) == saved / "last.ckpt"


# -------------------------------------------------------------------------------- Results


def result_of(contestant: str = "recipe", **named: Any) -> Result:
    """Return the result of a kill that left no trace, except for the named figures."""
    figures: dict[str, Any] = {
        "contestant": contestant,
        "processes": 1,
        "kill": "29",
        "moment": "between saves",
        "updates": UPDATES,
        "resumed_at": [25],
        "repeated": 0,
        "lost": 0,
        "repeated_by_epoch": {},
        "lost_by_epoch": {},
        "other_batches": 0,
        "repeated_orders": 0,
        "same_bits": True,
        "largest_difference": 0.0,
        "rows_lost": 0,
        "rows_doubled": 0,
        "removed": 0,
        "is_finished": True,
        "failures": [],
        "written_shares": [],
        "repeat": "python benchmarks/resume_peers.py",
        "code": "",
    }
    return Result(**{**figures, **named})


def results_of(*results: Result) -> Results:
    """Return results on some machine."""
    machine = {"hardware": {"processor": "a CPU"}, "versions": {"torch": "2"}}
    return Results(Path("results.json"), machine, {result.key: result for result in results})


@pytest.mark.parametrize(
    "fault",
    [
        *({"repeated": 3}, {"lost": 3}, {"other_batches": 1}, {"repeated_orders": 1}),
        *({"same_bits": False}, {"rows_lost": 1}, {"rows_doubled": 1}, {"removed": 1}),
        {"is_finished": False},
    ],
)
def test_each_fault_is_an_oddity_with_its_command(fault: dict[str, Any]) -> None:
    """The command is told for it, and for it alone."""
    odd = result_of("HF Trainer", repeat="the command", **fault)
    assert report.oddities(results_of(result_of(), odd)) == ["the command"]


def test_summary_has_the_largest_counts_of_the_kills() -> None:
    """The training that was not killed is no kill."""
    name = "HF Trainer"
    results = results_of(
        result_of(name, kill="none", moment=UNINTERRUPTED, lost=9),
        result_of(name, repeated=3, same_bits=False, largest_difference=0.5),
        result_of(name, kill="27", repeated=5, rows_doubled=2),
        result_of(name, kill="28", removed=1),
        result_of(name, kill="29", processes=2, is_finished=False),
    )
    alone, together = report.summary_rows(results)
    assert alone == (*(name, "3", "≤ 5 (in 2)", "0", "0", "2 of 3", "0", "≤ 2 (in 1)", "2 of 3"),)
    assert together[0] == f"{name}, 2 processes"
    assert together[-1] == "0 of 1"
    details = {row[1]: row for row in report.detail_rows(results) if row[0] == name}
    assert details["29"][6] == "5.0e-01"
    assert details["28"][-1] == "no, 1 removed by hand"
    assert len(report.detail_markdown(results).splitlines()) == 2 + len(results.results)


def test_our_rows_are_bold_and_first() -> None:
    """All contestants may be in a table."""
    results = results_of(*(result_of(contestant.name) for contestant in CONTESTANTS[::-1]))
    lines = report.summary_markdown(results).splitlines()
    assert lines[2].startswith("| **recipe** | **1** |")
    assert [line.split(" | ")[0].strip("| *") for line in lines[2:]] == [
        contestant.name for contestant in CONTESTANTS
    ]
    assert "**" not in "".join(lines[3:])


def test_results_survive_their_file(tmp_path: Path) -> None:
    """What is read is what was written, in the order of the tables."""
    results = replace(
        results_of(result_of("HF Trainer"), result_of()), file=tmp_path / "results.json"
    )
    results.write()
    read = Results.read(results.file)
    assert read is not None
    assert read.results == results.results
    content = json.loads(results.file.read_text())
    assert [value["contestant"] for value in content["results"]] == ["recipe", "HF Trainer"]
    assert {*content["contestants"]} == {"recipe", "HF Trainer"}
    assert all(entry["source"] for entry in content["contestants"].values())
    (tmp_path / "other.json").write_text('{"results": [3]}')
    with pytest.raises(SystemExit, match="pass another --output"):
        Results.read(tmp_path / "other.json")
    with pytest.raises(SystemExit, match="results of other versions"):
        read.require_versions({"versions": {"torch": "3"}})


def test_command_of_a_result_chooses_it_alone() -> None:
    """It is typed as it is printed."""
    for contestant in CONTESTANTS:
        command = repeating_command(contestant, Kill((24,), 0.5), processes=2)
        words = shlex.split(command)
        assert words[words.index("--contestants") + 1] == contestant.name
        assert words[words.index("--kills") + 1] == "24@0.50"
        assert words[words.index("--processes") + 1] == "2"


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"contestants": ("nobody",)}, "pass one of recipe"),
        ({"show": True, "output": Path("none.json")}, "measure first"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(named: dict[str, Any], message: str) -> None:
    """Nothing is measured before."""
    with pytest.raises(SystemExit, match=message):
        resume_peers.main(resume_peers.Options(**{"output": Path("none.json"), **named}))


def test_page_has_the_table_that_was_measured() -> None:
    """The benchmarks' README states what is in the file of results."""
    results = Results.read(resume_peers.RESULTS)
    assert results is not None
    page = (Path(resume_peers.__file__).parent / "README.md").read_text()
    assert report.summary_markdown(results) in page
    assert report.caption(results) in page
