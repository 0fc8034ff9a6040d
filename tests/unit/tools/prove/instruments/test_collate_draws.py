"""The instrument that observes collate functions that draw random numbers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from common.data import dataset, iterable
from common.data.dataset import DatasetSamples
from common.data.samples import collated
from common.tools.prove.instruments import collate_draws
from common.tools.prove.observation.session import Session


def drawing(draw: Callable[[], object]) -> Callable[[list[Any]], Any]:
    """Return a collate function that calls `draw` first."""

    def collate(rows: list[Any]) -> Any:
        draw()
        return default_collate(rows)

    return collate


class NoisyRows:
    """Its samples draw random numbers in `__getitem__`."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(2)


COLLATE_FUNCTIONS: dict[str, tuple[Callable[[list[Any]], Any], list[str]]] = {
    "torch": (drawing(lambda: torch.rand(1)), ["torch"]),
    "numpy": (drawing(lambda: np.random.rand()), ["numpy"]),
    "python": (drawing(random.random), ["python"]),
    "torch's own": (default_collate, []),
    "without draws": (drawing(lambda: None), []),
    "own generator": (drawing(lambda: torch.rand(1, generator=torch.Generator())), []),
}


@pytest.mark.parametrize("worker_count", [0, 1])
@pytest.mark.parametrize("name", COLLATE_FUNCTIONS)
def test_draws_are_written_once(
    name: str, worker_count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches are made in this process, or in a forked worker."""
    for module in (dataset, iterable):
        monkeypatch.setattr(module, "collated", collated)  # restored after the test
    collate, generators = COLLATE_FUNCTIONS[name]
    session = Session(folder=tmp_path, launch=0, rank=0)
    collate_draws.install(session)
    samples = DatasetSamples(NoisyRows(), collate)

    class Batches:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return samples.read(torch.arange(index, index + 4), 0)

    context = "fork" if worker_count else None
    loader = DataLoader(
        Batches(),  # type: ignore[arg-type]
        batch_size=None,
        num_workers=worker_count,
        multiprocessing_context=context,
    )
    assert len([*loader]) == 3
    path = tmp_path / "launch-0-rank-0.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    assert [json.loads(line)["generators"] for line in lines] == [generators] * bool(generators)
