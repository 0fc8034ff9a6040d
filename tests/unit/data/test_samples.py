"""Data of the user's own: any dataset or tensors, repeatable random transforms, exact seeking."""

from __future__ import annotations

import os
import random
import signal
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils import _pytree as tree
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from common.command_line.flag_reads import record_reads
from common.config import TrainingConfig
from common.data.dataset import Data, DatasetSamples
from common.data.loader import NO_SIGNALS, Loader
from common.data.order import EvaluationOrder, TrainingOrder
from common.data.run_loaders import make_loaders
from common.data.samples import Samples, Work
from common.data.sources import built_in_source
from common.data.stored_samples import TensorSamples
from common.data.unused_flags import refuse_unused_data_flags
from common.errors import LostProcessError, UserError
from common.flags import flag
from common.lifecycle.misuse import require_data, training_order_of

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
    """Return a rank's batches of an epoch, which has 6 whole updates of 8 samples."""
    order = TrainingOrder(COUNT, *cut, rank, seed=3)
    loader = Loader(samples(), order, CPU, "auto", workers, seed=seed)
    assert loader.placement == "workers"
    return [batch for batch, _ in loader.epoch(epoch, first_update)]


def assert_same(first: list[Any], second: list[Any]) -> None:
    assert len(first) == len(second) > 0
    for batch, other_batch in zip(first, second, strict=True):
        leaves, structure = tree.tree_flatten(batch)
        others, other_structure = tree.tree_flatten(other_batch)
        assert structure == other_structure
        assert all(torch.equal(a, b) for a, b in zip(leaves, others, strict=True))


def joined(batches: list[Any], name: str) -> torch.Tensor:
    return torch.cat([batch[name] for batch in batches])


# This test comes first. Once a loader has ended with an error, torch notices the next error later.


class Deadly(Noisy):
    def __getitem__(self, index: int) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def test_killed_worker_is_a_lost_process() -> None:
    """A supervisor restarts a run after this error."""
    with pytest.raises(LostProcessError, match="worker"):
        noisy_batches(1, samples=lambda: DatasetSamples(Deadly()))


# Random transforms.


@pytest.mark.parametrize("workers", [1, 2])
def test_random_transforms_do_not_depend_on_workers(workers: int) -> None:
    """The draws of a sample are the same in this process and in any number of workers."""
    assert_same(noisy_batches(workers), noisy_batches(0))


def test_random_transforms_do_not_depend_on_micro_batches() -> None:
    """A sample is the same in micro-batches of two ranks and in one batch."""
    whole = noisy_batches(0)
    halves = noisy_batches(2, (4, 2, 1))
    assert torch.equal(joined(halves, "noise"), joined(whole, "noise"))
    ranks = [noisy_batches(0, (2, 2, 2), rank=rank) for rank in range(2)]
    pairs = [batch for pair in zip(*ranks, strict=True) for batch in pair]
    assert torch.equal(joined(pairs, "noise"), joined(whole, "noise"))


def noise_by_index(batches: list[Any]) -> dict[int, torch.Tensor]:
    """Return the three draws of each sample by the sample's index."""
    indices = joined(batches, "index").tolist()
    return dict(zip(indices, joined(batches, "noise"), strict=True))


@pytest.mark.parametrize("changes", [{"epoch": 3}, {"seed": 4}])
def test_random_transforms_differ_by_epoch_and_seed(changes: dict[str, int]) -> None:
    """In another epoch or with another seed, every draw of every sample differs."""
    batches = noisy_batches(0)
    other_batches = noisy_batches(0, **changes)  # type: ignore[arg-type]
    noise = noise_by_index(batches)
    other_noise = noise_by_index(other_batches)
    common_indices = noise.keys() & other_noise.keys()
    assert len(common_indices) > 40
    assert all((noise[index] != other_noise[index]).all() for index in common_indices)
    # The three generators, and the samples, have streams of their own.
    all_noise = joined(batches, "noise")
    assert len(all_noise.unique()) == all_noise.numel()


class Curriculum(Noisy):
    """Samples with noise that grows with the epoch."""

    difficulty = 0.0

    def set_epoch(self, epoch: int) -> None:
        self.difficulty = 0.1 * epoch

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) | {"difficulty": self.difficulty}


