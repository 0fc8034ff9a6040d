"""Workers that stop, hang, or lack shared memory: the same batches, or an error that says why."""

from __future__ import annotations

import errno
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils import _pytree as tree
from torch.utils.data import IterableDataset

from common.data.dataset import DatasetSamples
from common.data.iterable import IterableOrder, IterableSamples
from common.data.loader import Loader
from common.data.order import TrainingOrder
from common.data.samples import Batch, Samples
from common.data.workers import pool as module
from common.data.workers import watch
from common.errors import LostProcessError, UserError
from tests.conftest import first
from tests.unit.data.test_loader import CPU, GPU

LOOK_EVERY = 0.3  # seconds; a worker that runs answers sooner, or is asked again


class Odd(Samples):
    """Samples whose batches have tensors of many types and layouts."""

    def __len__(self) -> int:
        return 24

    def fetch(self, indices: torch.Tensor, epoch: int | None) -> Batch:
        """Return tensors whose values and strides must arrive as they are."""
        noise = torch.rand(len(indices), 3, 5, 7)
        return {
            "half": noise.to(torch.bfloat16),
            "channels last": noise.to(memory_format=torch.channels_last),
            "part": [noise[:, 1:, ::2], (noise.transpose(1, 3),)],
            "mask": noise > 0.5,
            "scalar": torch.tensor(float(indices[0])),
            "empty": torch.empty(0, 4),
            "array": np.arange(3),
            "indices": indices,
        }


class Rows:
    """A map-style data set with random transforms, for torch's `default_collate`."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((3,), float(index)) + torch.rand(3), "y": index}


class Stream(IterableDataset[torch.Tensor]):
    """Ascending numbers, with a position that can be saved and restored."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.next += 1
            yield torch.tensor(self.next)

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position."""
        self.next = state["next"]


SAMPLES: dict[str, Callable[[], Samples]] = {
    "odd": Odd,
    "rows": lambda: DatasetSamples(Rows()),
    "stream": lambda: IterableSamples(Stream()),
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check on workers often, announce early, and forget earlier announcements."""
    monkeypatch.setattr(watch, "LOOK_EVERY", LOOK_EVERY)
    monkeypatch.setattr(watch, "NOTICE_AFTER", 2 * LOOK_EVERY)
    monkeypatch.setattr(module.Workers, "announced", set())


def make_loader(samples: Samples, workers: int) -> Loader:
    """Return a loader of twelve batches of two."""
    order: Any = TrainingOrder(24, 2, 1, 1, 0, seed=3)
    if isinstance(samples, IterableSamples):
        order = IterableOrder(24, 2, 1, 1, 0, 3)
    return Loader(samples, order, CPU, "workers", workers, seed=5)


def assert_same(first: Batch, second: Batch) -> None:
    """Check that values, types and strides agree to the last bit."""
    leaves, structure = tree.tree_flatten(first)
    others, other_structure = tree.tree_flatten(second)
    assert structure == other_structure
    for leaf, other in zip(leaves, others, strict=True):
        if torch.is_tensor(leaf):
            assert leaf.dtype == other.dtype
            assert leaf.stride() == other.stride()
            assert torch.equal(leaf, other)
        else:
            assert np.array_equal(leaf, other)


def own_batches(samples_name: str) -> list[Batch]:
    """Return the batches that this process makes without workers."""
    return [batch for batch, _ in make_loader(SAMPLES[samples_name](), 0).epoch(0)]


def suspend_workers(before: list[Any]) -> list[psutil.Process]:
    """Stop all workers that started since `before`, and return their processes."""
    new = [child for child in multiprocessing.active_children() if child not in before]
    stopped = [psutil.Process(child.pid) for child in new]
    for worker in stopped:
        worker.suspend()
    return stopped


