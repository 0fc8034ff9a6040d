"""Local data sets of any layout: read right, or refused in one clear sentence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from common.datasets import load_raw
from common.errors import UserError
from common.images import ImageData, load_images
from common.sources import PUBLIC, cache_folder, find_named
from common.text import TextData, load_text
from tests.launch import UNREACHABLE, Finished, Runner
from tests.local_data import (
    cache_glue,
    grey_images,
    sentences,
    write_csv,
    write_image_folder,
    write_image_parquet,
    write_parquet,
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def images(folder: Path, **changes: Any) -> ImageData:
    """Load a local folder of images as the recipes do."""
    arguments: dict[str, Any] = {
        "image_size": None,
        "image_column": None,
        "label_column": None,
        "seed": 0,
        "dtype": torch.float32,
    }
    return load_images(find_named(str(folder), None), **(arguments | changes))


def text(folder: Path, **changes: Any) -> TextData:
    """Load a local folder of text as the recipes do."""
    arguments: dict[str, Any] = {
        "checkpoint": "scratch",
        "max_length": 32,
        "text_columns": (),
        "label_column": None,
    }
    return load_text(find_named(str(folder), None), **(arguments | changes))


def refusal(load: Callable[[], object]) -> str:
    """Return the one sentence that loading ends in."""
    with pytest.raises(UserError) as error:
        load()
    message = error.value.message
    assert "\n" not in message
    assert len(message) < 600
    assert "Traceback" not in message
    return message


# Images that work.


def test_folder_of_images(tmp_path: Path) -> None:
    """Colour images of different sizes: classes by folder, one size, 10 % held out and said."""
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
    # Each class in proportion.
    assert np.bincount(data.splits["validation"].labels).tolist() == [3, 3]
    assert np.bincount(data.splits["train"].labels).tolist() == [27, 27]
    resized = images(folder, image_size=9)
    assert resized.splits["train"].images.shape == (54, 9, 9, 3)


def test_held_out_rows_are_the_same_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is held out of train does not change between runs, whatever their seed."""
    folder = write_image_folder(tmp_path / "pets", ["cat", "dog"], per_class=20)
    first = images(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    second = images(folder, seed=5)
    for split in ("train", "validation"):
        assert np.array_equal(first.splits[split].images, second.splits[split].images)


def test_share_is_held_out_beside_a_test_split(tmp_path: Path) -> None:
    """`--validation-share` holds rows of train out, and leaves the test split as it is."""
    splits = {"train": grey_images(60, 1), "test": grey_images(10, 2)}
    source = find_named(str(write_image_parquet(tmp_path / "grey", splits)), None)
    sizes, tests = [], []
    for share in (None, 0.25):
        raw = load_raw(dataclasses.replace(source, validation_share=share), None)
        sizes.append({name: len(split) for name, split in raw.splits.items()})
        tests.append(raw.labels["test"].tolist())
        assert {name: len(labels) for name, labels in raw.labels.items()} == sizes[-1]
    assert sizes == [{"train": 60, "test": 10}, {"train": 45, "test": 10, "validation": 15}]
    assert tests[0] == tests[1]


def test_share_leaves_a_validation_split_alone(tmp_path: Path) -> None:
    """A data set's own validation split is never added to."""
    splits = {"train": grey_images(60, 1), "validation": grey_images(10, 2)}
    source = find_named(str(write_image_parquet(tmp_path / "grey", splits)), None)
    raw = load_raw(dataclasses.replace(source, validation_share=0.5), None)
    assert {name: len(split) for name, split in raw.splits.items()} == {
        "train": 60,
        "validation": 10,
    }


def test_shares_are_cached_apart(tmp_path: Path) -> None:
    """A run that holds rows out never meets the cache of one that does not."""
    splits = {"train": grey_images(60, 1), "test": grey_images(10, 2)}
    source = find_named(str(write_image_parquet(tmp_path / "grey", splits)), None)
    folders = {
        cache_folder(dataclasses.replace(source, validation_share=share))
        for share in (None, 0.1, 0.2)
    }
    assert len(folders) == 3


def test_grey_parquet_with_missing_values(tmp_path: Path) -> None:
    """Rows without an image or a label are left out and said; grey images have one channel."""
    train, test = grey_images(40, 1), grey_images(10, 2)
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
    assert "train: 1 rows without an image" in notes
    assert "held out" not in notes
    expected = [value for row, value in enumerate(train["label"]) if row not in (3, 5, 7)]
    assert data.splits["train"].labels.tolist() == expected


def test_pixels_are_normalised(tmp_path: Path) -> None:
    """Batches have mean 0 and deviation 1 over the training split, channels first."""
    folder = write_image_parquet(tmp_path / "grey", {"train": grey_images(60, 1)})
    data = images(folder)
    split = data.splits["train"]
    split.place(torch.device("cpu"))
    batch = split.gather(torch.arange(len(split)), None)["images"]
    assert batch.shape == (54, 1, 8, 8)
    assert batch.mean().item() == pytest.approx(0, abs=1e-4)
    assert batch.std().item() == pytest.approx(1, abs=1e-3)


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


@pytest.mark.parametrize(
    ("mode", "channels"), [("1", 1), ("L", 1), ("I;16", 1), ("P", 3), ("RGBA", 3), ("CMYK", 3)]
)
def test_images_of_any_mode(mode: str, channels: int, tmp_path: Path) -> None:
    """Black and white, 16-bit, palette, transparent and print images are decoded."""
    pixels = np.random.default_rng(0).integers(0, 256, (10, 10), dtype=np.uint8)
    if mode == "I;16":
        image = Image.fromarray(pixels.astype(np.uint16) * 256)
    else:
        image = Image.fromarray(pixels).convert("RGB").convert(mode)
    suffix = "tiff" if mode == "CMYK" else "png"
    for label in ("x", "y"):
        for index in range(6):
            path = tmp_path / "modes" / "train" / label / f"{index}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
    data = images(tmp_path / "modes")
    assert data.channels == channels
    expected = pixels if channels == 1 else np.asarray(image.convert("RGB"))
    if mode != "1":  # which is dithered
        decoded = data.splits["train"].images[0]
        assert np.array_equal(decoded.reshape(expected.shape), expected)


def test_changed_data_is_decoded_again(tmp_path: Path) -> None:
    """A cache is used while the folder's files are the same, and no longer."""
    folder = write_image_folder(tmp_path / "pets", ["cat", "dog"], per_class=10)
    assert len(images(folder).splits["train"]) == 18
    caches = list((tmp_path / "cache" / "accelerate-recipes").glob("pets-*"))
    assert len([path for path in caches if path.is_dir()]) == 1
    write_image_folder(folder, ["cat", "dog", "emu"], per_class=10)
    data = images(folder)
    assert data.class_names == ["cat", "dog", "emu"]
    assert len(data.splits["train"]) == 27


def test_cache_depends_on_what_it_holds(tmp_path: Path) -> None:
    """Another size, column or data set has a cache of its own."""
    source = find_named("digits", None)
    assert cache_folder(source, size=8) == cache_folder(source, size=8)
    assert cache_folder(source, size=8) != cache_folder(source, size=9)
    other = dataclasses.replace(source, fingerprint="other")
    assert cache_folder(source, size=8) != cache_folder(other, size=8)


# Images that don't.


def test_two_image_columns_need_a_name(tmp_path: Path) -> None:
    """With two columns of images the message names the flag and the columns."""
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


def test_text_is_no_image(tmp_path: Path) -> None:
    """Data without images are refused with the columns that there are."""
    write_csv(tmp_path / "words" / "train.csv", sentences(20, 0))
    message = refusal(lambda: images(tmp_path / "words"))
    assert "no images" in message
    assert "sentence" in message


def test_one_class_only(tmp_path: Path) -> None:
    """One class can't be told from another: refused, and said."""
    folder = write_image_folder(tmp_path / "cats", ["cat"], per_class=5)
    # A single folder is no class to `datasets`: say so by parquet.
    columns = grey_images(12, 0)
    columns["label"] = [1] * 12
    folder = write_image_parquet(tmp_path / "one", {"train": columns})
    message = refusal(lambda: images(folder))
    assert "one label" in message
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
    raw = load_raw(find_named(str(tmp_path / "small"), None), None)
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
    assert "damaged" in message


@pytest.mark.parametrize("kind", ["truncated", "no image"])
def test_corrupt_image_is_named(kind: str, tmp_path: Path) -> None:
    """An image that can't be decoded is named, and no cache is left."""
    folder = write_image_folder(tmp_path / "pets", ["cat", "dog"], per_class=10)
    path = folder / "train" / "dog" / "003.png"
    path.write_bytes(path.read_bytes()[:120] if kind == "truncated" else b"not an image")
    message = refusal(lambda: images(folder))
    assert "003.png" in message
    caches = (tmp_path / "cache" / "accelerate-recipes").glob("pets-*")
    assert not [c for c in caches if c.is_dir() and not c.name.endswith(".unfinished")]
    path.unlink()
    assert len(images(folder).splits["train"]) > 10


@pytest.mark.parametrize("content", [b"\x89PNG broken", b""])
def test_corrupt_image_in_parquet_is_named(content: bytes, tmp_path: Path) -> None:
    """Of an image inside a file, at least the split and the data set are named."""
    columns = grey_images(12, 0)
    columns["image"][4] = {"bytes": content, "path": None}
    folder = write_image_parquet(tmp_path / "inside", {"train": columns})
    message = refusal(lambda: images(folder))
    assert "inside" in message
    assert "train" in message or "validation" in message


# Labels.


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


# Text.


def test_csv_with_string_labels(tmp_path: Path) -> None:
    """A CSV file of sentences and names of classes works, with a tenth held out."""
    columns = sentences(60, 0)
    columns["sentence"][4] = ""
    columns["label"][6] = ""
    write_csv(tmp_path / "words" / "train.csv", columns)
    data = text(tmp_path / "words")
    assert data.class_names == ["animals", "colours", "numbers"]
    sizes = {name: len(split) for name, split in data.splits.items()}
    assert sum(sizes.values()) == 58
    assert 5 <= sizes["validation"] <= 7
    notes = " ".join(data.notes)
    assert "1 of 60 rows have no label" in notes
    assert "without text" in notes
    assert "held out" in notes
    assert "text from sentence" in notes


def test_tokens_are_bert_s(tmp_path: Path) -> None:
    """A batch has special tokens, padding to a multiple of 8, and masks that tell it from text."""
    from transformers import AutoTokenizer

    columns = sentences(60, 0)
    write_csv(tmp_path / "words" / "train.csv", columns)
    write_csv(tmp_path / "words" / "validation.csv", sentences(9, 1))
    data = text(tmp_path / "words", max_length=24)
    split = data.splits["train"]
    split.place(torch.device("cpu"))
    samples = torch.tensor([3, 0, 41])
    batch = split.gather(samples, None)
    tokenizer = AutoTokenizer.from_pretrained(data.tokenizer_folder)
    texts = [columns["sentence"][index] for index in samples]
    expected = tokenizer(
        texts, truncation=True, max_length=24, padding=True, pad_to_multiple_of=8,
        return_tensors="pt",
    )  # fmt: skip
    for name in ("input_ids", "token_type_ids"):
        assert torch.equal(batch[name], expected[name]), name
    assert torch.equal(batch["attention_mask"][:, 0, 0].long(), expected["attention_mask"])
    assert batch["input_ids"].shape[1] % 8 == 0
    assert split.lengths.max() == 24
    assert split.count(samples).tokens == int(expected["attention_mask"].sum())
    assert [data.class_names[index] for index in batch["labels"]] == [
        columns["label"][index] for index in samples
    ]
    fetched = split.finish(split.fetch(samples), samples, None)
    assert all(torch.equal(fetched[name], batch[name]) for name in batch)


def test_pairs_in_parquet(tmp_path: Path) -> None:
    """Two columns of text make a pair, in their order, told apart by token types."""
    from datasets import ClassLabel, Features, Value

    features = Features(
        {
            "idx": Value("int32"),
            "first": Value("string"),
            "second": Value("string"),
            "label": ClassLabel(names=["different", "same"]),
        }
    )
    for seed, (split, count) in enumerate({"train": 40, "validation": 10}.items()):
        values = {
            "idx": list(range(count)),
            "first": sentences(count, seed)["sentence"],
            "second": sentences(count, seed + 10)["sentence"],
            "label": [index % 2 for index in range(count)],
        }
        write_parquet(tmp_path / "pairs" / f"{split}.parquet", values, features)
    data = text(tmp_path / "pairs")
    split = data.splits["train"]
    split.place(torch.device("cpu"))
    batch = split.gather(torch.arange(4), None)
    types, mask = batch["token_type_ids"], batch["attention_mask"][:, 0, 0].long()
    assert set(types.unique().tolist()) == {0, 1}
    assert not (types & ~mask).any()
    assert types[0].tolist() == sorted(types[0][: int(mask[0].sum())].tolist()) + [0] * int(
        (1 - mask[0]).sum()
    )
    assert any("first and second" in note for note in data.notes)
    one = text(tmp_path / "pairs", text_columns=("second",))
    assert any("text from second" in note for note in one.notes)
    assert (
        not one.splits["train"]
        .padded(
            {name: torch.from_numpy(np.array(a)) for name, a in one.splits["train"].arrays.items()},
            torch.arange(4),
            32,
        )["token_type_ids"]
        .any()
    )


def test_three_text_columns_need_names(tmp_path: Path) -> None:
    """More columns of text than a pair need `--text-columns`."""
    columns = sentences(20, 0)
    extra = {"title": columns["sentence"], "author": columns["sentence"]}
    write_csv(tmp_path / "books" / "train.csv", columns | extra)
    message = refusal(lambda: text(tmp_path / "books"))
    assert "--text-columns" in message
    assert "title" in message
    data = text(tmp_path / "books", text_columns=("title", "sentence"))
    assert any("title and sentence" in note for note in data.notes)
    message = refusal(lambda: text(tmp_path / "books", text_columns=("titel",)))
    assert "titel" in message


def test_images_are_no_text(tmp_path: Path) -> None:
    """Data without text are refused with the flag that would name a column."""
    folder = write_image_parquet(tmp_path / "grey", {"train": grey_images(20, 0)})
    assert "--text-columns" in refusal(lambda: text(folder))


def test_synthetic_data_are_images(tmp_path: Path) -> None:
    """`synthetic` makes images of any size, and says that there is no such text."""
    source = find_named("synthetic", None)
    data = images(Path("synthetic"), image_size=12)
    assert data.splits["train"].images.shape[1:] == (12, 12, 3)
    assert source.name == "synthetic"
    assert "synthetic" in refusal(lambda: text(Path("synthetic")))


# Sources.


def test_built_in_digits_are_stratified() -> None:
    """A fifth of the 1,797 digits is held out, each class in proportion, always the same."""
    raw = load_raw(find_named("digits", None), None)
    assert {name: len(labels) for name, labels in raw.labels.items()} == {
        "train": 1437,
        "test": 360,
    }
    counts = np.bincount(raw.labels["test"])
    assert counts.min() >= 34
    assert counts.max() <= 38


def test_built_in_docstrings_are_real_text() -> None:
    """The standard library gives ten classes, a tenth of each held out, and no text twice."""
    raw = load_raw(find_named("docstrings", None), None)
    assert len(raw.class_names) == 10
    assert len(raw.labels["train"]) > 1500
    texts = {name: split["text"][:] for name, split in raw.splits.items()}
    assert not set(texts["train"]) & set(texts["validation"])
    share = len(texts["validation"]) / sum(map(len, texts.values()))
    assert share == pytest.approx(0.1, abs=0.01)
    assert set(np.unique(raw.labels["validation"])) == set(range(10))


def test_file_is_no_folder(tmp_path: Path) -> None:
    """A file given for a folder is refused with what to pass."""
    write_csv(tmp_path / "train.csv", sentences(5, 0))
    assert "folder" in refusal(lambda: find_named(str(tmp_path / "train.csv"), None))


@pytest.mark.parametrize("name", ["mnist", "nobody/nothing", "./no-such-folder"])
def test_missing_data_set_is_never_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named data set that can't be had ends in a message that names what is built in."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", UNREACHABLE)
    message = refusal(lambda: find_named(name, None))
    assert name in message
    assert "digits" in message
    assert "docstrings" in message


def test_cached_data_set_is_found_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the Hub's cache holds is used where the Hub does not answer; names have their ids."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", UNREACHABLE)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name, (location, configuration) in PUBLIC.items():
        reference = tmp_path / f"datasets--{location.replace('/', '--')}" / "refs" / "main"
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text("0123abcd\n")
        source = find_named(name, None)
        assert (source.location, source.configuration) == (location, configuration)
        assert (source.name, source.fingerprint) == (name, "0123abcd")


@pytest.mark.parametrize("name", ["synthetic", "digits", "docstrings"])
def test_folder_is_never_taken_for_built_in_data(name: str, tmp_path: Path) -> None:
    """A local folder is read, also where it is called as data that are built in."""
    data = images(write_image_folder(tmp_path / name, ["cat", "dog"], per_class=10))
    assert data.class_names == ["cat", "dog"]
    assert data.source.location == str(tmp_path / name)


# Through the recipes.


def test_public_data_set_is_repeated(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run on `sst2` from the Hub's cache can be repeated: its configuration is kept too."""
    from huggingface_hub import constants

    cache_glue(tmp_path / "huggingface")
    run = runner.run(
        *("bert", "--dataset", "sst2", "--max-steps", 1, "--batch-size", 8, "--tracker", "none"),
        launcher="python",
        environment={"HF_HOME": str(tmp_path / "huggingface")},
    )
    assert run.config["data"]["name"] == "sst2"
    assert run.summary["eval/count"] == 17
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "huggingface" / "hub"))
    kept = run.config["config"]
    again = find_named(kept["dataset"], kept["dataset_config"])
    assert (again.location, again.configuration) == ("nyu-mll/glue", "sst2")


