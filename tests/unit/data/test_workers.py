"""Worker processes: they stay, open files themselves, and their batches are moved ahead."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
from collections import UserDict
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.data.image_batches.image_samples import CachedImages
from common.data.loader import Loader
from common.data.order import EvaluationOrder, TrainingOrder
from common.data.samples import Batch, Samples
from common.data.workers import device_copies
from common.data.workers import pool as module
from common.data.workers.transport import by_path
from tests.cuda_stand_in import Cuda
from tests.unit.data.test_loader import CPU, GPU, assert_same, samples, training_batches


class Where(Samples):
    """Samples whose batches tell which process made them."""

    def __len__(self) -> int:
        return 103

    def fetch(self, indices: torch.Tensor, epoch: int | None) -> Batch:
        """Return the process of each sample, its number and a draw."""
        process = torch.full((len(indices),), os.getpid())
        return {"process": process, "indices": indices, "noise": torch.rand(len(indices))}


def process_ids(batches: list[Batch]) -> set[int]:
    """Return the processes that made some batches of `Where`."""
    return set(torch.cat([batch["process"] for batch in batches]).tolist())


class Kept(Samples):
    """Samples whose batches tell whether their process keeps freed memory."""

    def __len__(self) -> int:
        return 8

    def fetch(self, indices: torch.Tensor, epoch: int | None) -> Batch:
        """Return 1 for each sample if freed memory is kept, and 0 otherwise."""
        return {"kept": torch.full((len(indices),), int(module.HEAP.is_kept))}


@pytest.mark.skipif(module.HEAP.library is None, reason="only glibc can keep freed memory")
def test_workers_do_not_keep_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them would keep its largest batch until the end of the run."""
    monkeypatch.setattr(module.HEAP, "is_kept", True)
    for count, expected in ((0, 1), (1, 0)):
        loader = Loader(Kept(), EvaluationOrder(8, 8, 1, 0, lengths=None), CPU, "workers", count)
        (batch,) = loader
        assert batch["kept"].tolist() == [expected] * 8
        loader.close()


def test_workers_stay_for_all_epochs_and_evaluations() -> None:
    """The same processes make all batches, even after an epoch that was left early."""
    training = Loader(Where(), TrainingOrder(103, 8, 1, 1, 0, seed=3), CPU, "workers", 2)
    evaluation = Loader(Where(), EvaluationOrder(103, 10, 1, 0, lengths=None), CPU, "workers", 1)
    training_batches: list[Batch] = []
    evaluation_batches: list[Batch] = []
    for epoch in (0, 1, 0):
        batches = [batch for batch, _ in itertools.islice(training.epoch(epoch), 5 + 10 * epoch)]
        training_batches += batches
        evaluation_batches += evaluation
        again = Loader(Where(), training.order, CPU, "workers", 0).epoch(epoch)
        for batch, (expected, _) in zip(batches, again, strict=False):
            assert all(torch.equal(batch[name], expected[name]) for name in ("indices", "noise"))
    training_workers = process_ids(training_batches)
    evaluation_workers = process_ids(evaluation_batches)
    assert len(training_workers) == 2
    assert len(evaluation_workers) == 1
    all_workers = training_workers | evaluation_workers
    assert os.getpid() not in all_workers
    assert all_workers <= {child.pid for child in multiprocessing.active_children()}
    training.close()
    evaluation.close()
    assert not all_workers & {child.pid for child in multiprocessing.active_children()}


def mapped(folder: Path) -> CachedImages:
    """Return images whose arrays are memory maps of files."""
    split = samples()
    arrays = []
    for name in ("images", "labels"):
        np.save(folder / f"{name}.npy", getattr(split, name))
        arrays.append(np.load(folder / f"{name}.npy", mmap_mode="r"))
    mapped_split = CachedImages(arrays[0], arrays[1], split.image_format, split.dtype)
    mapped_split.flip = True
    mapped_split.max_shift = 2
    return mapped_split


