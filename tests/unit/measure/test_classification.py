"""Figures of a classification, with a confusion matrix and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator

from common.errors import UserError
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


@pytest.mark.parametrize("absent", [1, 2, 4])
def test_macro_f1_leaves_out_absent_classes_as_scikit_learn_does(absent: int) -> None:
    """A class counts if samples have it or are predicted to have it, and otherwise not at all."""
    from sklearn.metrics import f1_score

    generator = torch.Generator().manual_seed(absent)
    labels = torch.randint(0, 7 - absent, (97,), generator=generator)
    for offset in (0, 1):  # with 1, one of the classes is only predicted
        predicted = (labels + torch.randint(0, 2, (97,), generator=generator) * offset).tolist()
        result = evaluated(predicted, labels.tolist(), 7, size=10)
        expected = f1_score(labels.tolist(), predicted, average="macro")
        assert result["macro_f1"] == pytest.approx(expected)


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
    assert result["macro_f1"] == pytest.approx(3 / 5)  # five classes occur


@pytest.mark.parametrize(
    ("logits", "labels", "dtype"),
    [
        ((4, 6, 3), (4, 6), torch.long),  # a class for each token
        ((4, 3, 8, 8), (4, 8, 8), torch.long),  # a class for each pixel
        ((4, 3), (5,), torch.long),
        ((4, 3), (4, 1), torch.long),
        ((4, 3), (4,), torch.float32),
        ((4, 5), (4,), torch.long),  # more outputs than classes
        ((4, 1), (4,), torch.long),
        ((3,), (), torch.long),
        ((), (), torch.long),
    ],
)
def test_other_shapes_and_types_are_refused(
    logits: tuple[int, ...], labels: tuple[int, ...], dtype: torch.dtype
) -> None:
    """The message names what it got, and what to pass."""
    sums = ClassificationSums(alone(), ["a", "b", "c"])
    with pytest.raises(UserError, match=r"logits \[n, classes\] and integer labels") as refused:
        sums.add(torch.tensor(1.0), torch.zeros(logits), torch.zeros(labels, dtype=dtype))
    got = f"logits {[*logits]} and labels {[*labels]} of type {str(dtype)[6:]} for 3 classes"
    assert got in refused.value.problem


@pytest.mark.parametrize("most_classes_of_a_matrix", [500, 1])
@pytest.mark.parametrize("labels", [[0, -100, 2], [0, 1, 3], [-1, 7, 0], [1, 2, 0]])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_labels_out_of_range_are_refused(
    labels: list[int], size: int, most_classes_of_a_matrix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the smallest and the largest label of all batches."""
    monkeypatch.setattr(ClassificationSums, "MAX_CLASSES", most_classes_of_a_matrix)
    if {*labels} <= {0, 1, 2}:
        assert evaluated([0, 1, 2], labels, 3, size)["count"] == 3
        return
    message = f"labels from {min(labels)} to {max(labels)} for 3 classes: pass logits"
    with pytest.raises(UserError, match=message):
        evaluated([0, 1, 2], labels, 3, size)


def test_data_without_class_names_are_named() -> None:
    """`Data` needs no class names, so a recipe may pass on None."""
    with pytest.raises(UserError) as error:
        ClassificationSums(Accelerator(), None)
    assert error.value.problem == "ClassificationSums got None instead of the names of the classes"
    assert "class_names=" in error.value.advice


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.bool])
@pytest.mark.parametrize("most_classes_of_a_matrix", [500, 1])
def test_integers_of_any_type_are_labels(
    dtype: torch.dtype, most_classes_of_a_matrix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small type must not overflow in the index of the confusion matrix."""
    monkeypatch.setattr(ClassificationSums, "MAX_CLASSES", most_classes_of_a_matrix)
    size = 2 if dtype == torch.bool else 200
    sums = ClassificationSums(alone(), [str(index) for index in range(size)])
    labels = torch.tensor([size - 1, 0, 1, size // 2])
    sums.add(torch.tensor(1.0), torch.eye(size)[labels], labels.to(dtype))
    sums.add(torch.tensor(1.0), torch.zeros(0, size), labels[:0].to(dtype))
    assert sums.result()["count"] == 4
