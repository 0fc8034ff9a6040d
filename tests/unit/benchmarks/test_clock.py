"""The benchmark's clock and GPU time: they leave out what does not belong to a measurement."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness import clock, contestants, kernel_time, rounds
from benchmarks.harness.clock import LoopClock
from benchmarks.harness.judging import mfu_at


@given(st.integers(0, 5), st.integers(1, 5), st.floats(1, 100))
def test_clock_leaves_the_first_updates_out(untimed: int, timed: int, slow: float) -> None:
    """The clock leaves out the first updates of `slow` seconds, and counts the others."""
    time = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "now", lambda: time)
        loop_clock = LoopClock(untimed)
        loop_clock.start()
        for number in range(untimed + timed):
            time += slow if number < untimed else 1.0
            loop_clock.update()
        assert loop_clock.stop() == pytest.approx(timed)


def test_clock_that_never_started_is_an_error() -> None:
    """The run had fewer updates than the untimed ones."""
    loop_clock = LoopClock(2)
    loop_clock.start()
    loop_clock.update()
    with pytest.raises(RuntimeError, match="1 updates before its clock"):
        loop_clock.stop()


def test_every_turn_of_a_suite_has_its_untimed_updates() -> None:
    """This includes the contestant that comes first in a later round."""
    turns: list[rounds.Round] = []

    def compete(turn: rounds.Round) -> rounds.Measurement:
        turns.append(turn)
        return rounds.Measurement(1.0)

    suite = rounds.Suite("s", "samples/s", 10, {}, {"a": compete, "b": compete}, [])
    suite.untimed_updates = 7
    suite.run(2, lambda message: None)
    assert [turn.untimed for turn in turns] == [7] * 4


def test_recipe_contestant_trains_untimed_updates_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Untimed updates are counted in micro-batches, as in the recipe's loop."""
    calls: list[tuple[Any, ...]] = []

    def train_recipe(*arguments: Any, **settings: Any) -> rounds.FinishedTraining:
        calls.append((*arguments[1:], settings["warmup_steps"]))
        return rounds.FinishedTraining(2.0, 100, 0.5)

    monkeypatch.setattr(contestants, "train_recipe", train_recipe)
    monkeypatch.setattr(contestants, "load_recipe", lambda name: None)
    options: Any = SimpleNamespace(tracker="none")
    settings = {"gradient_accumulation_steps": 2}
    compete = contestants.recipe_contestant("mnist_mlp", options, 0.5, None, **settings)
    assert compete(rounds.Round(30, seed=0, untimed=10)).value == 50
    assert calls == [(40, 20, 20)]


INTERVALS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=20)


@given(INTERVALS)
def test_overlapping_kernels_count_once(starts_and_lengths: list[tuple[int, int]]) -> None:
    """Kernel time is the length of the union of intervals."""
    intervals = [(float(start), float(start + length)) for start, length in starts_and_lengths]
    random.Random(0).shuffle(intervals)
    covered = {
        tick for start, length in starts_and_lengths for tick in range(start, start + length)
    }
    assert kernel_time.union_length(intervals) == len(covered)


def test_only_the_device_counts() -> None:
    """Neither CPU operations nor annotations count, because annotations span idle time."""

    def event(device: str, begin: float, end: float, is_annotation: bool = False) -> Any:
        return SimpleNamespace(
            device_type=SimpleNamespace(name=device),
            time_range=SimpleNamespace(start=begin, end=end),
            is_user_annotation=is_annotation,
        )

    events = [event("CPU", 0, 9), event("CUDA", 1, 3), event("CUDA", 0, 9, is_annotation=True)]
    assert kernel_time.kernel_intervals(events) == [(1, 3)]


def test_without_a_gpu_no_kernel_runs() -> None:
    """The time of kernels is 0 then."""
    with kernel_time.KernelTime() as kernels:
        torch.ones(8, 8).sum()
    assert kernels.seconds == 0


def test_mfu_uses_the_measured_rate() -> None:
    """The summary's own rate may include updates that the benchmark leaves out."""
    summary = {"perf/mfu": 0.2, "perf/samples_per_second": 50.0}
    assert mfu_at(100.0, summary) == pytest.approx(0.4)
    assert mfu_at(100.0, {}) is None
