"""One's own data: any Dataset or tensors, random transforms that can be repeated, exact seeking."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils import _pytree as tree
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from common.config import TrainingConfig
from common.data.batch import Data, DatasetSamples, Samples, TensorSamples, Work, refuse_unread
from common.data.loader import Loader, make_loaders
from common.data.order import EvaluationOrder, TrainingOrder
from common.data.sources import built_in_source
from common.errors import LostProcessError, UserError
from common.flags import flag

CPU = torch.device("cpu")
COUNT = 50


class Noisy(Dataset[Any]):
    """Samples with a draw from each of the three generators."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = [float(torch.rand(())), np.random.rand(), random.random()]
        return {"index": index, "noise": torch.tensor(noise, dtype=torch.float64)}


def noisy_batches(
    workers: int,
    cut: tuple[int, int, int] = (8, 1, 1),
    *,
    rank: int = 0,
    epoch: int = 2,
    first_update: int = 0,
    seed: int = 3,
    samples: Callable[[], Samples] = lambda: DatasetSamples(Noisy()),
) -> list[Any]:
    """Return what a rank gets of an epoch, of which 6 updates of 8 samples are whole."""
    order = TrainingOrder(COUNT, *cut, rank, seed=3)
    loader = Loader(samples(), order, CPU, "auto", workers, seed)
    assert loader.placement == "workers"
    return [batch for batch, _ in loader.epoch(epoch, first_update)]


def assert_same(first: list[Any], second: list[Any]) -> None:
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        leaves, structure = tree.tree_flatten(one)
        others, other_structure = tree.tree_flatten(other)
        assert structure == other_structure
        assert all(torch.equal(a, b) for a, b in zip(leaves, others, strict=True))


def joined(batches: list[Any], name: str) -> torch.Tensor:
    return torch.cat([batch[name] for batch in batches])


# First, as the end of a loader by an error leaves torch slower to see the next one.


class Deadly(Noisy):
    def __getitem__(self, index: int) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def test_killed_worker_is_a_lost_process() -> None:
    """A worker that is gone raises what a restart mends."""
    with pytest.raises(LostProcessError, match="worker"):
        noisy_batches(1, samples=lambda: DatasetSamples(Deadly()))


# Random transforms.


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_draw_what_this_process_draws(workers: int) -> None:
    """What is random in a sample does not depend on the number of workers."""
    assert_same(noisy_batches(workers), noisy_batches(0))


def test_draws_do_not_depend_on_the_split() -> None:
    """A sample is the same in micro-batches of two ranks and in one batch."""
    whole = noisy_batches(0)
    halves = noisy_batches(2, (4, 2, 1))
    assert torch.equal(joined(halves, "noise"), joined(whole, "noise"))
    ranks = [noisy_batches(0, (2, 2, 2), rank=rank) for rank in range(2)]
    pairs = [batch for pair in zip(*ranks, strict=True) for batch in pair]
    assert torch.equal(joined(pairs, "noise"), joined(whole, "noise"))


@pytest.mark.parametrize("changes", [{"epoch": 3}, {"seed": 4}])
def test_each_epoch_and_seed_draws_anew(changes: dict[str, int]) -> None:
    """In another epoch, or of another seed, no sample has the same draws."""
    one, other = noisy_batches(0), noisy_batches(0, **changes)  # type: ignore[arg-type]
    drawn = {
        int(index): row
        for index, row in zip(joined(one, "index"), joined(one, "noise"), strict=True)
    }
    both = [
        (drawn[int(index)], row)
        for index, row in zip(joined(other, "index"), joined(other, "noise"), strict=True)
        if int(index) in drawn
    ]
    assert len(both) > 40
    assert all((before != after).all() for before, after in both)
    # The three generators, and the samples, have streams of their own.
    noise = joined(one, "noise")
    assert len(noise.unique()) == noise.numel()


@pytest.mark.parametrize("workers", [0, 2])
def test_resumption_in_an_epoch_draws_the_same(workers: int) -> None:
    """From an update on, batches are those of an unbroken epoch, random transforms included."""
    assert_same(noisy_batches(workers, first_update=4), noisy_batches(0)[4:])


