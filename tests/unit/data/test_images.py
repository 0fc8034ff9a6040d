"""Local images in any layout: read correctly, or refused in one sentence."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.local_data import (
    grey_images,
    sentences,
    write_csv,
    write_image_folder,
    write_image_parquet,
    write_parquet,
)
from tests.unit.data.loading import images, refusal


def test_each_image_keeps_its_file_name(tmp_path: Path) -> None:
    """Error messages show it, for held-out images as well."""
    folder = write_image_folder(tmp_path / "pets", ["cat", "dog"], per_class=20)
    data = images(folder, image_size=8)
    seen = []
    for split in data.splits.values():
        files = split.files
        assert files is not None
        classes = [Path(file).parent.name for file in files]
        assert classes == [data.class_names[label] for label in split.labels.tolist()]
        seen += files
    on_disk = [str(path.relative_to(folder)) for path in folder.rglob("*.png")]
    assert sorted(seen) == sorted(on_disk)


def test_folders_of_images_are_classes(tmp_path: Path) -> None:
    """Images get one size, and a tenth of each class is held out with a note."""
    folder = write_image_folder(tmp_path / "Pets", ["cat", "dog"], per_class=30)
    data = images(folder)
    assert data.class_names == ["cat", "dog"]
    assert data.channels == 3
    assert data.source.name == "pets"
    sizes = [min(12 + index % 5, 16 + number) for number in range(2) for index in range(30)]
    assert abs(data.image_size - np.median(sizes)) <= 1
    assert {name: len(split) for name, split in data.splits.items()} == {
        "train": 54,
        "validation": 6,
    }
    assert any("held out 6 of 60" in note for note in data.notes)
    assert any("resized" in note for note in data.notes)
    # The split is stratified.
    assert np.bincount(data.splits["validation"].labels).tolist() == [3, 3]
    assert np.bincount(data.splits["train"].labels).tolist() == [27, 27]
    resized = images(folder, image_size=9)
    assert resized.splits["train"].images.shape == (54, 9, 9, 3)


def test_special_folder_names_are_classes_or_noted(tmp_path: Path) -> None:
    """Some names are special to `datasets`, to patterns or to a terminal."""
    odd_names = (
        "a\nb",
        "[red]",
        "*",
        "?x",
        "{a,b}",
        "100%",
        ".hid",
        "__a",
        "a\x1bb",
        "é",
        "train",
        "x_test",
    )
    for number, name in enumerate(odd_names):
        folder = write_image_folder(tmp_path / str(number), ["cat", "dog", name], per_class=4)
        if name == "x_test":  # `datasets` takes this name for a split as well
            assert "000.png is in two splits of data set" in refusal(partial(images, folder))
            continue
        data = images(folder)
        unread = "4 files are in no split and not read, such as"
        is_noted = any(unread in note for note in data.notes)
        assert (name in data.class_names) != (is_noted or name.startswith(".")), name
    folder = write_image_folder(tmp_path / "case", ["cat", "dog", "__a"], per_class=4)
    for image in folder.rglob("__a/*.png"):
        image.rename(image.with_suffix(".PNG"))
    assert any(unread in note for note in images(folder).notes)
    folder = write_image_folder(tmp_path / "flat", ["cat", "train"], per_class=4, split=".")
    message = (
        "no labels: put the images of each class into a folder named after it, such as cat/1.png; "
        "4 files are in no split"
    )
    assert message in refusal(partial(images, folder))
    for place in ("a[b]", "a*", "a::b", "a\nb"):
        folder = write_image_folder(tmp_path / place, ["cat", "dog"], per_class=4)
        assert "rename the file or folder" in refusal(partial(images, folder))


def test_held_out_rows_are_the_same_in_every_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new cache holds out the same images."""
    folder = write_image_folder(tmp_path / "pets", ["cat", "dog"], per_class=20)
    first = images(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    second = images(folder)
    for split in ("train", "validation"):
        assert np.array_equal(first.splits[split].images, second.splits[split].images)


def test_rows_with_missing_values_are_left_out(tmp_path: Path) -> None:
    """A note counts those without an image and those without a label.

    Grey images have one channel.
    """
    train = grey_images(40, 1)
    test = grey_images(10, 2)
    train["image"][3] = None
    train["label"][5] = None
    train["label"][7] = None
    test["image"][0] = None
    folder = write_image_parquet(tmp_path / "grey", {"train": train, "test": test})
    data = images(folder)
    assert data.channels == 1
    assert data.image_size == 8
    assert data.class_names == ["a", "b", "c"]
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 37, "test": 9}
    notes = " ".join(data.notes)
    assert "2 of 40 rows have no label" in notes
    assert "train: 1 of 38 rows have no image" in notes
    assert "test: 1 of 10 rows have no image" in notes
    assert "held out" not in notes
    expected = [value for row, value in enumerate(train["label"]) if row not in (3, 5, 7)]
    assert data.splits["train"].labels.tolist() == expected
    majority = np.bincount(expected).argmax()
    share = (data.splits["test"].labels == majority).mean()
    assert f"always guessing {'abc'[majority]}: {share:.1%} of test" in notes


