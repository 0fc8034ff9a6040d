"""Splits, labels and classes of local data: read right, or refused in one clear sentence."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.data import built_in
from common.data.sources import find_named
from common.data.tables import Tables
from tests.local_data import (
    grey_images,
    sentences,
    write_csv,
    write_image_folder,
    write_image_parquet,
    write_parquet,
)
from tests.unit.data.loading import images, refusal, text


def test_share_is_held_out_beside_a_test_split(tmp_path: Path) -> None:
    """`--validation-share` holds rows of train out, and leaves the test split as it is."""
    splits = {"train": grey_images(60, 1), "test": grey_images(10, 2)}
    source = find_named(str(write_image_parquet(tmp_path / "grey", splits)), None)
    sizes, tests = [], []
    for share in (None, 0.25):
        raw = Tables(dataclasses.replace(source, validation_share=share), None)
        sizes.append({name: len(split) for name, split in raw.splits.items()})
        tests.append(raw.labels["test"].tolist())
        assert {name: len(labels) for name, labels in raw.labels.items()} == sizes[-1]
    assert sizes == [{"train": 60, "test": 10}, {"train": 45, "test": 10, "validation": 15}]
    assert tests[0] == tests[1]


def test_share_leaves_a_validation_split_alone(tmp_path: Path) -> None:
    """A data set's own validation split is never added to."""
    splits = {"train": grey_images(60, 1), "validation": grey_images(10, 2)}
    source = find_named(str(write_image_parquet(tmp_path / "grey", splits)), None)
    raw = Tables(dataclasses.replace(source, validation_share=0.5), None)
    assert {name: len(split) for name, split in raw.splits.items()} == {
        "train": 60,
        "validation": 10,
    }


def test_string_labels_and_validation_by_another_name(tmp_path: Path) -> None:
    """Labels as text become classes in order; `valid` is validation, `extra` is left alone."""
    from datasets import Features, Value
    from datasets import Image as ImageType

    features = Features({"picture": ImageType(), "label": Value("string")})
    for seed, (split, count) in enumerate({"train": 12, "valid": 6, "extra": 3}.items()):
        columns = grey_images(count, seed)
        values = {"picture": columns["image"], "label": ["zbc"[i] for i in columns["label"]]}
        write_parquet(tmp_path / "named" / f"{split}.parquet", values, features)
    data = images(tmp_path / "named")
    assert data.class_names == ["b", "c", "z"]
    assert data.splits["train"].labels[:3].tolist() == [2, 0, 1]
    assert {name: len(split) for name, split in data.splits.items()} == {
        "train": 12,
        "validation": 6,
    }


def test_whole_numbers_as_labels(tmp_path: Path) -> None:
    """Whole numbers that are no class type become classes, in the order of numbers."""
    from datasets import Features, Value
    from datasets import Image as ImageType

    columns = grey_images(24, 0)
    values = {"image": columns["image"], "label": [(10, 9, 100)[i] for i in columns["label"]]}
    features = Features({"image": ImageType(), "label": Value("int64")})
    write_parquet(tmp_path / "numbers" / "train.parquet", values, features)
    data = images(tmp_path / "numbers")
    assert data.class_names == ["9", "10", "100"]


def test_one_class_only(tmp_path: Path) -> None:
    """One class can't be told from another: refused, and said."""
    folder = write_image_folder(tmp_path / "cats", ["cat"], per_class=5)
    # A single folder is no class to `datasets`: say so by parquet.
    columns = grey_images(12, 0)
    columns["label"] = [1] * 12
    folder = write_image_parquet(tmp_path / "one", {"train": columns})
    message = refusal(lambda: images(folder))
    assert "have the same label" in message
    assert "one" in message


def test_empty_split(tmp_path: Path) -> None:
    """A split without rows is named."""
    empty: dict[str, list[Any]] = {"image": [], "label": []}
    folder = write_image_parquet(tmp_path / "gap", {"train": grey_images(12, 0), "test": empty})
    message = refusal(lambda: images(folder))
    assert "test" in message
    assert "empty" in message