def test_colour_folder_through_resnet(runner: Runner, tmp_path: Path) -> None:
    """An image folder trains without a code change, from the command line to the model's facts."""
    folder = write_image_folder(tmp_path / "pets", ["cat", "dog", "emu"], per_class=15)
    run = runner.run(
        *("resnet", "--dataset", folder, "--max-steps", 2, "--batch-size", 8),
        *("--image-size", 12, "--tracker", "none"),
        launcher="python",
    )
    facts = run.read("model/model.json")
    assert facts["class_names"] == ["cat", "dog", "emu"]
    assert (facts["channels"], facts["image_size"]) == (3, 12)
    assert len(facts["mean"]) == len(facts["std"]) == 3
    assert "held out" in run.output
    assert "resized" in run.output
    assert run.summary["eval/count"] == run.config["data"]["sizes"]["validation"]


def test_mistake_in_data_on_two_processes(runner: Runner, tmp_path: Path) -> None:
    """A damaged image ends two processes with one message."""
    folder = write_image_folder(tmp_path / "pets", ["cat", "dog"], per_class=20)
    (folder / "train" / "cat" / "007.png").write_bytes(b"not an image")
    run: Finished = runner.run(
        *("mnist_mlp", "--dataset", folder, "--tracker", "none", "--batch-size", 16),
        launcher="two",
        succeeds=False,
        timeout=120,
    )
    assert run.returncode != 0
    assert run.said().count("error: ") == 1, run.explain()
    assert "007.png" in run.said()
    assert run.status["status"] == "failed"
    assert "007.png" in run.status["reason"]
