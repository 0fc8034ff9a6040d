"""The check of memory: slopes of made-up measurements, and its instrument."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from common.tools.prove.checks import memory
from common.tools.prove.checks.memory import MAX_GROWTH, MEBIBYTE, verdict_of
from common.tools.prove.instruments import memory as instrument
from common.tools.prove.instruments.allocator_statistics import bytes_in_use
from common.tools.prove.instruments.graphs import graph_sizes
from common.tools.prove.instruments.holders import NO_HOLDER, holder_in_words
from common.tools.prove.instruments.memory import (
    MemoryObserver,
    live_tensors,
    storage_bytes,
    without_tensors,
)
from common.tools.prove.instruments.recipe_containers import (
    MAX_SEARCHED_ITEMS,
    bytes_of_arrays,
    container_sizes,
    tensors_in_bounded_deques,
)
from common.tools.prove.observation.session import Session
from common.tools.prove.records.instrument_records import (
    GrowingContainer,
    GrowingGraph,
    GrowingTensors,
    MemoryInUse,
)
from common.tools.prove.records.observed_run import ObservedRun, read_processes
from tests.unit.tools.prove.made_up_records import run_with

KEPT: list[torch.Tensor] = []


def notes(growth: dict[str, Callable[[int], float]], count: int = 12) -> list[MemoryInUse]:
    """Return measurements at every fifth update.

    Args:
        growth: functions that return the growth in bytes at an update, by the type of memory.
    """
    measured_notes = []
    for number in range(count):
        step = 10 + 5 * number
        sizes = {
            "resident_bytes": 5e8,
            "allocator_bytes": 2e8,
            "tensor_bytes": 1e7,
            "tensor_count": 100.0,
            "new_tensor_bytes": 1e5,
            "batch_bytes": 1e4,
            "array_bytes": 1e5,
        }
        for name, function in growth.items():
            sizes[name] += function(step)
        values = {name: int(size) for name, size in sizes.items()}
        measured_notes.append(MemoryInUse(step=step, device_bytes=None, **values))
    return measured_notes


def test_constant_memory_passes() -> None:
    verdict = verdict_of(run_with(notes({})))
    assert verdict.passed is True
    assert "live tensors +0.0000 MiB an update" in verdict.compared


@pytest.mark.parametrize(
    ("name", "per_update"),
    [
        ("tensor_bytes", 640.0),  # logits of 16 samples and 10 classes
        ("tensor_count", 1.0),  # scalars
        ("array_bytes", 640.0),
        ("allocator_bytes", 0.05 * MEBIBYTE),
    ],
)
def test_growth_fails(name: str, per_update: float) -> None:
    verdict = verdict_of(run_with(notes({name: lambda step: per_update * step})))
    assert verdict.passed is False
    assert len(verdict.causes) == 1
    assert "MiB an update" in verdict.causes[0]


def test_noise_passes() -> None:
    """Memory may go up and down, jump once, and grow during the warm-up."""
    draws = random.Random(0)
    noise = {step: draws.gauss(0, 0.05 * MEBIBYTE) for step in range(100)}
    assert verdict_of(run_with(notes({"allocator_bytes": lambda step: noise[step]}))).passed is True
    jump = notes({"allocator_bytes": lambda step: MEBIBYTE * 20 * (step > 50)})
    assert verdict_of(run_with(jump)).passed is True
    warm = notes({"allocator_bytes": lambda step: MEBIBYTE * min(step, 26)})
    assert verdict_of(run_with(warm)).passed is True
    resident = notes({"resident_bytes": lambda step: MEBIBYTE * step})
    assert verdict_of(run_with(resident)).passed is True  # the allocator's figure is exact


def test_resident_memory_counts_if_the_allocator_reports_nothing() -> None:
    measured_notes = []
    for measured in notes(
        {"resident_bytes": lambda step: 2 * MAX_GROWTH["resident"] * MEBIBYTE * step}
    ):
        measured_notes.append(measured.model_copy(update={"allocator_bytes": None}))
    verdict = verdict_of(run_with(measured_notes))
    assert verdict.passed is False
    assert "resident memory" in verdict.causes[0]


def test_growing_tensors_are_named_first() -> None:
    values = {"dtype": "float32", "shape": [16, 10], "tensor_count": 60, "growth": 50}
    growing = GrowingTensors(step=65, holder="the list `history` of main in train.py", **values)
    measured_notes = [*notes({"tensor_count": lambda step: step}), growing]
    verdict = verdict_of(run_with(measured_notes))
    assert verdict.causes[0] == (
        "the number of float32 [16 × 10] tensors grew by 50 to 60; they are held by the list "
        "`history` of main in train.py"
    )


@pytest.mark.parametrize("every", [8, 12])
def test_growth_in_steps_fails(every: int) -> None:
    """A copy of the weights is kept once an epoch, which is less often than memory is measured."""
    kept_tensors: dict[str, Callable[[int], float]] = {
        "tensor_bytes": lambda step: 10_000 * (step // every),
        "tensor_count": lambda step: 6 * (step // every),
    }
    kept_arrays: dict[str, Callable[[int], float]] = {
        "array_bytes": lambda step: 10_000 * (step // every)
    }
    for growth, name in ((kept_tensors, "live tensors"), (kept_arrays, "NumPy arrays")):
        verdict = verdict_of(run_with(notes(growth)))
        assert verdict.passed is False
        assert name in verdict.causes[0]


def test_sizes_that_go_up_and_down_are_said_to_be_noise() -> None:
    """Batches of text differ in size. Some slopes are then above the limit by chance."""
    sizes = {10 + 5 * number: 10_000 * (0, 1, 2, 3, 0)[number % 5] for number in range(12)}
    verdict = verdict_of(run_with(notes({"tensor_bytes": lambda step: sizes[step]})))
    assert verdict.passed is True
    assert "it goes up and down" in verdict.compared


PADDED_LENGTHS = st.lists(st.integers(4, 64), min_size=12, max_size=12)


@given(lengths=PADDED_LENGTHS, count=st.sampled_from([7, 11, 12]))
def test_padded_batches_of_any_lengths_pass(lengths: list[int], count: int) -> None:
    """The logits of the current batch are as long as the batch, and nothing is kept."""
    sizes = {10 + 5 * number: length for number, length in enumerate(lengths)}
    measured_notes = notes(
        {
            "batch_bytes": lambda step: 3 * 16 * 8 * sizes[step],
            "new_tensor_bytes": lambda step: 16 * 300 * 4 * sizes[step],
        },
        count,
    )
    assert verdict_of(run_with(measured_notes)).passed is True


@given(lengths=PADDED_LENGTHS, count=st.sampled_from([7, 11, 12]), is_padded=st.booleans())
def test_tensor_that_each_update_lengthens_fails(
    lengths: list[int], count: int, is_padded: bool
) -> None:
    """It is a new tensor after each update, as in `history = torch.cat([history, logits])`."""
    sizes = {10 + 5 * number: length for number, length in enumerate(lengths)}
    if not is_padded:
        sizes = dict.fromkeys(sizes, 64)
    judged = [sizes[10 + 5 * number] for number in range(count // 3, count)]
    assume(not all(later > earlier for earlier, later in pairwise(judged)))
    measured_notes = notes(
        {
            "batch_bytes": lambda step: 3 * 16 * 8 * sizes[step],
            "new_tensor_bytes": lambda step: 16 * 300 * 4 * (sizes[step] + 20 * step),
        },
        count,
    )
    verdict = verdict_of(run_with(measured_notes))
    assert verdict.passed is False
    assert "live tensors of the current update grows by" in verdict.causes[0]


def train_with_memory_observer(
    folder: Path, keep: Callable[[torch.Tensor], None], lengths: Sequence[int]
) -> ObservedRun:
    """Return an observed run with padded batches.

    Args:
        keep: gets the logits of each update.
        lengths: the padded length of the batch of each measured update.
    """
    progress = SimpleNamespace(global_step=0)
    run: Any = SimpleNamespace(
        progress=progress,
        context=SimpleNamespace(recipe_file=str(Path(__file__))),
        device=torch.device("cpu"),
        plan=SimpleNamespace(total_steps=5 * len(lengths) + 5),
    )
    observer = MemoryObserver(Session(folder=folder, launch=0, rank=0, run=run))
    batches = ({"tokens": torch.ones(16, length, 8)} for length in lengths for _ in range(5))

    def end_update(run: Any) -> None:
        progress.global_step += 1

    loader: Any = None
    progress.global_step = 5
    for batch in observer.around_batches(lambda run, loader: batches, run, loader):
        logits = batch["tokens"].cos()
        keep(logits)
        observer.around_record(end_update, run)
    return replace(run_with(), directory=folder, processes=read_processes(folder))


@pytest.mark.parametrize("is_kept", [False, True])
def test_only_tensors_that_outlive_their_update_count(
    is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of small tensors grows, although batches differ in size by much more."""
    # These searches take long in a process with many modules.
    monkeypatch.setattr("gc.collect", lambda: 0)
    monkeypatch.setattr(instrument, "bytes_of_arrays", lambda *_: 0)
    for search in ("tensors_in_bounded_deques", "graph_sizes", "container_sizes"):
        monkeypatch.setattr(instrument, search, lambda *_: {})
    monkeypatch.setattr(instrument, "holder_in_words", lambda *_: "the list `history`")
    history: list[torch.Tensor] = []

    def keep(logits: torch.Tensor) -> None:
        if is_kept:
            history.append(logits[0, 0].clone())

    lengths = [40, 9, 70, 20, 80, 81, 12, 90, 91]  # most rise after the warm-up
    verdict = verdict_of(train_with_memory_observer(tmp_path, keep, lengths))
    own_causes = [cause for cause in verdict.causes if "the process's" not in cause]
    assert bool(own_causes) is is_kept
    if is_kept:
        assert "they are held by the list `history`" in own_causes[0]


