"""The instrument that observes which samples of an evaluation reach the model."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from common.tools.prove.instruments.evaluated_samples import (
    EvaluatedSamplesObserver,
    digest_of,
    digests_of_samples,
    largest_tensor,
)
from common.tools.prove.observation.session import Session
from common.tools.prove.records.instrument_records import EvaluatedSamples

Body = Callable[[nn.Module, torch.Tensor], object]


class RecordingSession(Session):
    """A session that keeps its records in memory, and whose loaders are all of one split."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder=folder, launch=0, rank=0)
        self.written: list[EvaluatedSamples] = []

    def write(self, record: Any) -> None:
        self.written.append(record)

    def split_of(self, loader: Any) -> str:
        return "validation"


@contextmanager
def evaluating(run: Any, model: nn.Module) -> Iterator[nn.Module]:
    yield model


def evaluate(folder: Path, sizes: Sequence[int], body: Body) -> EvaluatedSamples:
    """Return the record of an evaluation of batches with these sizes.

    Args:
        body: gets the model and the images of a batch, [samples, 3].
    """
    session = RecordingSession(folder)
    observer = EvaluatedSamplesObserver(session)
    model = nn.Linear(3, 1)
    first = 0
    with observer.around_evaluating(evaluating, None, model) as bare_model:  # type: ignore[arg-type]
        assert observer.evaluation is not None
        for size in sizes:
            # The labels are alike, so only the images tell the samples apart.
            batch = {"images": torch.randn(size, 3), "labels": torch.zeros(size)}
            samples = range(first, first + size)
            observer.note_batch(observer.evaluation, None, samples, batch)  # type: ignore[arg-type]
            body(bare_model, batch["images"])
            first += size
    (record,) = session.written
    assert record.sample_count == sum(sizes)
    assert not model._forward_pre_hooks
    return record


@pytest.mark.parametrize("seed", range(20))
def test_batches_that_do_not_reach_the_model_are_written(tmp_path: Path, seed: int) -> None:
    """Batches of chance sizes; some are left out by chance, and others passed in parts or twice.

    The first batch is passed. The record has exactly the samples of those that are left out.
    """
    chance = random.Random(seed)
    sizes = [chance.randint(1, 6) for _ in range(chance.randint(2, 5))]
    left_out: list[int] = []
    count = 0

    def body(model: nn.Module, images: torch.Tensor) -> None:
        nonlocal count
        if count and chance.random() < 0.4:
            left_out.extend(range(count, count + len(images)))
        else:
            for part in images.chunk(chance.randint(1, 3)):
                model(part)
            if chance.random() < 0.3:
                model(images.flip(0))
        count += len(images)

    record = evaluate(tmp_path, sizes, body)
    has_later_call = count - sizes[-1] > 0  # the first batch has a call before the second
    assert has_later_call
    assert record.unseen_indices == left_out


CORRECT: dict[str, Body] = {
    "clamped": lambda model, images: model(images.clamp(-0.7, 0.7)),
    "scaled": lambda model, images: model(images / 255),
    "time-major": lambda model, images: model(images.t().repeat(1, 3)[:, :3]),
    "noise of another size": lambda model, images: model(torch.randn(2, 3)),
    "sparse inputs": lambda model, images: model(images.to_sparse()),
    "a copy of the model": lambda model, images: copy.deepcopy(model)(images),
}


@pytest.mark.parametrize("body", CORRECT.values(), ids=CORRECT)
def test_correct_evaluations_are_not_blamed(tmp_path: Path, body: Body) -> None:
    assert evaluate(tmp_path, [8, 8, 3], body).unseen_indices == []


def test_evaluations_may_be_nested(tmp_path: Path) -> None:
    session = RecordingSession(tmp_path)
    observer = EvaluatedSamplesObserver(session)
    model = nn.Linear(3, 1)
    with observer.around_evaluating(evaluating, None, model):  # type: ignore[arg-type]
        outer = observer.evaluation
        with observer.around_evaluating(evaluating, None, model):  # type: ignore[arg-type]
            assert observer.evaluation is not outer
        assert observer.evaluation is outer


@pytest.mark.parametrize("seed", range(5))
def test_samples_with_changed_values_count_as_passed(tmp_path: Path, seed: int) -> None:
    """Some rows are changed, as by a clamp, and each batch is passed in chance parts."""
    chance = random.Random(seed)

    def body(model: nn.Module, images: torch.Tensor) -> None:
        for part in images.clamp(-0.7, 0.7).chunk(chance.randint(1, 3)):
            model(part)

    assert evaluate(tmp_path, [4, 4, 3], body).unseen_indices == []


def test_a_skipped_batch_is_written_beside_several_views_of_others(tmp_path: Path) -> None:
    """The model gets more rows than there are samples, but none of the last batch."""

    def body(model: nn.Module, images: torch.Tensor) -> None:
        if len(images) == 4:
            model(images)
            model(images.flip(1))

    assert evaluate(tmp_path, [4, 4, 3], body).unseen_indices == [8, 9, 10]


def test_batches_that_are_collected_first_are_not_judged(tmp_path: Path) -> None:
    collected: list[torch.Tensor] = []

    def body(model: nn.Module, images: torch.Tensor) -> None:
        collected.append(images)
        if len(collected) == 3:
            model(torch.cat(collected[:2]).clamp(-0.7, 0.7))

    assert evaluate(tmp_path, [4, 4, 3], body).unseen_indices == []


def test_packed_samples_are_known_by_the_whole_tensor() -> None:
    """Texts that are packed into one row reach the model together."""
    batch = {"tokens": torch.arange(7)[None], "labels": torch.tensor([0, 1, 1])}
    largest = largest_tensor(batch)
    assert largest is batch["tokens"]
    assert digests_of_samples(largest, 3) == [digest_of(batch["tokens"])] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_digest_depends_on_values_and_dtype_alone(dtype: torch.dtype) -> None:
    values = torch.tensor([[[0.0, 1.0], [1.0, 0.0]], [[0.0, 0.0], [1.0, 1.0]]]).to(dtype)
    assert digest_of(values) == digest_of(values.clone(memory_format=torch.preserve_format))
    assert digest_of(values) == digest_of(values.mT.contiguous().mT)
    assert digest_of(values) != digest_of(values.flip(0))
    assert digest_of(values) != digest_of(values.to(torch.float64))