@pytest.mark.parametrize("workers", [0, 1])
def test_evaluation_draws_the_same_each_time(workers: int) -> None:
    """An evaluation has each sample once, in order, with the same draws whenever it is made."""
    order = EvaluationOrder(COUNT, 8, 1, 0)
    loader = Loader(DatasetSamples(Noisy()), order, CPU, num_workers=workers, seed=3)
    first, again = list(loader), list(loader)
    assert_same(first, again)
    assert joined(first, "index").tolist() == list(range(COUNT))
    (one,) = Loader(DatasetSamples(Noisy()), EvaluationOrder(COUNT, COUNT, 1, 0), CPU, seed=3)
    assert torch.equal(one["noise"], joined(first, "noise"))


def test_reading_here_leaves_the_generators_of_training_alone() -> None:
    """Dropout draws the same whether this process reads the data or workers do."""
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = [float(torch.rand(())), np.random.rand(), random.random()]
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    order = TrainingOrder(COUNT, 8, 1, 1, 0, seed=3)
    loader = Loader(DatasetSamples(Noisy()), order, CPU, num_workers=0, seed=3)
    batches = loader.epoch(0)
    next(batches), next(batches)
    loader.batch_of(torch.arange(4))
    loader.samples.example(2, 0)
    assert [float(torch.rand(())), np.random.rand(), random.random()] == expected


def test_failing_data_leave_the_generators_alone() -> None:
    """An error in reading a sample comes as it is, and changes no generator."""

    class Broken(Noisy):
        def __getitem__(self, index: int) -> dict[str, Any]:
            torch.rand(())
            raise KeyError("no such file")

    before = torch.get_rng_state()
    with pytest.raises(KeyError, match="no such file"):
        noisy_batches(0, samples=lambda: DatasetSamples(Broken()))
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(KeyError, match="no such file"):
        noisy_batches(1, samples=lambda: DatasetSamples(Broken()))


