"""The instrument that observes which samples of an evaluation reach the model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from common.tools.prove.instruments.evaluated_rows import (
    EvaluatedRowsObserver,
    digest_of,
    sample_digests,
)
from common.tools.prove.records.instrument_records import EvaluatedRows
from common.tools.prove.session import Session


class RecordingSession(Session):
    """A session that keeps its records in memory, and whose loaders are all of one split."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder=folder, launch=0, rank=0)
        self.written: list[EvaluatedRows] = []

    def write(self, record: Any) -> None:
        self.written.append(record)

    def split_of(self, loader: Any) -> str:
        return "validation"


@contextmanager
def evaluating(run: Any, model: nn.Module) -> Iterator[nn.Module]:
    yield model


@pytest.mark.parametrize("seed", range(20))
def test_samples_that_do_not_reach_the_model_are_written(tmp_path: Path, seed: int) -> None:
    """Batches of chance sizes; some samples are left out, and others are passed in parts or twice.

    The record has exactly the samples that are left out.
    """
    chance = random.Random(seed)
    session = RecordingSession(tmp_path)
    observer = EvaluatedRowsObserver(session)
    model = nn.Linear(3, 1)
    left_out: list[int] = []
    first = 0
    with observer.around_evaluating(evaluating, None, model) as bare_model:  # type: ignore[arg-type]
        assert observer.evaluation is not None
        for _ in range(chance.randint(1, 4)):
            size = chance.randint(1, 6)
            samples = range(first, first + size)
            first += size
            # The labels are alike, so only the images tell the samples apart.
            batch = {"images": torch.randn(size, 3), "labels": torch.zeros(size)}
            observer.note_batch(observer.evaluation, None, samples, batch)  # type: ignore[arg-type]
            passed = [chance.random() < 0.8 for _ in samples]
            left_out += [
                sample for sample, is_passed in zip(samples, passed, strict=True) if not is_passed
            ]
            rows = batch["images"][torch.tensor(passed)]
            for part in rows.chunk(chance.randint(1, 3)):
                if len(part):
                    bare_model(part)
            if len(rows) and chance.random() < 0.3:
                bare_model(rows.flip(0))
    (record,) = session.written
    assert record.unseen == left_out
    assert record.samples == first
    assert not model._forward_pre_hooks


def test_packed_samples_are_known_by_the_whole_tensor() -> None:
    """Texts that are packed into one row reach the model together."""
    batch = {"tokens": torch.arange(7)[None], "labels": torch.tensor([0, 1, 1])}
    assert sample_digests(batch, 3) == [digest_of(batch["tokens"])] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_digest_depends_on_values_and_dtype_alone(dtype: torch.dtype) -> None:
    values = torch.tensor([[[0.0, 1.0], [1.0, 0.0]], [[0.0, 0.0], [1.0, 1.0]]]).to(dtype)
    assert digest_of(values) == digest_of(values.clone(memory_format=torch.preserve_format))
    assert digest_of(values) == digest_of(values.mT.contiguous().mT)
    assert digest_of(values) != digest_of(values.flip(0))
    assert digest_of(values) != digest_of(values.to(torch.float64))
