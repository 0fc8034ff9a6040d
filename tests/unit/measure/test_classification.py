"""Figures of a classification, with a confusion matrix and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator

from common.measure.classification import ClassificationSums
from tests.ranks import alone


def evaluated(predicted: list[int], labels: list[int], classes: int, size: int) -> dict[str, float]:
    """Evaluate predictions in batches of `size`, with a loss of 1, 2, … for each batch."""
    sums = ClassificationSums(alone(), [str(index) for index in range(classes)])
    pairs = zip(torch.tensor(predicted).split(size), torch.tensor(labels).split(size), strict=True)
    for number, (guesses, truth) in enumerate(pairs, start=1):
        logits = torch.nn.functional.one_hot(guesses, classes).float()
        sums.add(torch.tensor(float(number)), logits, truth)
    return sums.result()


def test_evaluation_weighs_each_sample_equally() -> None:
    """A smaller last batch counts by its samples, not as a batch."""
    result = evaluated([0, 1, 2, 0, 1], [0, 1, 2, 1, 1], classes=3, size=4)
    assert result["loss"] == pytest.approx((4 * 1 + 1 * 2) / 5)
    assert result["accuracy"] == pytest.approx(0.8)
    assert result["count"] == 5


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_class_figures_match_scikit_learn(classes: int) -> None:
    """With two classes, F1 is that of the second, as in GLUE. With more, it is the mean."""
    from sklearn.metrics import f1_score, precision_recall_fscore_support

    generator = torch.Generator().manual_seed(classes)
    labels = torch.randint(0, classes, (97,), generator=generator).tolist()
    predicted = torch.randint(0, classes, (97,), generator=generator).tolist()
    result: Any = evaluated(predicted, labels, classes, size=10)
    name, average = ("f1", "binary") if classes == 2 else ("macro_f1", "macro")
    assert result[name] == pytest.approx(f1_score(labels, predicted, average=average))
    expected = zip(*precision_recall_fscore_support(labels, predicted), strict=True)
    for (_, *class_figures), figures in zip(result.by_class(), expected, strict=True):
        assert class_figures == pytest.approx([*map(float, figures)])
    assert evaluated([0, 0], [1, 1], 2, 2)["f1"] == 0


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