def collate_with_noise(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {"index": torch.tensor([row["index"] for row in rows]), "mix": torch.rand(2)}


@pytest.mark.parametrize("workers", [1, 2])
def test_collating_draws_the_same_too(workers: int) -> None:
    """What `collate_fn` draws is the same on any number of workers and after a resumption."""

    def samples() -> Samples:
        return DatasetSamples(Noisy(), collate_with_noise)

    whole = noisy_batches(0, samples=samples)
    assert_same(noisy_batches(workers, samples=samples), whole)
    assert_same(noisy_batches(0, samples=samples, first_update=2), whole[2:])
    assert len(joined(whole, "mix").unique()) == 2 * len(whole)


class Own(Samples):
    """Two methods are all that one's own samples need."""

    def __len__(self) -> int:
        return COUNT

    def fetch(self, samples: torch.Tensor, epoch: int | None) -> Any:
        return samples, torch.rand(len(samples))


def test_own_samples_need_two_methods() -> None:
    """Batches are seeded as a whole; work and shapes are known by themselves."""
    assert_same(noisy_batches(2, samples=Own), noisy_batches(0, samples=Own))
    different = noisy_batches(0, samples=Own, epoch=1)
    assert not torch.equal(different[0][1], noisy_batches(0, samples=Own)[0][1])
    samples = Own()
    assert samples.count(torch.arange(7)) == Work(7)
    indices, values = samples.example(3, 0)
    assert (indices.device.type, values.shape, values.dtype) == ("meta", (3,), torch.float32)


def test_lengths_group_samples_and_count_tokens() -> None:
    """Samples with lengths are batched by them, and their tokens are counted."""
    samples = Own()
    samples.lengths = np.random.default_rng(0).integers(3, 40, COUNT)
    flags = {"batch_size": 5, "gradient_accumulation_steps": 2, "seed": 1, "num_workers": 0}
    config = TrainingConfig(**flags)  # type: ignore[arg-type]
    accelerator: Any = SimpleNamespace(num_processes=1, process_index=0, device=CPU)
    loader = make_loaders(config, accelerator, {"train": samples})["train"]
    made = list(loader.epoch(0))
    assert len(made) == 10
    order = TrainingOrder(COUNT, 5, 2, 1, 0, 1, samples.lengths)
    for (batch, work), expected in zip(made, order.micro_batches(0), strict=True):
        assert torch.equal(batch[0], expected)
        lengths = samples.lengths[expected.numpy()]
        assert work == Work(5, lengths.sum(), (lengths**2).sum())
    assert samples.seed == 1


# Batches of any form.


class Pair(NamedTuple):
    left: torch.Tensor
    right: dict[str, torch.Tensor]


NESTS: dict[str, Callable[[int], Any]] = {
    "tuple": lambda index: (torch.full((2,), float(index)), index),
    "nested": lambda index: {"x": [torch.tensor(index), {"y": torch.ones(2) * index}], "z": index},
    "named": lambda index: Pair(torch.tensor(index), {"y": torch.tensor([index, -index])}),
    "tensor": lambda index: torch.tensor([index, 2 * index]),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("form", NESTS)
def test_batches_keep_their_form(form: str, workers: int) -> None:
    """Tuples, named tuples, lists and dicts within each other reach the loop as they were made."""
    rows = [NESTS[form](index) for index in range(COUNT)]
    batches = noisy_batches(workers, samples=lambda: DatasetSamples(rows))
    order = TrainingOrder(COUNT, 8, 1, 1, 0, seed=3).micro_batches(2)
    expected = [torch.utils.data.default_collate([rows[i] for i in row]) for row in order.tolist()]
    assert_same(batches, expected)
    (wanted,) = {type(batch) for batch in expected}
    assert {type(batch) for batch in batches} == {wanted}


def test_shapes_are_known_of_any_form() -> None:
    """The batch of shapes alone has the form of a real one."""
    samples = DatasetSamples([NESTS["nested"](index) for index in range(4)])
    example = samples.example(3, 0)
    assert example["x"][1]["y"].shape == (3, 2)
    assert all(leaf.device.type == "meta" for leaf in tree.tree_leaves(example))


def test_hugging_face_dataset_works_as_it_is() -> None:
    """A `datasets.Dataset`, with a transform that draws too, is a split like any other."""
    from datasets import Dataset as Table

    def transform(rows: dict[str, list[float]]) -> dict[str, list[torch.Tensor]]:
        return {"x": [torch.tensor(x) + torch.rand(3) for x in rows["x"]]}

    table = Table.from_dict({"x": [float(n) for n in range(COUNT)], "y": list(range(COUNT))})
    plain = noisy_batches(1, samples=lambda: DatasetSamples(table))
    assert joined(plain, "y").tolist() == joined(plain, "x").tolist()
    data = Data("mine", {"train": table.with_transform(transform), "test": table})
    random_ones = noisy_batches(2, samples=lambda: data.splits["train"])
    assert_same(random_ones, noisy_batches(0, samples=lambda: data.splits["train"]))
    assert random_ones[0]["x"].shape == (8, 3)


def test_tensors_are_gathered_where_they_lie() -> None:
    """Tensors and arrays make the same batches from the device and from workers, cut or not."""
    x, y = torch.randn(COUNT, 3, 2), np.arange(COUNT)
    split = TensorSamples(x=x, y=y)
    assert split.num_bytes == x.nbytes + y.nbytes
    order = TrainingOrder(COUNT, 8, 1, 1, 0, seed=3)
    loader = Loader(split, order, CPU, "auto", seed=3)
    assert loader.placement == "device"
    batches = [batch for batch, _ in loader.epoch(2)]
    assert_same(batches, noisy_batches_of_tensors(TensorSamples(x=x, y=y)))
    chosen = order.micro_batches(2)
    assert torch.equal(torch.stack([batch["x"] for batch in batches]), x[chosen])
    assert torch.equal(torch.stack([batch["y"] for batch in batches]), chosen)
    assert split.example(5, 0)["x"].shape == (5, 3, 2)


def noisy_batches_of_tensors(split: TensorSamples) -> list[Any]:
    order = TrainingOrder(COUNT, 8, 1, 1, 0, seed=3)
    return [batch for batch, _ in Loader(split, order, CPU, "workers", 1).epoch(2)]


def test_tensors_of_different_lengths_are_a_mistake() -> None:
    with pytest.raises(UserError) as error:
        TensorSamples(x=torch.zeros(3), y=torch.zeros(4))
    assert "'x': 3" in error.value.message
    assert "'y': 4" in error.value.message


def test_samples_made_one_by_one_are_not_placed() -> None:
    """Asking for them in the device's memory is refused with the flag's other values."""
    with pytest.raises(UserError) as error:
        Loader(DatasetSamples(Noisy()), EvaluationOrder(COUNT, 8, 1, 0), CPU, "device")
    assert "--data-placement device" in error.value.message
    assert "workers" in error.value.message


class Deaf(Noisy):
    """Samples that say whether their worker outlives the signals to a job."""

    def __getitem__(self, index: int) -> Any:
        stops = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        return [signal.getsignal(number) == signal.SIG_IGN for number in stops]


def test_workers_ignore_what_asks_a_job_to_stop() -> None:
    batches = noisy_batches(1, samples=lambda: DatasetSamples(Deaf()))
    assert all(flags.all() for batch in batches for flags in batch)


class Unreachable(Noisy):
    def __getitem__(self, index: int) -> Any:
        raise ConnectionError("the store does not answer")


@pytest.mark.parametrize("workers", [0, 1])
def test_error_of_the_data_is_no_lost_process(workers: int) -> None:
    """An error that reading raises keeps its type and words, also from a worker."""
    with pytest.raises(ConnectionError, match="the store does not answer"):
        noisy_batches(workers, samples=lambda: DatasetSamples(Unreachable()))


# A data set as a whole.


def test_data_adapts_its_splits_and_says_what_it_is() -> None:
    """Any Dataset is taken; what describes data is optional."""
    numbers = TensorDataset(torch.arange(9))
    data = Data("mine", {"train": Noisy(), "test": numbers, "validation": TensorSamples(x=[1, 2])})
    assert [type(split) for split in data.splits.values()] == [
        DatasetSamples,
        DatasetSamples,
        TensorSamples,
    ]
    facts = data.facts().to_json()
    assert len(str(facts.pop("fingerprint"))) == 16
    assert facts == {
        "name": "mine",
        "reason": "the recipe's own data",
        "sizes": {"train": COUNT, "test": 9, "validation": 2},
        "notes": [],
    }
    assert (data.class_names, data.source) == (None, None)
    source = built_in_source("digits", "named, built in")
    splits = {"train": Noisy(), "test": numbers}
    data = Data("mine", splits, class_names=["a", "b"], source=source, notes=("a note",))
    facts = data.facts()
    assert (facts.reason, facts.classes) == ("named, built in", 2)
    assert facts.notes == ["a note"]
    data = Data("mine", splits, fingerprint="01ab")
    assert data.facts().fingerprint == "01ab"


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter([1])


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ({"train": Stream(), "test": [1]}, ["mine", "split train", "Stream", "map-style"]),
        ({"train": [1], "test": 5}, ["split test", "int"]),
        ({"train": [1], "test": []}, ["split test", "empty"]),
        ({"train": [1]}, ["train", "validation or test"]),
        ({"train": [1], "val": [1]}, ["train, val", "validation or test"]),
        ({"test": [1]}, ["test", "train"]),
    ],
)
def test_splits_that_cannot_work_are_mistakes(splits: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        Data("mine", splits)
    assert all(word in error.value.message for word in words), error.value.message


@dataclass
class Config:
    batch_size: int = flag(8, role="pace")
    dataset: str = flag("auto", role="data")
    validation_share: float | None = flag(None, role="data")
    init_from: str | None = flag(None, role="data")
    text_columns: tuple[str, ...] = flag((), role="data")


def test_flag_that_the_data_do_not_read_is_a_mistake() -> None:
    """A flag that names data is refused where the recipe's own data would pass over it."""
    own = Data("mine", {"train": [1], "test": [1]})
    reader = Data("read", {"train": [1], "test": [1]}, reads=frozenset({"dataset"}))
    refuse_unread(Config(batch_size=9, init_from="runs/a"), own)
    refuse_unread(Config(dataset="mnist"), reader)
    # As a search does: heeded by a split that is there already.
    split = Data("split", {"train": [1], "validation": [1]})
    refuse_unread(Config(validation_share=0.1), split)
    given: list[tuple[Config, Data, str]] = [
        (Config(dataset="mnist"), own, "--dataset mnist"),
        (Config(dataset="mnist", validation_share=0.1), reader, "--validation-share 0.1"),
        (Config(text_columns=("a", "b")), reader, "--text-columns a b"),
    ]
    for config, data, words in given:
        with pytest.raises(UserError) as error:
            refuse_unread(config, data)
        assert words in error.value.message
        assert data.name in error.value.message