@pytest.mark.parametrize("workers", [0, 2])
def test_data_set_follows_the_epoch_wherever_it_is_read(workers: int) -> None:
    """`set_epoch` is called in the process that reads the samples; an evaluation has epoch 0."""
    for epoch in (2, 5):
        batches = noisy_batches(workers, epoch=epoch, samples=lambda: DatasetSamples(Curriculum()))
        assert joined(batches, "difficulty").unique().tolist() == pytest.approx([0.1 * epoch])
    order = EvaluationOrder(COUNT, 8, 1, 0, None)
    loader = Loader(DatasetSamples(Curriculum()), order, CPU, "auto", workers, seed=3)
    loader.samples.fetch(torch.arange(3), 4)  # an epoch of training before the evaluation
    assert joined([*loader], "difficulty").unique().tolist() == [0.0]


def test_attribute_of_the_data_set_is_not_set_on_the_split() -> None:
    """The assignment would have no effect. Attributes that a split has can be set."""
    data = Data("noisy", {"train": Curriculum(), "test": Noisy()})
    with pytest.raises(UserError, match="difficulty is an attribute of Curriculum") as error:
        data.splits["train"].difficulty = 0.5
    assert "set_epoch(epoch)" in error.value.message
    data.splits["train"].lengths = None
    data.splits["train"].note_of_the_user = "anything"


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_within_an_epoch_repeats_random_transforms(workers: int) -> None:
    """From the resumed update on, batches equal those of an uninterrupted epoch."""
    assert_same(noisy_batches(workers, first_update=4), noisy_batches(0)[4:])


@pytest.mark.parametrize("workers", [0, 1])
def test_evaluations_repeat_random_transforms(workers: int) -> None:
    """An evaluation has each sample once, in order, and always with the same draws."""
    order = EvaluationOrder(COUNT, 8, 1, 0, lengths=None)
    loader = Loader(
        DatasetSamples(Noisy()), order, CPU, num_workers=workers, seed=3, placement="auto"
    )
    first = list(loader)
    again = list(loader)
    assert_same(first, again)
    assert joined(first, "index").tolist() == list(range(COUNT))
    (whole_batch,) = Loader(
        DatasetSamples(Noisy()),
        EvaluationOrder(COUNT, COUNT, 1, 0, lengths=None),
        CPU,
        seed=3,
        placement="auto",
    )
    assert torch.equal(whole_batch["noise"], joined(first, "noise"))


