"""Batches: the same from memory and from workers, augmented by sample and epoch alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from common.config import TrainingConfig
from common.data import loader as loader_module
from common.data.image_batches.image_samples import CachedImages
from common.data.image_batches.shifts import reflected
from common.data.loader import NO_SIGNALS, Loader
from common.data.order import EvaluationOrder, TrainingOrder
from common.data.run_loaders import evaluation_order, make_loaders, training_order
from common.data.samples import Batch
from common.data.stored_samples import TensorSamples
from common.errors import UserError
from common.run_directory.model_records import ImageFormat
from common.system.devices import to_device
from tests.cuda_stand_in import Cuda

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def samples(count: int = 103, size: int = 8, channels: int = 3) -> CachedImages:
    """Return random images, which training shifts and mirrors."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (count, size, size, channels), dtype=np.uint8)
    labels = np.arange(count) % 5
    mean = [0.5] * channels
    std = [0.25] * channels
    image_format = ImageFormat(channels=channels, image_size=size, mean=mean, std=std)
    split = CachedImages(images, labels, image_format, torch.float32)
    split.flip = True
    split.max_shift = 2
    return split


def training_batches(
    placement: Literal["device", "workers"],
    workers: int,
    split: tuple[int, int, int] = (8, 1, 1),
    rank: int = 0,
    first_update: int = 0,
) -> list[Batch]:
    """Return the batches of epoch 2 for one rank."""
    order = TrainingOrder(103, *split, rank, seed=3)
    loader = Loader(samples(), order, CPU, placement, workers)
    return [batch for batch, _ in loader.epoch(2, first_update)]


def assert_same(first: list[Batch], second: list[Batch]) -> None:
    """Check that batches agree to the last bit."""
    assert len(first) == len(second) > 0
    for batch, other in zip(first, second, strict=True):
        assert batch.keys() == other.keys() == {"images", "labels"}
        assert all(torch.equal(batch[name], other[name]) for name in batch)