def test_empty_folder(tmp_path: Path) -> None:
    """A folder without data is named."""
    (tmp_path / "nothing").mkdir()
    assert "nothing" in refusal(lambda: images(tmp_path / "nothing"))


@pytest.mark.parametrize(("classes", "per_class"), [(3, 40), (50, 4), (2, 5), (3, 1)])
def test_a_tenth_is_held_out(classes: int, per_class: int, tmp_path: Path) -> None:
    """About a tenth is held out, one row at least, also of many small classes."""
    columns = sentences(classes * per_class, 0)
    columns["label"] = [f"class {index % classes}" for index in range(classes * per_class)]
    write_csv(tmp_path / "small" / "train.csv", columns)
    raw = Tables(find_named(str(tmp_path / "small"), None), None)
    held, rest = len(raw.labels["validation"]), len(raw.labels["train"])
    assert held + rest == classes * per_class
    assert held == pytest.approx(max(1, 0.1 * classes * per_class), abs=1)


def test_truncated_parquet_file_is_named(tmp_path: Path) -> None:
    """Of several files the damaged one is named, with what to do."""
    splits = {"train": grey_images(40, 0), "validation": grey_images(9, 1)}
    folder = write_image_parquet(tmp_path / "torn", splits)
    path = folder / "train-00000-of-00001.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    message = refusal(lambda: images(folder))
    assert str(path) in message
    assert "magic bytes" in message


def two_label_columns(folder: Path) -> Path:
    """Write text with two columns of class labels, none of which is called as one."""
    from datasets import ClassLabel, Features, Value

    columns = sentences(30, 0)
    values = {
        "sentence": columns["sentence"],
        "mood": [index % 2 for index in range(30)],
        "topic": [index % 3 for index in range(30)],
    }
    moods, topics = ClassLabel(names=["bad", "good"]), ClassLabel(names=["a", "b", "c"])
    features = Features({"sentence": Value("string"), "mood": moods, "topic": topics})
    write_parquet(folder / "train.parquet", values, features)
    return folder


def test_two_label_columns_need_a_name(tmp_path: Path) -> None:
    """With two candidates the message names the flag and both; the flag decides."""
    folder = two_label_columns(tmp_path / "both")
    message = refusal(lambda: text(folder))
    assert "--label-column" in message
    assert "mood" in message
    assert "topic" in message
    assert text(folder, label_column="topic").class_names == ["a", "b", "c"]
    assert text(folder, label_column="mood").class_names == ["bad", "good"]
    message = refusal(lambda: text(folder, label_column="moood"))
    assert "moood" in message
    assert "mood" in message.replace("moood", "")


def test_real_numbers_are_no_classes(tmp_path: Path) -> None:
    """A regression target is refused, with the flag that would name another column."""
    columns: dict[str, list[Any]] = dict(sentences(20, 0))
    columns["label"] = [index / 7 for index in range(20)]
    write_csv(tmp_path / "scores" / "train.csv", columns)
    message = refusal(lambda: text(tmp_path / "scores"))
    assert "label" in message
    assert "--label-column" in message


