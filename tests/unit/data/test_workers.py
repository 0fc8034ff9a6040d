"""Worker processes: they stay, open files themselves, and their batches are moved ahead."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.data import workers as module
from common.data.batch import Batch, Samples
from common.data.images import ImageSamples
from common.data.loader import Loader
from common.data.order import EvaluationOrder, TrainingOrder
from common.data.transport import by_path
from tests.cuda_stand_in import Cuda
from tests.unit.data.test_loader import CPU, GPU, assert_same, samples, training_batches


class Where(Samples):
    """Samples that say which process made their batch."""

    def __len__(self) -> int:
        return 103

    def fetch(self, samples: torch.Tensor, epoch: int | None) -> Batch:
        """Return the process of each sample, its number and a draw."""
        process = torch.full((len(samples),), os.getpid())
        return {"process": process, "samples": samples, "noise": torch.rand(len(samples))}


def test_workers_stay_over_epochs_and_evaluations() -> None:
    """The same processes make all batches, those after an epoch that was left early too."""
    training = Loader(Where(), TrainingOrder(103, 8, 1, 1, 0, seed=3), CPU, "workers", 2)
    evaluation = Loader(Where(), EvaluationOrder(103, 10, 1, 0), CPU, "workers", 1)
    passes: list[list[Batch]] = [[], []]
    for epoch in (0, 1, 0):
        batches = [batch for batch, _ in itertools.islice(training.epoch(epoch), 5 + 10 * epoch)]
        passes[0] += batches
        passes[1] += evaluation
        again = Loader(Where(), training.order, CPU, "workers", 0).epoch(epoch)
        for batch, (expected, _) in zip(batches, again, strict=False):
            assert all(torch.equal(batch[name], expected[name]) for name in ("samples", "noise"))
    used = [{*torch.cat([b["process"] for b in batches]).tolist()} for batches in passes]
    assert [len(processes) for processes in used] == [2, 1]
    assert os.getpid() not in used[0] | used[1]
    alive = {child.pid for child in multiprocessing.active_children()}
    assert used[0] | used[1] <= alive
    training.close()
    evaluation.close()
    assert not (used[0] | used[1]) & {child.pid for child in multiprocessing.active_children()}


def mapped(folder: Path) -> ImageSamples:
    """Return images that lie in files."""
    split, arrays = samples(), []
    for name in ("images", "labels"):
        np.save(folder / f"{name}.npy", getattr(split, name))
        arrays.append(np.load(folder / f"{name}.npy", mmap_mode="r"))
    made = ImageSamples(arrays[0], arrays[1], split.mean, split.std, split.dtype)
    made.flip, made.crop_padding = True, 2
    return made


def test_workers_that_are_spawned_open_the_files_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are handed paths, not arrays, and make the same batches."""
    default: Any = multiprocessing.context._default_context  # type: ignore[attr-defined]
    monkeypatch.setattr(default, "_actual_context", multiprocessing.get_context("spawn"))
    loader = Loader(mapped(tmp_path), TrainingOrder(103, 8, 1, 1, 0, seed=3), CPU, "workers", 1)
    made, others = loader.epoch(2), multiprocessing.active_children()
    batches = [next(made)[0]]
    workers: list[Any] = [w for w in multiprocessing.active_children() if w not in others]
    assert [worker._popen.method for worker in workers] == ["spawn"]
    batches += [batch for batch, _ in made]
    loader.close()
    assert_same(batches, training_batches("device", 0))


def test_memory_maps_travel_as_paths(tmp_path: Path) -> None:
    """Small, and the same when opened again; a part of one as its values."""
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


def test_batches_are_copied_while_the_one_before_is_used(cuda: Cuda) -> None:
    """On a stream of their own; each is whole when it is handed out, and not one too early."""
    cuda.send(module)
    made = [{"x": torch.full((3,), float(number))} for number in range(1, 4)]
    given = []
    for batch in module.moved(iter(made), GPU):
        given.append(batch["x"].tolist())
        late = [stream.late for stream in cuda.streams[1:]]
        assert [len(works) for works in late] == [1 if len(given) < 3 else 0]
    assert given == [[1.0] * 3, [2.0] * 3, [3.0] * 3]
    # What was made on the side stream is kept until that of training is done with it.
    assert cuda.events.count(("recorded", 0)) == 3
