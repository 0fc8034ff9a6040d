"""BERT checkpoints: local folders are loaded whole, and what does not fit is refused in words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.data.sources import find_named
from common.data.text import TextData, load_text
from common.errors import UserError
from common.models.bert import check_checkpoint, choose_checkpoint, load_bert, small_bert
from tests.local_data import write_tiny_bert


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT without a head, and its tokenizer."""
    return write_tiny_bert(tmp_path_factory.mktemp("checkpoint") / "tiny-bert")


def data_for(checkpoint: str, odd_text: Path) -> TextData:
    """Return the sentences, tokenised for a checkpoint."""
    return load_text(
        find_named(str(odd_text), None),
        checkpoint=checkpoint,
        max_length=32,
        text_columns=(),
        label_column=None,
    )


def test_learning_rate_follows_the_model(odd_text: Path) -> None:
    """The default rate is that of fine-tuning, or the higher one of training from scratch."""
    from recipes.bert import Config, peak_learning_rate

    assert peak_learning_rate(Config(model="scratch")) == 1e-3
    assert peak_learning_rate(Config(model="some/checkpoint")) == 5e-5
    assert peak_learning_rate(Config(model="scratch", learning_rate=3e-3)) == 3e-3


def test_classes_and_dropout_are_the_data_s_and_the_flags(odd_text: Path, checkpoint: Path) -> None:
    """A model has a class for each label by its name, and the dropout that was asked for."""
    data = data_for(str(checkpoint), odd_text)
    for model in (load_bert(str(checkpoint), data, 0.3), small_bert("scratch", data, 0.3)):
        assert model.config.id2label == {0: "animals", 1: "colours", 2: "numbers"}
        assert model.config.hidden_dropout_prob == 0.3
        assert model.config.attention_probs_dropout_prob == 0.3
        assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_tokenizer_that_does_not_fit_is_refused(odd_text: Path, checkpoint: Path) -> None:
    """More tokens than the weights have rows end in a message, not in an index error."""
    data = data_for(str(checkpoint), odd_text)
    data.vocabulary_size += 1
    with pytest.raises(UserError) as error:
        load_bert(str(checkpoint), data, 0.0)
    assert "tokenizer" in error.value.message


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, ["config.json"]),
        ({"config.json": "{"}, ["config.json"]),
        ({"config.json": '{"model_type": "gpt2"}'}, ["gpt2", "BERT"]),
        ({"config.json": '{"model_type": "bert"}'}, ["safetensors"]),
        (
            {"config.json": '{"model_type": "bert"}', "pytorch_model.bin": "pickled"},
            ["safetensors", "pickled"],
        ),
    ],
)
def test_folder_that_is_no_checkpoint_is_refused(
    files: dict[str, str], words: list[str], tmp_path: Path
) -> None:
    """Another model, pickled weights or no model at all: said in words."""
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as error:
        check_checkpoint(str(tmp_path), 128)
    assert all(word in error.value.message for word in [*words, str(tmp_path)])


def test_damaged_weights_are_refused(odd_text: Path, checkpoint: Path, tmp_path: Path) -> None:
    """A truncated checkpoint ends in a message with its folder."""
    folder = tmp_path / "torn"
    shutil.copytree(checkpoint, folder)
    data = data_for(str(folder), odd_text)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError) as error:
        load_bert(str(folder), data, 0.0)
    assert str(folder) in error.value.message


def test_folder_without_a_tokenizer_is_refused(odd_text: Path, checkpoint: Path) -> None:
    """A checkpoint that lost its vocabulary is refused: its tokens would all be unknown."""
    folder = checkpoint.with_name("no-tokenizer")
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("token*", "vocab*"))
    assert json.loads((folder / "config.json").read_text())["model_type"] == "bert"
    with pytest.raises(UserError) as error:
        data_for(str(folder), odd_text)
    assert "tokenizer" in error.value.message


def test_named_model_is_never_replaced() -> None:
    """A model that can't be had ends in a message; `auto` on a CPU trains a small one."""
    accelerator = SimpleNamespace(is_main_process=True, device=torch.device("cpu"))
    config = SimpleNamespace(model="nobody/nothing", init_from=None, max_length=128)
    with pytest.raises(UserError) as error:
        choose_checkpoint(config, accelerator)  # type: ignore[arg-type]
    assert "nobody/nothing" in error.value.message
    assert "--model scratch" in error.value.message
    config.model = "auto"
    assert choose_checkpoint(config, accelerator) == "scratch"  # type: ignore[arg-type]