def seed_generators(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def draw_from_generators() -> list[float]:
    return [float(torch.rand(())), np.random.rand(), random.random()]


def test_loading_leaves_the_generators_of_training_alone() -> None:
    """Dropout draws the same whether this process reads the data or workers do."""
    seed_generators(5)
    expected = draw_from_generators()
    seed_generators(5)
    order = TrainingOrder(COUNT, 8, 1, 1, 0, seed=3)
    loader = Loader(DatasetSamples(Noisy()), order, CPU, num_workers=0, seed=3, placement="auto")
    batches = loader.epoch(0)
    next(batches)
    next(batches)
    loader.batch_of(torch.arange(4))
    loader.samples.example(2, 0)
    assert draw_from_generators() == expected


def test_failed_read_leaves_the_generators_alone() -> None:
    """The error itself is passed on unchanged."""

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
def test_random_collating_is_repeatable(workers: int) -> None:
    """`collate_fn` draws the same with any number of workers and after a resume."""

    def samples() -> Samples:
        return DatasetSamples(Noisy(), collate_with_noise)

    whole = noisy_batches(0, samples=samples)
    assert_same(noisy_batches(workers, samples=samples), whole)
    assert_same(noisy_batches(0, samples=samples, first_update=2), whole[2:])
    assert len(joined(whole, "mix").unique()) == 2 * len(whole)


class Own(Samples):
    """Samples with only the two methods that must be there."""

    def __len__(self) -> int:
        return COUNT

    def fetch(self, indices: torch.Tensor, epoch: int | None) -> Any:
        return indices, torch.rand(len(indices))


def test_samples_need_only_two_methods() -> None:
    """The base class seeds each batch, counts work and derives shapes."""
    assert_same(noisy_batches(2, samples=Own), noisy_batches(0, samples=Own))
    different = noisy_batches(0, samples=Own, epoch=1)
    assert not torch.equal(different[0][1], noisy_batches(0, samples=Own)[0][1])
    samples = Own()
    assert samples.work_by_index(torch.arange(7)) == Work(7)
    indices, values = samples.example(3, 0)
    assert (indices.device.type, values.shape, values.dtype) == ("meta", (3,), torch.float32)


def test_lengths_group_samples_and_count_tokens() -> None:
    """Samples with `lengths` are batched by length, and their tokens are counted."""
    samples = Own()
    samples.lengths = np.random.default_rng(0).integers(3, 40, COUNT)
    flags = {"batch_size": 5, "gradient_accumulation_steps": 2, "seed": 1, "num_workers": 0}
    config = TrainingConfig(**flags)  # type: ignore[arg-type]
    accelerator: Any = SimpleNamespace(num_processes=1, process_index=0, device=CPU)
    loader = make_loaders(config, accelerator, {"train": samples}, signals=NO_SIGNALS)["train"]
    batches = list(loader.epoch(0))
    assert len(batches) == 10
    order = TrainingOrder(COUNT, 5, 2, 1, 0, 1, samples.lengths)
    for (batch, work), expected in zip(batches, order.micro_batches(0), strict=True):
        assert torch.equal(batch[0], expected)
        lengths = samples.lengths[expected.numpy()]
        assert work == Work(5, lengths.sum(), (lengths**2).sum())
    assert samples.seed == 1


# Batches of any structure.


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
def test_batches_keep_their_structure(form: str, workers: int) -> None:
    """Nested tuples, named tuples, lists and dicts reach the loop as they were collated."""
    rows = [NESTS[form](index) for index in range(COUNT)]
    batches = noisy_batches(workers, samples=lambda: DatasetSamples(rows))
    order = TrainingOrder(COUNT, 8, 1, 1, 0, seed=3).micro_batches(2)
    expected = []
    for indices in order.tolist():
        batch_rows = [rows[index] for index in indices]
        expected.append(torch.utils.data.default_collate(batch_rows))
    assert_same(batches, expected)
    (expected_type,) = {type(batch) for batch in expected}
    assert {type(batch) for batch in batches} == {expected_type}


def sized(form: str, size: int) -> Any:
    """Return a sample with a value of this size, in a nest of this form."""
    value = torch.zeros(2, size)
    return {
        "tensor": value,
        "dict": {"image": value, "label": 1},
        "array": {"image": value.numpy()},
        "nested": {"x": (1, [value])},
        "list": {"tokens": [1] * size},
    }[form]


SIZES = {  # by form: the place and the sizes that the message names
    "tensor": "a value of size [2, 4], but sample 0 has [2, 3]",
    "dict": "['image'] of size [2, 4], but sample 0 has [2, 3]",
    "array": "['image'] of size [2, 4], but sample 0 has [2, 3]",
    "nested": "['x'][1][0] of size [2, 4], but sample 0 has [2, 3]",
    "list": "['tokens'] of size [4], but sample 0 has [3]",
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("form", SIZES)
@pytest.mark.parametrize("position", [1, 5])
def test_sample_of_another_size_is_named(form: str, position: int, workers: int) -> None:
    """One sentence names it, with and without workers; torch's own error names no sample."""
    rows = [sized(form, 3) for _ in range(6)]
    rows[position] = sized(form, 4)
    samples = DatasetSamples(rows)
    order = EvaluationOrder(6, 6, 1, 0, lengths=None)
    loader = Loader(samples, order, CPU, "auto", workers)
    with pytest.raises(UserError) as error:
        next(iter(loader))
    assert error.value.problem == f"sample {position} of the data set has {SIZES[form]}"
    assert "collate_fn that pads them" in error.value.advice


def test_other_errors_of_collating_keep_their_traceback() -> None:
    """A `collate_fn` of the user takes samples of any sizes, so they are not the mistake."""

    def fail(rows: list[Any]) -> Any:
        raise RuntimeError("a mistake of its own")

    rows = [torch.zeros(2), torch.zeros(3)]
    with pytest.raises(RuntimeError, match="a mistake of its own"):
        DatasetSamples(rows, fail).fetch(torch.arange(2), None)
    too_large = 2**70  # for a tensor
    with pytest.raises((OverflowError, ValueError)):
        DatasetSamples([too_large, too_large]).fetch(torch.arange(2), None)


def test_example_has_the_structure_of_a_batch() -> None:
    """The example of a batch holds shapes only, on the meta device."""
    samples = DatasetSamples([NESTS["nested"](index) for index in range(4)])
    example = samples.example(3, 0)
    assert example["x"][1]["y"].shape == (3, 2)
    assert all(leaf.device.type == "meta" for leaf in tree.tree_leaves(example))


def test_hugging_face_dataset_works_as_it_is() -> None:
    """A `datasets.Dataset` is a split like any other, even with a random transform."""
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


def test_tensors_give_the_same_batches_from_device_and_workers() -> None:
    """A split of tensors and arrays lies on the device by default."""
    x = torch.randn(COUNT, 3, 2)
    y = np.arange(COUNT)
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


def test_tensors_of_different_lengths_are_refused() -> None:
    """The message gives the length of each."""
    with pytest.raises(UserError) as error:
        TensorSamples(x=torch.zeros(3), y=torch.zeros(4))
    assert "'x': 3" in error.value.message
    assert "'y': 4" in error.value.message


@pytest.mark.parametrize(("placement", "workers"), [("device", 0), ("workers", 0), ("workers", 1)])
@pytest.mark.parametrize("when", ["in an epoch", "between epochs", "by a view"])
def test_change_of_a_tensor_during_training_is_refused(
    placement: str, workers: int, when: str
) -> None:
    """Otherwise some batches would have old rows and others new ones."""
    inputs = torch.arange(float(COUNT))
    inputs *= 2  # before the first batch, a change is no mistake
    samples = TensorSamples(inputs=inputs, labels=np.zeros(COUNT))
    order = TrainingOrder(COUNT, 8, 1, 1, 0, seed=3)
    loader = Loader(samples, order, CPU, placement, workers)
    for epoch in range(2):
        for batch, _ in loader.epoch(epoch):
            batch["inputs"] += 1  # it is the loop's own
    epoch_3 = loader.epoch(2)
    if when == "between epochs":
        inputs[3] = 0
    else:
        next(epoch_3)
        (inputs if when == "in an epoch" else inputs[:5]).zero_()
    with pytest.raises(UserError, match=r'the tensor "inputs" of a split has changed .*run\.keep'):
        list(epoch_3)


def test_dataset_samples_cannot_lie_on_the_device() -> None:
    """The message names the flag and its other values."""
    with pytest.raises(UserError) as error:
        Loader(
            DatasetSamples(Noisy()), EvaluationOrder(COUNT, 8, 1, 0, lengths=None), CPU, "device"
        )
    assert "--data-placement device" in error.value.message
    assert "workers" in error.value.message


class Deaf(Noisy):
    """Samples that tell whether their worker ignores the signals that stop a job."""

    def __getitem__(self, index: int) -> Any:
        stops = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        return [signal.getsignal(number) == signal.SIG_IGN for number in stops]


def test_workers_ignore_what_asks_a_job_to_stop() -> None:
    """The main process alone handles them."""
    batches = noisy_batches(1, samples=lambda: DatasetSamples(Deaf()))
    assert all(flags.all() for batch in batches for flags in batch)


class Unreachable(Noisy):
    def __getitem__(self, index: int) -> Any:
        raise ConnectionError("the store does not answer")


@pytest.mark.parametrize("workers", [0, 1])
def test_error_of_the_data_is_not_a_lost_process(workers: int) -> None:
    """An error while reading keeps its type and message, even from a worker."""
    with pytest.raises(ConnectionError, match="the store does not answer"):
        noisy_batches(workers, samples=lambda: DatasetSamples(Unreachable()))


# Data sets with their splits.


def test_data_wraps_any_dataset_and_describes_itself() -> None:
    """Everything that describes the data is optional."""
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


class WithoutLength:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ({"train": Stream(), "test": [1]}, ["mine", "split train", "Stream", "map-style"]),
        ({"train": Stream(), "test": [1]}, ["which lacks __len__ and __getitem__"]),
        ({"train": [1], "test": WithoutLength()}, ["split test", "which lacks __len__: pass"]),
        ({"train": [1], "test": {1}}, ["split test", "set", "which lacks __getitem__: pass"]),
        ({"train": [1], "test": 5}, ["split test", "int"]),
        ({"train": [1], "test": []}, ["split test", "empty", ", or remove it from Data(...)"]),
        ({"train": [], "test": [1]}, ["split train of data set mine is empty: add samples to it"]),
        ({"train": [1]}, ["splits 'train', but", "pass splits with these names to Data"]),
        ({"train": [1], "val": [1]}, ["'train', 'val'", "'validation' and 'test'"]),
        ({"test": [1]}, ["test", "train"]),
    ],
)
def test_unusable_splits_are_refused(splits: dict[str, Any], words: list[str]) -> None:
    """The message names the split, its type or the splits that are missing."""
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