def test_growth_with_evaluations_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steady run does not grow. The eventful run keeps 5 batches of each evaluation."""
    kept = notes(
        {"tensor_bytes": lambda step: 5 * 640 * step, "tensor_count": lambda step: 5 * step}
    )
    bench: Any = None
    for measured_notes, passed in ((notes({}), True), (kept, False)):
        eventful = run_with(measured_notes)
        monkeypatch.setattr(memory, "steady_run", lambda bench: run_with(notes({})))
        monkeypatch.setattr(memory, "eventful_run", lambda bench, run=eventful: run)
        verdict = memory.judge_memory(bench)
        assert verdict.passed is passed
        assert "with an evaluation after each update: " in verdict.compared
        assert all("MiB an evaluation" in cause for cause in verdict.causes)
        assert bool(verdict.causes) is not passed


def test_short_run_has_no_verdict() -> None:
    assert verdict_of(run_with(notes({}, count=5))).passed is None


def test_growth_is_seen_across_a_drop() -> None:
    """Some tensors are freed at the end of an epoch, while the number of others grows."""
    measured_notes = notes({"tensor_bytes": lambda step: 640 * step - 10**5 * (step > 45)})
    assert verdict_of(run_with(measured_notes)).passed is False


@pytest.mark.slow
def test_holder_is_a_variable_of_the_recipe() -> None:
    """A list of a function, a list in a dict, and a list of a module are named."""
    folder = Path(__file__).resolve().parent
    history = [torch.ones(3) for _ in range(9)]
    assert holder_in_words([*history], sys._getframe(), folder) == (
        f"the list `history` of {sys._getframe().f_code.co_name} in test_memory.py"
    )
    nested = {"logits": [torch.ones(4) for _ in range(9)], "labels": []}
    live_tensors = [*nested["logits"]]
    assert "the dict `nested`" in holder_in_words(live_tensors, sys._getframe(), folder)
    try:
        KEPT.extend(torch.ones(5) for _ in range(9))
        assert "the list `KEPT` in test_memory.py" in holder_in_words(
            [*KEPT], sys._getframe(), folder
        )
    finally:
        KEPT.clear()


def test_tensors_in_a_bounded_deque_are_found() -> None:
    """Their number can't grow, unlike that of tensors in a list or in an unbounded deque."""
    folder = Path(__file__).resolve().parent
    recent = deque([torch.ones(1), (torch.ones(2), 3)], maxlen=5)
    kept = [torch.ones(3), deque([torch.ones(4)])]
    tensors = [*tensors_in_bounded_deques(sys._getframe(), folder)]
    assert [len(tensor) for tensor in tensors] == [1, 2]
    assert len(recent) == len(kept)