@pytest.mark.slow
@pytest.mark.parametrize("device", [CPU, GPU], ids=lambda device: device.type)
@pytest.mark.parametrize("samples_name", SAMPLES)
def test_request_to_stop_is_heeded_while_workers_are_stopped(
    samples_name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process makes the remaining batches, bit for bit, and ends the workers."""
    loader = make_loader(SAMPLES[samples_name](), 2)
    before = multiprocessing.active_children()
    if device.type == "cuda":  # the next batch is fetched before this one is handed out
        monkeypatch.setattr(module, "copied_to_device", one_ahead)
    batches = []
    for batch, _ in loader.epoch(0):
        batches.append(batch)
        if len(batches) == 2:
            stopped = suspend_workers(before)
            loader.workers.is_stopping = lambda: True
    expected = own_batches(samples_name)
    assert len(batches) == len(expected)
    for batch, expected_batch in zip(batches, expected, strict=True):
        assert_same(batch, expected_batch)
    assert stopped
    assert not any(worker.is_running() for worker in stopped)


def one_ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield each batch after the next one was fetched, as on a GPU."""
    ahead = [next(batches)]
    for batch in batches:
        ahead.append(batch)
        yield ahead.pop(0)
    yield from ahead


def test_wait_for_stopped_workers_is_announced_and_times_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The notice names the stopped process. The error says that its worker was stopped."""
    loader = make_loader(Odd(), 1)
    before = multiprocessing.active_children()
    loader.workers.timeout = 5 * LOOK_EVERY
    batches = loader.epoch(0)
    next(batches)
    (stopped,) = suspend_workers(before)
    with pytest.raises(UserError) as error:
        list(batches)
    assert error.value.resumable
    assert "were stopped by a signal: start the run again" in error.value.message
    assert f"kill -CONT {stopped.pid}" in capsys.readouterr().out
    assert not stopped.is_running()


def test_killed_workers_are_gone() -> None:
    """Also one that is stopped is gone when the function returns."""
    before = multiprocessing.active_children()
    batches = make_loader(Odd(), 2).epoch(0)
    next(batches)
    stopped = suspend_workers(before)
    module.kill_workers()
    assert stopped
    assert not any(worker.is_running() for worker in stopped)


def test_workers_of_another_loader_outlive_an_error() -> None:
    """After a request to stop ended a wait for training batches, an evaluation may still be due."""
    evaluation = make_loader(Odd(), 1).epoch(0)
    first_batch = next(evaluation)[0]
    before = multiprocessing.active_children()
    training = make_loader(Odd(), 1).epoch(0)
    next(training)
    (worker,) = suspend_workers(before)
    worker.kill()
    with pytest.raises(LostProcessError):
        list(training)
    assert_same(first_batch, own_batches("odd")[0])
    rest = [batch for batch, _ in evaluation]
    assert len(rest) == len(own_batches("odd")) - 1


@pytest.mark.parametrize("killed", [0, 1])
def test_killed_worker_is_noticed_while_another_is_stopped(killed: int) -> None:
    """A killed worker is noticed even if this process waits for another, stopped one."""
    loader = make_loader(Odd(), 2)
    before = multiprocessing.active_children()
    batches = loader.epoch(0)
    next(batches)
    workers = suspend_workers(before)
    workers[killed].kill()
    with pytest.raises(LostProcessError, match="one of the loader's workers has ended"):
        list(batches)


@pytest.mark.parametrize("is_left_early", first(1, [True, False]))
def test_workers_that_stop_between_two_epochs_are_replaced(is_left_early: bool) -> None:
    """The wait between two epochs is watched, too."""
    loader = make_loader(Odd(), 2)
    before = multiprocessing.active_children()
    epoch = loader.epoch(0)
    batches = [next(epoch)[0]] if is_left_early else [batch for batch, _ in epoch]
    assert_same(batches[0], own_batches("odd")[0])
    suspend_workers(before)
    loader.workers.is_stopping = lambda: True
    batches = [batch for batch, _ in loader.epoch(0)]
    for batch, expected in zip(batches, own_batches("odd"), strict=True):
        assert_same(batch, expected)


@pytest.mark.parametrize("samples_name", SAMPLES)
def test_batches_travel_without_shared_memory(
    samples_name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a full `/dev/shm`, batches go through pipes with the same bits and strides.

    One line says so.
    """

    def fail(*unused: object, **others: object) -> Any:
        words = "unable to allocate shared memory(shm) for file </torch_1>: No space left on device"
        raise RuntimeError(words)

    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", fail)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", fail)
    monkeypatch.setattr(module, "free_shared_memory", lambda: 0)
    for _ in range(2):
        loader = make_loader(SAMPLES[samples_name](), 2)
        loader.workers.timeout = 20
        batches = [batch for batch, _ in loader.epoch(0)]
        loader.close()
        for batch, expected in zip(batches, own_batches(samples_name), strict=True):
            assert_same(batch, expected)
    assert capsys.readouterr().out.count("/dev/shm") == 1


def test_later_batch_too_large_for_shared_memory_is_announced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of text differ in size, and the first may be small."""
    monkeypatch.setattr(module.Workers, "announced", set())
    workers = make_loader(Odd(), 2).workers
    workers.free_shared_bytes = 5 * 400
    for length in (10, 100):
        workers.warn_of_small_shared_memory({"tokens": torch.zeros(length)})
        assert "shared memory" not in workers.announced
    for length in (101, 200):
        workers.warn_of_small_shared_memory({"tokens": torch.zeros(length)})
    assert capsys.readouterr().out.count("/dev/shm") == 1


OBSTACLES = {
    "read-only": OSError(errno.EROFS, "Read-only file system"),
    "missing": FileNotFoundError(errno.ENOENT, "No such file or directory"),
    "full": OSError(errno.ENOSPC, "No space left on device"),
    "few processes": BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
    "few threads": RuntimeError("can't start new thread"),
    "few descriptors": None,
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_without_workers_this_process_makes_the_batches(
    obstacle: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The batches are the same, and one line says why there are no workers."""

    def fail(*unused: object, **others: object) -> Any:
        raise OBSTACLES[obstacle]  # type: ignore[misc]

    if obstacle == "few descriptors":
        monkeypatch.setattr("common.data.workers.transport.free_descriptors", lambda: 20)
    elif obstacle == "few processes":
        monkeypatch.setattr("multiprocessing.process.BaseProcess.start", fail)
    elif obstacle == "few threads":
        monkeypatch.setattr("multiprocessing.queues.Queue._start_thread", fail)
    else:
        monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", fail)
    for _ in range(2):
        loader = make_loader(Odd(), 2)
        batches = [batch for batch, _ in loader.epoch(0)]
        for batch, expected in zip(batches, own_batches("odd"), strict=True):
            assert_same(batch, expected)
    assert capsys.readouterr().out.count("this process does their work") == 1
