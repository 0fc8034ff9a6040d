"""An `IterableDataset`: each sample once a pass, and the next sample after a resume."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from datasets import IterableDataset as HubDataset
from torch.utils.data import IterableDataset

from common.data.iterable import IterableOrder, IterableSamples
from common.data.loader import Loader
from common.errors import UserError
from tests.unit.data.loading import refusal

COUNT = 22
BATCH = 4
UPDATES = 14


def rows(shards: list[int]) -> Iterator[dict[str, int]]:
    """Yield the samples of some shards."""
    for shard in shards:
        yield from ({"x": number} for number in range(shard * 11, shard * 11 + 11))


def of_hub() -> Any:
    """Return a dataset of two shards."""
    return HubDataset.from_generator(rows, gen_kwargs={"shards": [0, 1]})


class Counter(IterableDataset[dict[str, int]]):
    """Numbers in a new order each epoch, with a position that can be saved."""

    def __init__(self) -> None:
        self.epoch = 0
        self.place = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, int]]:
        order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for place in range(self.place, COUNT):
            self.place = place + 1
            yield {"x": order[place]}
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def loader_of(samples: IterableSamples, workers: int) -> Loader:
    """Return a loader of 14 updates."""
    order = IterableOrder(UPDATES * BATCH, BATCH, 1, 1, 0, 0)
    return Loader(samples, order, torch.device("cpu"), num_workers=workers, placement="auto")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("make", [of_hub, Counter])
@pytest.mark.parametrize("stop", [1, 5, 6, 9])
def test_resume_continues_with_the_next_sample(make: Any, workers: int, stop: int) -> None:
    """This holds within a pass and after its end, even if workers have read ahead."""
    loader = loader_of(IterableSamples(make()), workers)
    whole = [batch["x"].tolist() for batch, _ in loader.epoch(0)]
    loader.close()
    flat = [number for batch in whole for number in batch]
    assert sorted(flat[:COUNT]) == sorted(flat[COUNT : 2 * COUNT]) == [*range(COUNT)]
    samples = IterableSamples(make())
    loader = loader_of(samples, workers)
    epoch = loader.epoch(0)
    for _ in range(stop):
        next(epoch)
    state = samples.state_dict()
    loader.close()
    samples = IterableSamples(make())
    samples.load_state_dict(state)
    loader = loader_of(samples, workers)
    assert [batch["x"].tolist() for batch, _ in loader.epoch(0, stop)] == whole[stop:]
    loader.close()


@pytest.mark.parametrize("make", [of_hub, Counter])
def test_processes_share_a_pass(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample goes to exactly one process."""
    seen = list[int]()
    for rank in range(2):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", str(rank))
        batch = IterableSamples(make()).fetch(torch.zeros(11, dtype=torch.long), 0)["batch"]
        seen += batch["x"].tolist()
    assert sorted(seen) == [*range(COUNT)]


def test_dataset_that_cannot_resume_exactly_is_refused() -> None:
    """A shuffle buffer, a missing state or another number of processes makes a resume inexact."""
    assert "shuffle buffer" in refusal(lambda: IterableSamples(of_hub().shuffle(seed=0)))
    assert "map" not in refusal(lambda: IterableSamples(of_hub().shuffle(seed=0).map(dict)))
    assert "state_dict" in refusal(lambda: IterableSamples(iter([1])))
    with pytest.raises(UserError, match="resume the run with 3"):
        IterableSamples(Counter()).load_from_ranks([{}] * 3)


def test_example_leaves_the_position_alone() -> None:
    """The example has the shapes of the first sample."""
    samples = IterableSamples(Counter())
    assert samples.example(3, 0)["x"].shape == (3,)
    assert samples.dataset.place == 0