class Totals:
    def __init__(self) -> None:
        self.loss: torch.Tensor = torch.zeros(())


@pytest.mark.parametrize("updates", [1, 4, 30])
def test_graph_of_a_loss_that_is_added_up_grows(updates: int) -> None:
    """A variable and an attribute keep all graphs; a detached total and the last loss do not."""
    folder = Path(__file__).resolve().parent
    weight = torch.ones(3, requires_grad=True)
    total = detached = last_loss = torch.zeros(())
    totals = Totals()
    for _ in range(updates):
        last_loss = weight.square().sum()
        last_loss.backward()
        total = total + last_loss
        totals.loss = totals.loss + last_loss
        detached = detached + last_loss.detach()
    sizes = graph_sizes(sys._getframe(), folder)
    place = f" of {sys._getframe().f_code.co_name} in test_memory.py"
    assert sizes == {
        f"`last_loss`{place}": 3,  # sum, square, and the node that adds up the weight's gradient
        f"`total`{place}": 3 * updates + 1,  # the node of the weight is shared
        f"`totals.loss`{place}": 3 * updates + 1,
    }
    assert float(detached) == 3 * updates


def test_growing_graph_is_named_first() -> None:
    graph = GrowingGraph(
        step=65, variable="`total` of main in train.py", operation_count=1200, growth=1100
    )
    tensors = GrowingTensors(
        step=65,
        dtype="float32",
        shape=[],
        tensor_count=60,
        growth=50,
        holder="no variable of the recipe",
    )
    growing = notes({"allocator_bytes": lambda step: 0.05 * MEBIBYTE * step})
    verdict = verdict_of(run_with([*growing, tensors, graph]))
    assert verdict.causes[0] == (
        "`total` of main in train.py holds a graph of gradients that grew by 1,100 to 1,200 "
        "operations"
    )