@pytest.mark.parametrize("how", ["no reads", "reads", "read by the recipe", "default", "zero"])
def test_validation_share_without_effect_is_told(
    how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A search sets this flag. If the data have a validation split already, the run goes on."""
    reads = frozenset({"validation_share"} if how == "reads" else ())
    data = Data("split", {"train": [1], "validation": [1]}, reads=reads)
    config = Config(validation_share={"default": None, "zero": 0.0}.get(how, 0.2))
    record_reads(config)
    if how == "read by the recipe":
        assert config.validation_share
    refuse_unused_data_flags(config, data)
    sentence = "--validation-share 0.2 has no effect, because the recipe's data set split has a"
    assert (sentence in " ".join(capsys.readouterr().out.split())) == (how == "no reads")


def test_data_flag_that_is_not_read_is_refused() -> None:
    """A data flag that the recipe's own data would silently ignore is refused."""
    unread = Data("mine", {"train": [1], "test": [1]})
    reader = Data("read", {"train": [1], "test": [1]}, reads=frozenset({"dataset"}))
    refuse_unused_data_flags(Config(batch_size=9, init_from="runs/a"), unread)
    refuse_unused_data_flags(Config(dataset="mnist"), reader)
    refuse_unused_data_flags(Config(validation_share=0.0), unread)  # nothing is held out
    mistakes: list[tuple[Config, Data, str]] = [
        (Config(dataset="mnist"), unread, "--dataset mnist"),
        (Config(dataset="mnist", validation_share=0.1), reader, "--validation-share 0.1"),
        (Config(text_columns=("a", "b")), reader, "--text-columns a b"),
    ]
    for config, data, flags in mistakes:
        with pytest.raises(UserError) as error:
            refuse_unused_data_flags(config, data)
        assert flags in error.value.message
        assert data.name in error.value.message


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (np.array([[1, 2], [3]], dtype=object), "as a value of type ndarray of dtype object"),
        (np.array(["a", "b"]), "as a value of type ndarray of dtype <U1"),
        (np.array(["2020-01-01"], dtype="datetime64[D]"), "ndarray of dtype datetime64[D]"),
        (np.arange(3)[::-1], "as a value of type ndarray of dtype int64, which can't become"),
        (["a", "b"], "as a value of type list, which can't become a tensor"),
        (None, "as a value of type NoneType, which can't become a tensor"),
        ({"a": [1]}, "as a value of type dict, which can't become a tensor"),
        (3, "as a value of type int with a single number instead of a row per sample"),
        (torch.tensor(3), "as a value of type Tensor with a single number instead of a row"),
    ],
    ids=["object", "text", "date", "reversed", "texts", "none", "dict", "number", "0-dim tensor"],
)
def test_value_that_is_no_tensor_is_refused(values: Any, problem: str) -> None:
    """The message names the key and the type."""
    with pytest.raises(UserError) as error:
        TensorSamples(labels=torch.zeros(2), inputs=values)
    assert error.value.message.startswith("TensorSamples got 'inputs' as a value of type ")
    assert problem in error.value.message
    assert "pass a tensor or an array of numbers" in error.value.advice


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (None, "is None"),
        ({"x": torch.ones(1), "y": None}, "has None in ['y']"),
        ((torch.ones(1), None), "has None in [1]"),
    ],
)
def test_sample_that_is_none_is_named(row: Any, problem: str) -> None:
    """A branch of `__getitem__` may lack a `return`."""
    good = {"x": torch.ones(1), "y": 1} if isinstance(row, dict) else (torch.ones(1), 1)
    samples = DatasetSamples([good, good, good if row is None else row, row])
    index = 3 if row is None else 2
    with pytest.raises(UserError) as error:
        samples.fetch(torch.tensor([0, index]), 0)
    expected = f"sample {index} of the data set {problem}, which can't be in a batch"
    assert error.value.problem == expected