def test_pixels_are_normalised(tmp_path: Path) -> None:
    """Over the training split, batches have mean 0 and deviation 1, channels first."""
    folder = write_image_parquet(tmp_path / "grey", {"train": grey_images(60, 1)})
    data = images(folder)
    split = data.splits["train"]
    split.place(torch.device("cpu"))
    batch = split.gather(torch.arange(len(split)), None)["images"]
    assert batch.shape == (54, 1, 8, 8)
    assert batch.mean().item() == pytest.approx(0, abs=1e-4)
    assert batch.std().item() == pytest.approx(1, abs=1e-3)


def test_two_image_columns_need_a_flag(tmp_path: Path) -> None:
    """The message names the flag and both columns."""
    from datasets import ClassLabel, Features
    from datasets import Image as ImageType

    columns = grey_images(12, 0)
    both = {"left": columns["image"], "right": columns["image"], "label": columns["label"]}
    features = Features(
        {"left": ImageType(), "right": ImageType(), "label": ClassLabel(names=["a", "b", "c"])}
    )
    write_parquet(tmp_path / "pairs" / "train.parquet", both, features)
    message = refusal(lambda: images(tmp_path / "pairs"))
    assert "--image-column" in message
    assert "left" in message
    assert "right" in message
    assert len(images(tmp_path / "pairs", image_column="right").splits["train"]) == 11
    message = refusal(lambda: images(tmp_path / "pairs", image_column="middle"))
    assert "middle" in message


def test_data_without_images_are_refused(tmp_path: Path) -> None:
    """The message names the flag, the type of a named column, and data that would do."""
    write_csv(tmp_path / "words" / "train.csv", sentences(20, 0))
    message = refusal(lambda: images(tmp_path / "words"))
    assert "no likely column for --image-column: pass a folder of images" in message
    message = refusal(lambda: images(tmp_path / "words", image_column="sentence"))
    assert "string, and the flag needs images: pass a folder of images" in message


def test_only_columns_of_images_are_suggested(tmp_path: Path) -> None:
    """The message does not name the refused column as a choice."""
    folder = write_image_parquet(tmp_path / "grey", {"train": grey_images(60, 1)})
    message = refusal(lambda: images(folder, image_column="label"))
    assert message.endswith("the flag needs images: choose one of the columns image (Image)")


@pytest.mark.parametrize("shift", [8, 9, 65536])
def test_shift_beyond_the_image_is_refused(shift: int, tmp_path: Path) -> None:
    """Reflection at the border fills less than a whole image; 0 and the largest shift are taken."""
    data = images(write_image_parquet(tmp_path / "grey", {"train": grey_images(60, 1)}))
    assert [data.allowed_shift(number, default=2) for number in (None, 0, 7)] == [2, 0, 7]
    message = refusal(partial(data.allowed_shift, shift, default=2))
    assert f"--max-shift {shift}" in message
    assert "7 or less" in message
