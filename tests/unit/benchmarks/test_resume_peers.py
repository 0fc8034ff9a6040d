"""Counting what a kill did to samples and rows, the drawn kills, the tables, and mistakes."""

from __future__ import annotations

import contextlib
import json
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import resume_peers
from benchmarks.resume import digest, measuring, page, report, stopping
from benchmarks.resume.attempt import RUN_FOLDER, Attempt
from benchmarks.resume.contestants import (
    CONTESTANTS,
    LOOPS,
    REPOSITORY,
    Contestant,
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
from benchmarks.resume.failures import exception_line
from benchmarks.resume.kills import DURING_A_SAVE, MOMENTS, UNINTERRUPTED, Kill, drawn_kills
from benchmarks.resume.measuring import largest_difference, repeating_command, same_bits
from benchmarks.resume.results import Result, Results
from benchmarks.resume.schedule import SAVE_EVERY, UPDATES, UPDATES_PER_EPOCH
from benchmarks.resume.training import AttemptError, KilledTraining, Outcome, files_in, is_stopped

BENCHMARKS = Path(resume_peers.__file__).parent
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
    """An epoch counts as lost even if the training ends early or trains for too long."""
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
    """A record with a gap between its updates is refused as damaged."""
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
    """A drawn kill is at its moment, and its label gives the same kill, so a command repeats it."""
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


# -------------------------------------------------------------------------- Kills in a save

WRITES_AT_ONCE = """
import os, sys
from pathlib import Path
from benchmarks.resume.stopping import stop_after_bytes

folder = Path(sys.argv[1])
(folder / "run").mkdir()
stop_after_bytes(folder / "run", 250_001)
(folder / "elsewhere").write_bytes(bytes(400_000))
(folder / "run" / "small").write_bytes(bytes(50_000))
(folder / "run" / "large").write_bytes(bytes(1_000_000))
"""


@pytest.mark.skipif(stopping.compiler() is None, reason="needs Linux and a C compiler")
def test_process_stops_within_the_write_that_reaches_the_share(tmp_path: Path) -> None:
    """A process stops within one large write and, if it continues, loses no byte."""
    library = stopping.build_library(tmp_path)
    environment = {**stopping.preloading(library), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", WRITES_AT_ONCE, str(tmp_path)]
    process = psutil.Popen(command, env=environment)
    try:
        while not is_stopped(process):
            assert process.poll() is None, "it was not stopped"
            time.sleep(0.01)
        assert (tmp_path / "run" / "large").stat().st_size == 200_001
        process.send_signal(signal.SIGCONT)
        assert process.wait(timeout=60) == 0
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert (tmp_path / "run" / "large").stat().st_size == 1_000_000


@pytest.mark.skipif(sys.platform == "win32", reason="the script runs on POSIX systems only")
def test_bytes_that_are_not_written_yet_do_not_count(tmp_path: Path) -> None:
    """safetensors gives a file its full size first."""
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1_000_000)
        file.write(bytes(100_000))
    assert 100_000 <= sum(files_in(tmp_path).values()) < 200_000


def test_kill_with_another_share_on_the_disk_has_missed() -> None:
    """A share that was never measured is missed, too; other kills have none to miss."""
    kill = Kill((56,), 0.25)
    assert not kill.missed([0.24])
    assert kill.missed([1.003])
    assert kill.missed([])
    assert not Kill((29,)).missed([])


def test_training_is_repeated_until_its_share_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times at most; other kills are never repeated."""
    shares = [1.0, 0.26, 1.0, 1.0, 1.0]
    folders = []

    def train(contestant: Contestant, kill: Kill, processes: int, folder: Path) -> Outcome:
        folders.append(folder)
        return Outcome(written_shares=[shares.pop(0)])

    monkeypatch.setattr("benchmarks.resume.training.train", train)
    arguments = (CONTESTANTS[0], Kill((56,), 0.25), 1)
    met = resume_peers.train_with_kill(*arguments, tmp_path / "met", "title")
    assert met.written_shares == [0.26]
    missed = resume_peers.train_with_kill(*arguments, tmp_path / "missed", "title")
    assert missed.written_shares == [1.0]
    assert len(folders) == len(set(folders)) == 5


def test_missed_share_is_shown_and_counts_nowhere() -> None:
    """A complete checkpoint says nothing about torn ones."""
    named = {"kill": "56@0.25", "moment": DURING_A_SAVE, "same_bits": False, "repeated": 9}
    results = results_of(
        result_of("Lightning", repeated=3),
        result_of("Lightning", written_shares=[1.003], **named),
        result_of("HF Trainer", written_shares=[0.25], **named),
    )
    trainer, lightning = report.summary_rows(results)
    assert lightning[:3] == ("Lightning", "1, 1 missed", "≤ 3 (in 1)")
    assert lightning[-1] == "1 of 1"
    assert trainer[:3] == ("HF Trainer", "1", "≤ 9 (in 1)")
    kills = {row[0]: row[1] for row in report.detail_rows(results) if row[2] == DURING_A_SAVE}
    assert kills == {"HF Trainer": "56@0.25", "Lightning": "56@0.25, missed: 1.00 written"}
    assert [result.contestant for result in report.odd_results(results)] == [
        "HF Trainer",
        "Lightning",
    ]


@pytest.mark.parametrize(("share", "is_refused"), [(None, False), (0.5, True)])
def test_kill_in_a_save_is_refused_without_a_compiler(
    share: float | None, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is trained."""
    monkeypatch.setattr(resume_peers, "compiler", lambda: None)
    kills = [Kill((24,), share)]
    if not is_refused:
        resume_peers.refuse_saves_without_compiler(kills)
        return
    with pytest.raises(SystemExit, match=r"24@0.50 needs Linux and a C compiler: install gcc"):
        resume_peers.refuse_saves_without_compiler(kills)


# ------------------------------------------------------------------------- Failed resumes

TORCHRUN = """\
[rank1]: Traceback (most recent call last):
[rank0]: Traceback (most recent call last):
[rank1]:   File "loop.py", line 113, in <module>
[rank1]:     main(Path(sys.argv[1]))
[rank0]:   File "loop.py", line 80, in main
[rank1]: EOFError: Ran out of input

[rank1]: During handling of the above exception, another exception occurred:

[rank1]: Traceback (most recent call last):
[rank1]:   File "loop.py", line 80, in main
[rank1]: RuntimeError: the file of the sampler is damaged
[rank0]: torch.distributed.DistBackendError: Connection closed by peer
Traceback (most recent call last):
  File "torch/distributed/run.py", line 936, in <module>
    main()
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\x20
============================================================
loop.py FAILED
------------------------------------------------------------
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""
ABORTED = """\
terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at pair.cc:446] connection refused
============================================================
"""


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (TORCHRUN, "RuntimeError: the file of the sampler is damaged"),
        (ABORTED, "what():  [enforce fail at pair.cc:446] connection refused"),
        ("Traceback (most recent call last):\n  File\n    a()\nEOFError\n", "EOFError"),
        ("error: no checkpoint is complete: start again\nbye\n====\n", "error: no checkpoint"),
        ("loading\nKilled\n=====\n", "Killed"),
        ("", "no output"),
    ],
)
def test_reason_of_a_failure_is_its_exception(output: str, line: str) -> None:
    """Not the last line of a launcher, which only frames its own report."""
    assert exception_line(output).startswith(line)


class FailingTraining(KilledTraining):
    """A training with one checkpoint too few to fail often; it fails as often as it should."""

    def __init__(self, folder: Path, failures: int) -> None:
        super().__init__(CONTESTANTS[1], 1, folder)
        self.was_killed = True
        self.failures = failures

    def run(self, attempt: Attempt) -> Any:
        """Fail, or end."""
        if self.failures > 0:
            self.failures -= 1
            raise AttemptError("the output", f"EOFError in {Path(attempt.checkpoint or '').name}")
        return "finished"


@pytest.mark.parametrize(
    ("failures", "retried", "removed", "end"),
    [
        (0, 0, 0, "finished"),
        (1, 1, 0, "finished"),
        (2, 1, 1, "finished"),
        (3, 2, 1, "finished"),
        (4, 2, 2, "given up"),
    ],
)
def test_failed_resume_is_repeated_before_a_checkpoint_is_removed(
    failures: int, retried: int, removed: int, end: str, tmp_path: Path
) -> None:
    """One failure may come from a port or the memory, and says nothing about the checkpoint."""
    for name in ("step_8", "step_16"):
        (tmp_path / RUN_FOLDER / name).mkdir(parents=True)
        time.sleep(0.05)  # the clock of file systems is coarser than that of `time`
    training = FailingTraining(tmp_path, failures)
    assert training.run_until(None, None) == end
    assert training.outcome.retried == retried
    assert training.outcome.removed == removed
    tried = ["step_16", "step_16", "step_8", "step_8"][:failures]
    assert training.outcome.failures == [f"EOFError in {name}" for name in tried]


def test_resume_at_the_second_try_is_not_a_removal() -> None:
    """The table says it, and counts it as resumed by itself."""
    result = result_of("HF Trainer", retried=1, failures=["OSError: the port is in use"])
    assert report.resumed_words(result) == "yes, at the second try"
    assert report.summary_row("", [result])[-1] == "1 of 1"


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


def result_of(contestant: str = "recipe", **fields: Any) -> Result:
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
    return Result(**{**figures, **fields})


def results_of(*results: Result) -> Results:
    """Return results on some machine."""
    machine = {"hardware": {"processor": "a CPU"}, "versions": {"torch": "2"}}
    return Results(Path("results.json"), machine, {result.key: result for result in results})


@pytest.mark.parametrize(
    "fault",
    [
        {"repeated": 3},
        {"lost": 3},
        {"other_batches": 1},
        {"repeated_orders": 1},
        {"same_bits": False},
        {"rows_lost": 1},
        {"rows_doubled": 1},
        {"removed": 1},
        {"is_finished": False},
    ],
)
def test_each_fault_is_an_oddity_with_its_command(fault: dict[str, Any]) -> None:
    """The command is told for it, and for it alone."""
    odd = result_of("HF Trainer", repeat="the command", **fault)
    assert report.commands_of_odd_kills(results_of(result_of(), odd)) == ["the command"]


def test_summary_has_the_largest_counts_of_the_kills() -> None:
    """The summary has the largest counts of all kills, without the uninterrupted training."""
    name = "HF Trainer"
    results = results_of(
        result_of(name, kill="none", moment=UNINTERRUPTED, lost=9),
        result_of(name, repeated=3, same_bits=False, largest_difference=0.5),
        result_of(name, kill="27", repeated=5, rows_doubled=2),
        result_of(name, kill="28", removed=1),
        result_of(name, kill="29", processes=2, is_finished=False),
    )
    alone, together = report.summary_rows(results)
    assert alone == (
        name,
        "3",
        "≤ 5 (in 2)",
        "0",
        "0",
        "2 of 3",
        "0",
        "≤ 2 (in 1)",
        "2 of 3",
    )
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
    """Results that are written and read again are the same, in the order of the tables."""
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
    """The command of a result, typed as it is printed, selects this result only."""
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


# --------------------------------------------------------- Where a result comes from


@pytest.mark.slow
def test_digest_changes_with_what_changes_a_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comments and docstrings do not; imported files, flags and the way of the kill do."""
    assert digest.normalized('"""Text."""\nx = 1  # one\n') == digest.normalized("x = 1\n")
    assert digest.normalized("def f():\n    'Text.'\n    return 1") == digest.normalized(
        "def f(): return 1"
    )
    assert digest.normalized("x = 1") != digest.normalized("x = 2")
    imported = digest.with_imports([LOOPS / "glue_no_trainer.py"])
    assert {LOOPS / "accelerate_loop.py", LOOPS.parent / "task.py"} <= imported
    recipe = digest.with_imports([LOOPS / "recipe.py"])
    assert REPOSITORY / "common" / "checkpoints" / "store.py" in recipe

    before = {
        contestant.name: digest.digest_of_measurement(contestant) for contestant in CONTESTANTS
    }
    assert len(set(before.values())) == len(CONTESTANTS)
    trainer = next(contestant for contestant in CONTESTANTS if contestant.name == "HF Trainer")
    renamed = replace(trainer, name="Trainer", settings="other words", pages=())
    assert digest.digest_of_measurement(renamed) == before["HF Trainer"]
    for changed in (replace(trainer, needs_path=True), replace(trainer, variant="other")):
        assert digest.digest_of_measurement(changed) != before["HF Trainer"]
    other_source = tmp_path / "stop.c"
    other_source.write_text("int other;")
    monkeypatch.setattr(digest, "SOURCE", other_source)
    assert digest.digest_of_measurement(trainer) != before["HF Trainer"]