@dataclass
class Holder:
    """A sample or a batch that is no dictionary."""

    x: Any


class MovableHolder(Holder):
    def to(self, device: torch.device) -> MovableHolder:
        return MovableHolder(self.x.to(device))


class SlottedHolder:
    __slots__ = ("x",)

    def __init__(self, x: Any):
        self.x = x


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (Holder(torch.ones(1)), "is a Holder"),
        ({"x": torch.ones(1), "y": Holder(1)}, "has a value of type Holder in ['y']"),
        ([1, {2}], "has a value of type set in [1]"),
    ],
)
def test_sample_of_a_type_that_torch_cannot_collate_is_named(row: Any, what: str) -> None:
    with pytest.raises(UserError) as error:
        DatasetSamples([row, row]).fetch(torch.tensor([1, 0]), 0)
    expected = (
        f"sample 1 of the data set {what}, of which torch's default_collate can't make a batch"
    )
    assert error.value.problem == expected
    assert "collate_fn" in error.value.advice


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda rows: Holder(torch.stack(rows)), "is a Holder"),
        (lambda rows: SlottedHolder(torch.stack(rows)), "is a SlottedHolder"),
        (lambda rows: {"x": [Holder(row) for row in rows]}, "has a Holder in ['x'][0]"),
    ],
)
def test_batch_that_cannot_be_copied_to_the_device_is_refused(
    make: Callable[[list[Any]], Any], what: str
) -> None:
    """On a CPU, the recipe would train. On a GPU, its batches would stay on the host."""
    samples = DatasetSamples([torch.ones(1), torch.ones(1)], make)
    with pytest.raises(UserError) as error:
        samples.fetch(torch.tensor([0, 1]), 0)
    assert error.value.problem.startswith(f"the batch that collate_fn makes {what}, and a run")


