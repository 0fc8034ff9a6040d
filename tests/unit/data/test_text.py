"""Local text of any layout: tokenised right, or refused in one clear sentence."""

from __future__ import annotations

from pathlib import Path

import torch

from common.data.sources import find_named
from tests.local_data import grey_images, sentences, write_csv, write_image_parquet, write_parquet
from tests.unit.data.loading import images, refusal, text


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
    assert "rows have no text" in notes
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
    fetched = split.fetch(samples, None)
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
    (whole,) = one.splits["train"].fetch(torch.arange(4), None)["token_type_ids"].unique()
    assert whole == 0


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
