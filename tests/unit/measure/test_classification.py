"""Figures of a classification, with a confusion matrix and without."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator

from common.measure.classification import ClassificationSums


@pytest.mark.usefixtures("own_accelerator")
@pytest.mark.parametrize("classes", [2, 3, 40])
def test_class_counts_give_the_figures_of_a_confusion_matrix(
    classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many classes, counts of each class replace the matrix."""
    generator = torch.Generator().manual_seed(classes)
    logits = torch.randn(90, classes, generator=generator)
    labels = torch.randint(classes, (90,), generator=generator)
    names = [str(number) for number in range(classes)]
    results = []
    for most in (500, 1):
        monkeypatch.setattr(ClassificationSums, "MAX_CLASSES", most)
        sums = ClassificationSums(Accelerator(cpu=True), names)
        for part in (slice(0, 50), slice(50, 90)):
            sums.add(torch.tensor(0.5), logits[part], labels[part])
        results.append(sums.result())
    whole, counted = results
    assert whole == counted
    assert whole.by_class() == counted.by_class()
    assert whole.confusion is not None
    assert counted.confusion is None


@pytest.mark.usefixtures("own_accelerator")
def test_100_000_classes_take_little_memory() -> None:
    """A matrix would take 80 GB."""
    sums = ClassificationSums(Accelerator(cpu=True), [str(n) for n in range(100_000)])
    logits = torch.zeros(4, 100_000)
    logits[range(4), [5, 6, 7, 99_999]] = 1
    sums.add(torch.tensor(2.0), logits, torch.tensor([5, 6, 8, 99_999]))
    result = sums.result()
    assert (result["loss"], result["accuracy"], result["count"]) == (2.0, 0.75, 4)
    assert result["macro_f1"] == pytest.approx(3 / 100_000)
