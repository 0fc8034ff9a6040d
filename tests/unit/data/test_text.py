"""Local text in any layout: tokenised correctly, or refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate.utils import convert_to_fp32, send_to_device

from common.data.samples import Work
from common.data.sources import find_named
from common.data.text import NO_WORK, CountedBatch
from tests.local_data import grey_images, sentences, write_csv, write_image_parquet, write_parquet
from tests.unit.data.loading import images, refusal, text


def test_csv_with_string_labels(tmp_path: Path) -> None:
    """Rows without text or label are left out with a note, and a tenth is held out."""
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


def test_batches_match_the_tokenizer_of_transformers(tmp_path: Path) -> None:
    """They have special tokens, padding to a multiple of 8, and attention masks."""
    from transformers import AutoTokenizer

    columns = sentences(60, 0)
    write_csv(tmp_path / "words" / "train.csv", columns)
    write_csv(tmp_path / "words" / "validation.csv", sentences(9, 1))
    data = text(tmp_path / "words", max_length=24)
    split = data.splits["train"]
    split.place(torch.device("cpu"))
    indices = torch.tensor([3, 0, 41])
    batch = split.gather(indices, None)
    tokenizer = AutoTokenizer.from_pretrained(data.tokenizer_folder)
    texts = [columns["sentence"][index] for index in indices]
    expected = tokenizer(
        texts, truncation=True, max_length=24, padding=True, pad_to_multiple_of=8,
        return_tensors="pt",
    )  # fmt: skip
    for name in ("input_ids", "token_type_ids"):
        assert torch.equal(batch[name], expected[name]), name
    assert torch.equal(batch["attention_mask"][:, 0, 0].long(), expected["attention_mask"])
    assert batch["input_ids"].shape[1] % 8 == 0
    assert split.lengths.max() == 24
    assert split.work_by_index(indices).tokens == int(expected["attention_mask"].sum())
    assert [data.class_names[index] for index in batch["labels"]] == [
        columns["label"][index] for index in indices
    ]
    fetched = split.fetch(indices, None)
    assert all(torch.equal(fetched[name], batch[name]) for name in batch)


def test_two_text_columns_make_a_pair(tmp_path: Path) -> None:
    """Token types tell the first text from the second."""
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
    types = batch["token_type_ids"]
    mask = batch["attention_mask"][:, 0, 0].long()
    assert set(types.unique().tolist()) == {0, 1}
    assert not (types & ~mask).any()
    token_count = int(mask[0].sum())
    types_of_tokens = types[0][:token_count].tolist()
    padding = [0] * (len(types[0]) - token_count)
    assert types[0].tolist() == sorted(types_of_tokens) + padding
    assert any("first and second" in note for note in data.notes)
    single = text(tmp_path / "pairs", text_columns=("second",))
    assert any("text from second" in note for note in single.notes)
    (whole,) = single.splits["train"].fetch(torch.arange(4), None)["token_type_ids"].unique()
    assert whole == 0


def test_three_text_columns_need_a_flag(tmp_path: Path) -> None:
    """`--text-columns` selects one or two of them."""
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


def test_data_without_text_are_refused(tmp_path: Path) -> None:
    """The message names the flag that selects a column."""
    folder = write_image_parquet(tmp_path / "grey", {"train": grey_images(20, 0)})
    assert "--text-columns" in refusal(lambda: text(folder))


def test_synthetic_data_are_images_only() -> None:
    """`synthetic` makes images of any size, and is refused as text."""
    source = find_named("synthetic", None)
    data = images(Path("synthetic"), image_size=12)
    assert data.splits["train"].images.shape[1:] == (12, 12, 3)
    assert source.name == "synthetic"
    assert "synthetic" in refusal(lambda: text(Path("synthetic")))


def test_libraries_may_copy_a_counted_batch() -> None:
    """Accelerate makes a copy from the entries alone; the original keeps its work."""
    batch = CountedBatch({"input_ids": torch.ones(2, dtype=torch.bfloat16)}, Work(2))
    copy = convert_to_fp32(send_to_device(batch, "cpu"))
    assert isinstance(copy, CountedBatch)
    assert copy["input_ids"].dtype == torch.float32
    assert copy.work == NO_WORK
    assert batch.work == Work(2)