def test_sizes_of_containers() -> None:
    """Items count, also those of an attribute, and arrays have the size of their values."""
    folder = Path(__file__).parent
    history = [np.zeros(1000) for _ in range(4)]
    notes_by_update = SimpleNamespace(rows={7: "text", 8: "text"})
    sizes = container_sizes(sys._getframe(), folder)
    place = f" of {sys._getframe().f_code.co_name} in test_memory.py"
    items, item_bytes = sizes[f"the list `history`{place}"]
    assert items == len(history)
    assert 8000 < item_bytes < 8200
    assert sizes[f"the dict `notes_by_update.rows`{place}"][0] == len(notes_by_update.rows)


@pytest.mark.parametrize("length", [1, 10, 1000])
def test_arrays_in_containers_are_measured(length: int) -> None:
    """Views and arrays that are kept twice count once; data and bounded deques are left out."""
    folder = Path(__file__).parent
    before = bytes_of_arrays(sys._getframe(), folder)
    history = [np.zeros(length), {"labels": (np.zeros(length), 3)}]
    notes_by_update = SimpleNamespace(rows={7: history[0]})
    whole = np.zeros((2, length))
    views = [whole[0], whole[1][:1]]
    recent = deque([np.zeros(length)], maxlen=5)
    data = [np.zeros(length)] * (MAX_SEARCHED_ITEMS + 1)
    after = bytes_of_arrays(sys._getframe(), folder)
    assert after - before == 2 * sys.getsizeof(np.zeros(length)) + sys.getsizeof(whole)
    assert len(notes_by_update.rows) + len(recent) + len(views) + 1 < len(data)


def test_growing_container_is_named_if_memory_grows() -> None:
    """The one with the most bytes comes first, and the holder of tensors is not named twice."""
    sizes = {"history": (50, 8000), "names": (90, 60), "kept": (50, 72)}
    containers = [
        GrowingContainer(
            step=65,
            variable=f"the list `{name}`",
            item_count=99,
            growth=more,
            item_bytes=item_bytes,
        )
        for name, (more, item_bytes) in reversed(sizes.items())
    ]
    tensors = GrowingTensors(
        step=65, dtype="float32", shape=[], tensor_count=60, growth=50, holder="the list `kept`"
    )
    without_holder = tensors.model_copy(update={"holder": NO_HOLDER})
    growing = notes({"allocator_bytes": lambda step: 0.05 * MEBIBYTE * step})
    causes = verdict_of(run_with([*growing, without_holder, tensors, *containers])).causes
    assert causes[1:3] == (
        "the list `history` grew by 50 to 99 items",
        "the list `names` grew by 90 to 99 items",
    )
    assert sum("kept" in cause for cause in causes) == 1
    assert verdict_of(run_with([*notes({}), *containers])).causes == ()


@pytest.mark.parametrize("size", [None, 10_000])
def test_memory_of_tensors_is_left_out(size: int | None) -> None:
    """Views of one storage count once, and tensors on the host are not in a device's memory."""
    tensor = torch.ones(256)
    kept = [tensor, tensor[:8], torch.ones(256), torch.ones(10**6, device="meta")]
    assert without_tensors(size, kept, on_host=True) == (None if size is None else size - 2 * 1024)
    assert without_tensors(size, kept, on_host=False) == size


def test_live_tensors_are_counted() -> None:
    before = live_tensors()
    kept = [torch.ones(256) for _ in range(3)]
    views = [kept[0][:10], kept[0][10:]]
    after = live_tensors()
    assert len(after) == len(before) + 5
    assert storage_bytes(after) - storage_bytes(before) == 3 * 1024
    assert len(views) == 2


def test_tensors_without_memory_do_not_count() -> None:
    """`torch.compile` keeps fake tensors, whose storage has no address."""
    with FakeTensorMode():
        fake = torch.ones(256)
    assert storage_bytes([fake, torch.ones(256, device="meta"), torch.ones(8)]) == 32


def test_allocator_is_exact() -> None:
    before = bytes_in_use()
    if before is None:
        pytest.skip("this C library does not report what its allocator has given out")
    kept = torch.ones(2**20)
    after = bytes_in_use()
    assert after is not None
    assert after - before == pytest.approx(4 * 2**20, abs=2**17)
    del kept