@pytest.mark.parametrize("size", [103, 7])
def test_kernels_are_not_tuned_for_a_smaller_last_batch(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a batch comes once per evaluation. The setting is restored after each evaluation."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    loader = Loader(samples(size), EvaluationOrder(size, 10, 1, 0, lengths=None), CPU, "device")
    for _ in range(2):
        tuned = [(len(batch["labels"]), torch.backends.cudnn.benchmark) for batch in loader]
        assert tuned == [(10, True)] * (size // 10) + [(size % 10, False)]
        assert torch.backends.cudnn.benchmark
    for _ in loader:
        break
    assert torch.backends.cudnn.benchmark


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_and_device_make_the_same_batches(workers: int) -> None:
    """Augmentation is included."""
    assert_same(training_batches("device", 0), training_batches("workers", workers))


@pytest.mark.parametrize("gather_bytes", [1, 5_000, 10**9])
def test_gathering_several_batches_changes_nothing(
    gather_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many batches one gather makes affects the speed only."""
    expected = training_batches("device", 0)
    monkeypatch.setattr(loader_module, "GATHER_BYTES_OF_CPU", gather_bytes)
    assert_same(training_batches("device", 0), expected)


def test_augmentation_does_not_depend_on_micro_batches() -> None:
    """An image is shifted and mirrored alike in micro-batches of two ranks and in one batch."""
    whole = torch.cat([batch["images"] for batch in training_batches("device", 0)])
    ranks = [training_batches("device", 0, (2, 2, 2), rank) for rank in range(2)]
    micro = [batch["images"] for pair in zip(*ranks, strict=True) for batch in pair]
    assert torch.equal(torch.cat(micro), whole)


def test_seeking_gives_the_rest_of_the_epoch() -> None:
    """From an update on, the loader yields what an uninterrupted epoch yields."""
    assert_same(training_batches("device", 0, first_update=5), training_batches("device", 0)[5:])


def test_augmentation_differs_by_epoch() -> None:
    """An image is augmented differently in each epoch, and in the same way within an epoch."""
    split = samples()
    split.place(CPU)
    chosen = torch.arange(100)
    first = split.gather(chosen, 0)["images"]
    again = split.gather(chosen, 0)["images"]
    later = split.gather(chosen, 1)["images"]
    assert torch.equal(first, again)
    same = (first == later).flatten(1).all(1).float().mean()
    assert same < 0.1


def test_evaluation_is_not_augmented() -> None:
    """Evaluation has each image as it is, once, in order."""
    split = samples()
    loader = Loader(split, EvaluationOrder(103, 10, 1, 0, lengths=None), CPU, "device")
    batches = list(loader)
    assert [len(batch["labels"]) for batch in batches] == [10] * 10 + [3]
    images = torch.cat([batch["images"] for batch in batches])
    expected = (torch.from_numpy(split.images).float() / 255 - 0.5) / 0.25
    torch.testing.assert_close(images, expected.permute(0, 3, 1, 2))
    assert torch.cat([batch["labels"] for batch in batches]).tolist() == split.labels.tolist()


def test_augmentation_makes_all_shifts_and_mirrors() -> None:
    """Each image is one of the 18 versions, and all versions are about equally frequent."""
    split = samples(count=4000, size=6, channels=1)
    split.images[:] = split.images[0]
    split.flip = True
    split.max_shift = 1
    split.place(CPU)
    augmented = (
        split.gather(torch.arange(4000), 7)["images"].mul(0.25).add(0.5).mul(255).round().byte()
    )
    padded = np.pad(split.images[0, :, :, 0], 1, mode="reflect")
    versions = {}
    for top in range(3):
        for left in range(3):
            crop = padded[top : top + 6, left : left + 6]
            versions[crop.tobytes()] = (top, left, False)
            # An image is mirrored first and then shifted.
            mirrored = np.pad(split.images[0, :, ::-1, 0], 1, mode="reflect")
            versions[mirrored[top : top + 6, left : left + 6].tobytes()] = (top, left, True)
    counts: dict[tuple[int, int, bool], int] = {}
    for image in augmented[:, 0].numpy():
        version = versions[image.tobytes()]
        counts[version] = counts.get(version, 0) + 1
    assert len(counts) == 18
    assert min(counts.values()) > 4000 / 18 / 1.6
    assert max(counts.values()) < 4000 / 18 * 1.6


@pytest.mark.parametrize("seed", [0, 5])
def test_mirroring_alternates_between_epochs(seed: int) -> None:
    """Any two epochs in a row show an image from both sides; chance decides which comes first."""
    split = samples(count=1000, size=2, channels=1)
    split.flip = True
    split.max_shift = 0
    split.seed = seed
    split.place(CPU)
    everyone = torch.arange(1000)
    plain = split.gather(everyone, None)["images"]
    are_mirrored = []
    for epoch in range(4):
        images = split.gather(everyone, epoch)["images"]
        is_mirrored = (images != plain).flatten(1).any(1)
        assert torch.equal(
            images, torch.where(is_mirrored[:, None, None, None], plain.flip(3), plain)
        )
        are_mirrored.append(is_mirrored)
    assert 430 < are_mirrored[0].sum() < 570
    assert torch.equal(are_mirrored[1], ~are_mirrored[0])
    assert torch.equal(are_mirrored[2], are_mirrored[0])
    assert torch.equal(are_mirrored[3], are_mirrored[1])


def test_reflection_matches_numpy() -> None:
    """Positions outside the image are mirrored at its border, which is not repeated."""
    positions = torch.arange(-3, 8)
    expected = np.pad(np.arange(5), 3, mode="reflect")
    assert reflected(positions, 5).tolist() == expected.tolist()


def test_batches_have_the_data_type_of_the_model() -> None:
    """Images are channels-last in memory."""
    split = samples()
    split.dtype = torch.bfloat16
    split.place(CPU)
    images = split.gather(torch.arange(4), 0)["images"]
    assert images.dtype == torch.bfloat16
    assert images.shape == (4, 3, 8, 8)
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_loader_leaves_random_generators_alone() -> None:
    """Making batches draws nothing from the generator that dropout uses."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    training_batches("workers", 0)
    training_batches("device", 0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("fits", "placement"), [(True, "device"), (False, "workers")])
def test_placement_depends_on_free_memory(
    fits: bool, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` keeps samples on the device if they take less than half of its free memory."""
    split = samples()
    free = split.num_bytes * (3 if fits else 1)
    monkeypatch.setattr("common.data.loader.free_memory_bytes", lambda _: free)
    loader = Loader(split, EvaluationOrder(103, 10, 1, 0, lengths=None), CPU, "auto", 1)
    assert loader.placement == placement
    assert loader.num_workers == (0 if fits else 1)


@pytest.mark.parametrize(("share", "placed"), [(0.4, 2), (0.6, 1)])
def test_placed_splits_share_free_memory(
    share: float, placed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` places a split only if it fits beside the splits before it."""
    splits = {"train": samples(), "test": samples()}
    free = 2 * splits["train"].num_bytes / share
    monkeypatch.setattr("common.data.run_loaders.free_memory_bytes", lambda _: free)
    accelerator: Any = SimpleNamespace(num_processes=1, process_index=0, device=CPU, mesh=None)
    loaders = make_loaders(TrainingConfig(batch_size=8), accelerator, splits, signals=NO_SIGNALS)
    placements = [loader.placement for loader in loaders.values()]
    assert placements == ["device"] * placed + ["workers"] * (2 - placed)
    assert loaders["train"].placed_bytes == splits["train"].num_bytes


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16])
@pytest.mark.parametrize("accumulation", [1, 8])
@pytest.mark.parametrize("processes", [1, 2])
def test_run_that_only_evaluates_needs_no_samples_for_an_update(
    count: int, accumulation: int, processes: int
) -> None:
    """It makes a training loader, too, whose updates are as small as need be."""
    accelerator: Any = SimpleNamespace(num_processes=processes, process_index=0)
    config = TrainingConfig(
        batch_size=8, gradient_accumulation_steps=accumulation, evaluate_only=True
    )
    order = training_order(config, accelerator, TensorSamples(x=torch.zeros(count)))
    assert order.updates_per_epoch >= 1
    fits = 8 * accumulation * processes <= count
    assert (order.batch_size, order.accumulation) == (8, accumulation) or not fits


def test_data_larger_than_free_memory_are_refused(cuda: Cuda) -> None:
    """The message gives both sizes before torch runs out of memory."""
    split = samples()
    split.num_bytes = 3 * 2**20
    cuda.free = 2 * 2**20
    with pytest.raises(UserError) as error:
        Loader(split, EvaluationOrder(103, 10, 1, 0, lengths=None), GPU, "device")
    assert (
        "take 3 MiB, but only 2 MiB are free: pass --data-placement workers" in error.value.message
    )


@pytest.mark.parametrize(
    ("count", "advice"),
    [
        (3, "add samples to this split, or start fewer processes"),
        (9, "add samples to this split, raise --batch-size, or start fewer processes"),
    ],
)
def test_split_too_small_for_a_sharded_model_is_refused(count: int, advice: str) -> None:
    """A larger batch only helps if each process has a sample."""
    sharded: Any = SimpleNamespace(num_processes=8, process_index=0, mesh=object())
    with pytest.raises(UserError, match="too few to give each of the 8 processes") as refused:
        evaluation_order(TrainingConfig(batch_size=1), sharded, "test", samples(count))
    assert refused.value.advice == advice
    if "--batch-size" in advice:
        evaluation_order(TrainingConfig(batch_size=2), sharded, "test", samples(count))


def test_indices_for_a_gpu_are_pinned(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """One gather covers an epoch of small images, and the host does not wait for its indices."""
    split = samples()
    order = TrainingOrder(103, 8, 1, 1, 0, seed=3)
    split.place(CPU)
    monkeypatch.setattr(split, "place", lambda device: None)
    sent = []

    def to(values: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        sent.append((values.numel(), device.type, non_blocking))
        return values

    loader = Loader(split, order, GPU, "device")
    assert loader.batches_per_gather > 1000
    monkeypatch.setattr(torch.Tensor, "to", to)
    assert torch.equal(to_device(torch.arange(96), GPU), torch.arange(96))
    assert sent == [(96, "cuda", True)]
    assert cuda.events == [("pinned", (96,))]