def test_split_without_labels_is_left_out(tmp_path: Path) -> None:
    """GLUE's test splits have -1 for labels: the validation split is the one to report."""
    from datasets import ClassLabel, Features, Value

    features = Features({"sentence": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    for seed, (split, count) in enumerate({"train": 30, "validation": 8, "test": 6}.items()):
        texts = sentences(count, seed)["sentence"]
        labels = [-1] * count if split == "test" else [index % 2 for index in range(count)]
        write_parquet(
            tmp_path / "glue" / f"{split}.parquet", {"sentence": texts, "label": labels}, features
        )
    data = text(tmp_path / "glue")
    assert set(data.splits) == {"train", "validation"}
    assert any("test" in note and "6 of 6" in note for note in data.notes)


def test_class_that_only_test_has_is_counted(tmp_path: Path) -> None:
    """String labels of all splits make the classes, so that evaluation can't fail on one."""
    train, test = sentences(30, 0), sentences(9, 1)
    test["label"][0] = "weather"
    write_csv(tmp_path / "rare" / "train.csv", train)
    write_csv(tmp_path / "rare" / "test.csv", test)
    assert text(tmp_path / "rare").class_names == ["animals", "colours", "numbers", "weather"]


def test_built_in_digits_are_stratified() -> None:
    """A fifth of the 1,797 digits is held out, each class in proportion, always the same."""
    raw = Tables(find_named("digits", None), None)
    assert {name: len(labels) for name, labels in raw.labels.items()} == {
        "train": 1437,
        "test": 360,
    }
    counts = np.bincount(raw.labels["test"])
    assert counts.min() >= 34
    assert counts.max() <= 38


def test_built_in_docstrings_are_real_text() -> None:
    """The standard library gives six topics, stratified splits, and no paragraph twice."""
    raw = Tables(find_named("docstrings", None), None)
    assert len(raw.class_names) == 6
    found = [line for split in raw.splits.values() for line in split["text"][:]]
    assert len(found) == len(set(found)) > 6500
    shares = {name: np.bincount(labels) / len(labels) for name, labels in raw.labels.items()}
    for name, share in (("train", 0.6), ("validation", 0.1), ("test", 0.3)):
        assert len(raw.labels[name]) / len(found) == pytest.approx(share, abs=0.03)
        assert shares[name] == pytest.approx(shares["train"], abs=0.05)
        assert shares[name].min() > 0.05


def test_built_in_docstrings_need_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that lacks modules gives what it has, and never its own tests."""
    expected = []
    for topic, modules in built_in.TOPICS.items():
        package = tmp_path / modules.split()[-1]
        (package / "test").mkdir(parents=True)
        for row in range(10):
            expected.append(f"What row {row} of {topic} does.")
            (package / f"{row}.py").write_text(f'"""{expected[-1]}"""')
            (package / "test" / f"{row}.py").write_text(f'"""Test of {expected[-1]}"""')
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    found = built_in.docstrings()
    assert sorted(line for split in found.values() for line in split["text"][:]) == sorted(expected)


@pytest.mark.parametrize("labels", [(-1, 1), (-1, 0, 1)])
def test_minus_one_is_a_class_where_labels_are_numbers(
    labels: tuple[int, ...], tmp_path: Path
) -> None:
    """Only a column of class labels marks rows without one by -1, as GLUE does."""
    columns: dict[str, list[Any]] = dict(sentences(30, 0))
    columns["label"] = [labels[index % len(labels)] for index in range(30)]
    write_csv(tmp_path / "signs" / "train.csv", columns)
    raw = Tables(find_named(str(tmp_path / "signs"), None), None)
    assert raw.class_names == [str(label) for label in labels]
    assert sum(len(rows) for rows in raw.labels.values()) == 30
    assert not any("no label" in note for note in raw.notes)


def test_words_for_nothing_are_classes_and_texts(tmp_path: Path) -> None:
    """A CSV file's NA, null and None are what they say; an empty cell alone has no value."""
    columns = sentences(30, 0)
    columns["label"] = [("NA", "null", "EU", "")[index % 4] for index in range(30)]
    columns["sentence"][:2] = ["None", "nan"]
    write_csv(tmp_path / "regions" / "train.csv", columns)
    data = text(tmp_path / "regions")
    assert data.class_names == ["EU", "NA", "null"]
    assert sum(len(split) for split in data.splits.values()) == 23
    assert any("7 of 30 rows have no label" in note for note in data.notes)
    assert not any("no text" in note for note in data.notes)
