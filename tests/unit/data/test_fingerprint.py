"""Fingerprints: they differ if and only if the contents differ."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from common.data.dataset import Data, DatasetSamples
from common.data.images import load_images
from common.data.samples import Samples
from common.data.sources import find_named
from common.data.stored_samples import TensorSamples
from common.data.versions import fingerprint
from tests.launch import REPOSITORY


class Rows(Dataset[Any]):
    """A map-style data set of images and labels."""

    def __init__(self, images: np.ndarray) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.images[index], "label": int(index % 3), "name": f"é{index}"}


class Noisy(Rows):
    """Random samples from the generators that are seeded for each sample."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.images[index] + torch.rand(4).numpy() + random.random()}


class Own(Samples):
    """Samples without files and rows."""

    def __init__(self, images: np.ndarray) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def fetch(self, indices: torch.Tensor, epoch: int | None) -> Any:
        return {"images": torch.from_numpy(self.images)[indices]}


def hugging_face(images: np.ndarray) -> Any:
    from datasets import Dataset as TableDataset

    return TableDataset.from_dict({"image": images.tolist()})


MADE: list[Callable[[np.ndarray], Any]] = [
    lambda images: TensorSamples(images=images),
    lambda images: TensorSamples(images=torch.from_numpy(images).bfloat16()),
    Rows,
    Noisy,
    Own,
    hugging_face,
]


@pytest.mark.parametrize("make", MADE)
def test_inverted_pixels_change_the_fingerprint(make: Callable[[np.ndarray], Any]) -> None:
    """Earlier random draws do not, and taking a fingerprint draws nothing."""
    images = np.random.default_rng(0).integers(0, 255, (40, 4)).astype(np.float32)
    fingerprints = []
    for pixels in (images, 255 - images, images):
        splits = {"train": make(pixels), "test": make(images)}
        torch.rand(len(fingerprints) + 1)
        states = torch.get_rng_state(), random.getstate()
        fingerprints.append(Data("mine", splits).facts().fingerprint)
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
    assert fingerprints[0] == fingerprints[2] != fingerprints[1]


def test_fingerprint_of_digits_is_the_published_one() -> None:
    """A run that was published with an earlier version of this library had the same data."""
    run = REPOSITORY / "benchmarks" / "results" / "mnist_mlp_digits" / "seed-0"
    published = json.loads((run / "config.json").read_text())["data"]
    data = load_images(
        find_named("digits", None),
        image_size=None,
        image_column=None,
        label_column=None,
        dtype=torch.float32,
    )
    assert data.facts().sizes == published["sizes"]
    assert data.facts().fingerprint == published["fingerprint"]


def test_one_changed_value_changes_the_fingerprint() -> None:
    """One changed value, shape, type or name changes the fingerprint."""
    values = np.zeros((500, 4), np.float32)
    changed = values.copy()
    changed[321, 2] = 1
    others = [changed, values[:-1], values.astype(np.float16), values.reshape(500, 2, 2)]
    whole = TensorSamples(x=values).fingerprint()
    assert whole not in [TensorSamples(x=other).fingerprint() for other in others]
    assert whole != TensorSamples(y=values).fingerprint()


def test_large_arrays_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last row are always among the sampled rows."""
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 100)
    values = np.zeros((5000, 4), np.float32)
    whole = TensorSamples(x=values).fingerprint()
    for row in (0, -1):
        other = values.copy()
        other[row] = 1
        assert TensorSamples(x=other).fingerprint() != whole
    assert TensorSamples(x=1 - values).fingerprint() != whole


class Unseeded(Rows):
    """Rows from a generator that nothing seeds."""

    generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        return self.generator.normal(size=3)


class Failing(Rows):
    """Rows that only a worker can read."""

    def __getitem__(self, index: int) -> Any:
        raise RuntimeError("no worker")


class Foreign(Rows):
    """Rows of objects whose contents are unknown."""

    def __getitem__(self, index: int) -> Any:
        return object()


@pytest.mark.parametrize("dataset_class", [Unseeded, Failing, Foreign])
def test_split_with_unknown_contents_is_named(dataset_class: type[Rows]) -> None:
    """A split without a fingerprint is named; its author can state one for it or for all data."""
    images = np.zeros((40, 4))
    facts = Data("mine", {"train": dataset_class(images), "test": Rows(images)}).facts()
    assert facts.unknown_contents == ["train"]
    assert facts.fingerprint is not None
    with_fingerprint = dataset_class(images)
    with_fingerprint.fingerprint = "by hand"  # type: ignore[attr-defined]
    assert DatasetSamples(with_fingerprint).fingerprint() == "by hand"
    facts = Data(
        "mine", {"train": dataset_class(images), "test": Rows(images)}, fingerprint="a"
    ).facts()
    assert (facts.fingerprint, facts.unknown_contents) == ("a", None)