def test_commit_of_a_result_says_whether_files_were_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results and pages change while a measurement is under way, and do not count."""
    monkeypatch.setattr(measuring, "REPOSITORY", tmp_path)
    assert measuring.measured_commit() is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    files = [tmp_path / "code.py", tmp_path / "README.md", results / "found.json"]
    for file in files:
        file.write_text("1")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    commit = measuring.measured_commit()
    assert commit is not None
    assert len(commit) == 40
    files[1].write_text("2")
    files[2].write_text("2")
    assert measuring.measured_commit() == commit
    files[0].write_text("2")
    assert measuring.measured_commit() == f"{commit}-changed"


def test_page_says_which_commits_were_measured() -> None:
    """Results of earlier code are named as such."""
    results = results_of(
        result_of(commit="a" * 40, measured_at="2026-11-25T01:00:00+00:00"),
        result_of(kill="17", commit="a" * 40, measured_at="2026-11-24T01:00:00+00:00"),
        result_of("HF Trainer"),
    )
    assert page.provenance(results) == (
        "Results: 2 of commit `aaaaaaaaa`; 1 of earlier code, without a recorded commit. "
        "Measured 2026-11-24 to 2026-11-25."
    )


def test_each_peer_has_a_page_of_the_measured_version() -> None:
    """The address has the version, unless the package is not installed."""
    versions = {"accelerate": "1.15.0", "lightning": "2.6.6", "torchdata": "0.11.0"}
    for contestant in CONTESTANTS:
        pages = contestant.pages_of(versions)
        assert contestant.is_ours or pages
        assert all(address.startswith("https://") for address in pages)
        assert "{" not in "".join(pages)
        for package in contestant.measured_packages:
            assert package in ("transformers", *versions)
    stateful = CONTESTANTS[2].pages_of(versions)
    assert "v1.15.0" in stateful[0]
    assert "/0.11/" in stateful[1]


def test_page_has_what_was_measured() -> None:
    """The overview and the page of details state the contents of the file of results."""
    results = Results.read(resume_peers.RESULTS)
    assert results is not None
    overview = (BENCHMARKS / "README.md").read_text()
    assert report.summary_markdown(results) in overview
    assert report.caption(results) in overview
    assert page.provenance(results) in overview
    assert page.peers_markdown(results) in (BENCHMARKS / "resume.md").read_text()


def test_readme_counts_the_kills_with_the_same_weights() -> None:
    """The row of the README adds up the kills with one process and those with two."""
    results = Results.read(resume_peers.RESULTS)
    assert results is not None
    readme = (REPOSITORY / "README.md").read_text().splitlines()
    (row,) = [line for line in readme if line.startswith("| same weights after")]
    expected = []
    for contestant in ("Accelerate, checkpointing.py", "HF Trainer", "Lightning", "recipe"):
        kills = [
            result
            for result in results.in_order()
            if result.contestant == contestant
            and result.moment != UNINTERRUPTED
            and not result.missed
        ]
        same = sum(result.same_bits for result in kills)
        expected.append(f"{same} of {len(kills)}")
    assert re.findall(r"\d+ of \d+", row) == expected


def test_page_has_each_oddity_with_its_command() -> None:
    """The page lists every kill that the report calls odd, and no others."""
    results = Results.read(resume_peers.RESULTS)
    assert results is not None
    text = (BENCHMARKS / "resume.md").read_text()
    assert page.oddities_markdown(results) in text
    commands = report.commands_of_odd_kills(results)
    assert commands
    assert all(f"`{command}` |" in text for command in commands)