def test_spawned_workers_open_the_files_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They receive paths instead of arrays, and make the same batches."""
    default: Any = multiprocessing.context._default_context  # type: ignore[attr-defined]
    monkeypatch.setattr(default, "_actual_context", multiprocessing.get_context("spawn"))
    loader = Loader(mapped(tmp_path), TrainingOrder(103, 8, 1, 1, 0, seed=3), CPU, "workers", 1)
    epoch = loader.epoch(2)
    earlier_children = multiprocessing.active_children()
    batches = [next(epoch)[0]]
    workers: list[Any] = [w for w in multiprocessing.active_children() if w not in earlier_children]
    assert [worker._popen.method for worker in workers] == ["spawn"]
    batches += [batch for batch, _ in epoch]
    loader.close()
    assert_same(batches, training_batches("device", 0))


def test_memory_maps_are_pickled_as_paths(tmp_path: Path) -> None:
    """The pickle is small and opens the same array. A part of a map is pickled by value."""
    ForkingPickler.register(np.memmap, by_path)
    assert len(ForkingPickler.dumps(mapped(tmp_path))) < 3000
    whole = np.load(tmp_path / "images.npy", mmap_mode="r")
    for array in (whole, whole[3:5], np.asfortranarray(whole[:2])):
        again = pickle.loads(ForkingPickler.dumps(array))
        assert np.array_equal(array, again)
    assert pickle.loads(ForkingPickler.dumps(whole)).filename == whole.filename
    for order in ("C", "F"):
        path = tmp_path / "new"
        new: np.memmap = np.memmap(path, np.int32, "w+", 64, (3, 4), order)  # type: ignore[call-overload]
        new[:] = np.arange(12).reshape(3, 4)
        again = pickle.loads(ForkingPickler.dumps(new))
        assert np.array_equal(new, again)
        assert again[2, 3] == 11


def test_next_batch_is_copied_while_training_uses_the_last(cuda: Cuda) -> None:
    """Copies have a stream of their own, and each batch is whole when it is handed out."""
    cuda.send(device_copies)
    batches = [{"x": torch.full((3,), float(number))} for number in range(1, 4)]
    received = []
    for batch in device_copies.copied_to_device(iter(batches), GPU):
        received.append(batch["x"].tolist())
        late = [stream.late for stream in cuda.streams[1:]]
        assert [len(works) for works in late] == [1 if len(received) < 3 else 0]
    assert received == [[1.0] * 3, [2.0] * 3, [3.0] * 3]
    # A batch from the side stream is kept until the stream of training is done with it.
    assert cuda.events.count(("recorded", 0)) == 3


class Graph:
    """A batch with tensors in attributes, which copies itself to a device."""

    def __init__(self, nodes: torch.Tensor):
        self.nodes = nodes
        self.name = "graph"

    def to(self, device: torch.device) -> Graph:
        return Graph(self.nodes.to(device))


class RecordedGraph(Graph):
    """A batch that also records the stream itself."""

    def record_stream(self, stream: torch.Stream) -> None:
        self.nodes.record_stream(stream)


@pytest.mark.parametrize(
    "nest",
    [
        lambda x: x,
        lambda x: [{"boxes": x, "names": ["a"]}, 3],
        lambda x: UserDict(x=(x,)),
        lambda x: Graph(x),
        lambda x: {"graph": RecordedGraph(x)},
    ],
    ids=["tensor", "nest", "user dict", "object", "object that records"],
)
def test_memory_of_each_tensor_is_kept_for_training(
    nest: Callable[[torch.Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next copy could overwrite a batch that training still uses."""
    recorded = []
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: recorded.append((tensor, stream))
    )
    values = torch.ones(2)
    stream: Any = "training"
    device_copies.record_stream(nest(values), stream)
    assert [(id(tensor), used) for tensor, used in recorded] == [(id(values), stream)]