def test_collate_function_without_a_result_is_named() -> None:
    """It may lack a `return`."""
    samples = DatasetSamples([torch.ones(1)], lambda rows: None)
    with pytest.raises(UserError) as error:
        samples.fetch(torch.tensor([0]), 0)
    assert error.value.problem == "collate_fn returns None instead of a batch"


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: {"x": torch.stack(rows), "names": ["a", None], "path": Path("a")},
        lambda rows: MovableHolder(torch.stack(rows)),
        lambda rows: [{"boxes": row} for row in rows],
        lambda rows: UserDict(x=torch.stack(rows)),
    ],
    ids=["other values", "method to", "ragged", "user dict"],
)
def test_batch_that_can_be_copied_to_the_device_is_kept(make: Callable[[list[Any]], Any]) -> None:
    samples = DatasetSamples([torch.ones(1), torch.ones(1)], make)
    assert samples.fetch(torch.tensor([0, 1]), 0) is not None


@pytest.mark.parametrize("name", ["val", "valid", "dev"])
@pytest.mark.parametrize("others", [["test"], ["test", "bank"]])
def test_validation_split_of_another_name_is_refused(name: str, others: list[str]) -> None:
    """A run would not read it, and would choose no best model."""
    with pytest.raises(UserError) as error:
        Data("mine", {split: [1] for split in ("train", name, *others)})
    assert error.value.problem == f"data set 'mine' has a split '{name}', but no split 'validation'"


def test_split_val_beside_a_validation_split_is_one_of_the_recipes_own() -> None:
    data = Data("mine", {split: [1] for split in ("train", "validation", "val")})
    assert len(data.splits["val"]) == 1


@pytest.mark.parametrize("length", [-3, 2.0, None])
def test_length_that_is_no_number_of_samples_is_refused(length: Any) -> None:
    """A series may be shorter than a window of it."""

    class Windows:
        def __len__(self) -> int:
            return length

        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(UserError) as error:
        Data("series", {"train": [1], "test": Windows()})
    problem = "__len__ of split test of data set series returns no number of samples ("
    assert error.value.problem.startswith(problem)


@pytest.mark.parametrize("data", [{"train": [1], "test": [1]}, [1], None])
def test_data_of_another_type_are_refused(data: Any) -> None:
    with pytest.raises(UserError) as error:
        require_data(data)
    problem = f"run.loaders got a value of type {type(data).__name__} instead of a Data"
    assert error.value.problem == problem


@pytest.mark.parametrize("call", ["run.make_plan(train_loader, ...)", "run.batches(train_loader)"])
@pytest.mark.parametrize("loader", [DataLoader(TensorDataset(torch.ones(2))), [1], None])
def test_loader_of_another_kind_is_refused(loader: Any, call: str) -> None:
    """Torch's own loader has no place in the order of a run."""
    with pytest.raises(UserError) as error:
        training_order_of(loader, call)
    name = call.partition("(")[0]
    problem = f"{name} got a value of type {type(loader).__name__} instead of a loader of the run"
    assert error.value.problem == problem
