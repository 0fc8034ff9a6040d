"""BERT checkpoints: local folders are loaded completely, and unsuitable ones refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from common.data.sources import find_named
from common.data.text import TextData, load_text
from common.errors import UserError
from common.models.bert import check_checkpoint, choose_checkpoint, load_bert, small_bert
from tests.local_data import write_tiny_bert
from tests.own_errors import require_no_own_class


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny BERT without a head, and its tokenizer."""
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


@pytest.mark.parametrize(("width", "rate"), [(768, 5e-5), (384, 1e-4), (1024, 3.75e-5)])
def test_default_learning_rate_depends_on_the_models_width(width: int, rate: float) -> None:
    """A pretrained model takes a lower rate the wider it is; from scratch the rate is fixed."""
    from recipes.bert import Config, build_optimizer

    def chosen_rate(config: Config) -> float:
        model = nn.ModuleDict({"classifier": nn.Linear(width, 2)})
        return build_optimizer(model, config).param_groups[0]["lr"]

    assert chosen_rate(Config(model="some/checkpoint")) == pytest.approx(rate)
    assert chosen_rate(Config(model="scratch")) == 1e-3
    assert chosen_rate(Config(model="scratch", learning_rate=3e-3)) == 3e-3


def test_model_has_the_datas_classes_and_the_flags_dropout(
    odd_text: Path, checkpoint: Path
) -> None:
    """Each class keeps its name, for pretrained and small models."""
    data = data_for(str(checkpoint), odd_text)
    for model in (load_bert(str(checkpoint), data, 0.3), small_bert(data, 0.3)):
        assert model.config.id2label == {0: "animals", 1: "colours", 2: "numbers"}
        assert model.config.hidden_dropout_prob == 0.3
        assert model.config.attention_probs_dropout_prob == 0.3
        assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_tokenizer_that_does_not_fit_is_refused(odd_text: Path, checkpoint: Path) -> None:
    """It has more tokens than the embedding has rows, which would be an index error later."""
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
    """A folder with another model, pickled weights or no model is refused."""
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as error:
        check_checkpoint(str(tmp_path), 128)
    assert all(word in error.value.message for word in [*words, str(tmp_path)])


def test_damaged_weights_are_refused(odd_text: Path, checkpoint: Path, tmp_path: Path) -> None:
    """The message names the folder of the truncated file."""
    folder = tmp_path / "torn"
    shutil.copytree(checkpoint, folder)
    data = data_for(str(folder), odd_text)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError) as error:
        load_bert(str(folder), data, 0.0)
    assert str(folder) in error.value.message


def test_folder_without_a_tokenizer_is_refused(odd_text: Path, checkpoint: Path) -> None:
    """A folder without a tokenizer is refused, because all tokens would be unknown."""
    folder = checkpoint.with_name("no-tokenizer")
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("token*", "vocab*"))
    assert json.loads((folder / "config.json").read_text())["model_type"] == "bert"
    with pytest.raises(UserError) as error:
        data_for(str(folder), odd_text)
    assert "neither tokenizer.json nor vocab.txt" in error.value.message


def test_named_model_is_never_replaced() -> None:
    """A missing model is an error. Only `auto` trains a small one on a CPU."""
    accelerator = SimpleNamespace(is_main_process=True, device=torch.device("cpu"))
    config = SimpleNamespace(model="nobody/nothing", init_from=None, max_length=128)
    with pytest.raises(UserError) as error:
        choose_checkpoint(config, accelerator)  # type: ignore[arg-type]
    assert "nobody/nothing" in error.value.message
    assert "--model scratch" in error.value.message
    assert "HF_TOKEN" in error.value.advice
    config.model = "auto"
    assert choose_checkpoint(config, accelerator) == "scratch"  # type: ignore[arg-type]


WRONG_CONTENT: tuple[bytes, ...] = (b"", b"{", b"[]", b"null", b"7", b"\xff\xfe{}", b"{}")
WRONG_FIELDS: dict[str, tuple[Any, ...]] = {
    "max_position_embeddings": (0, -5, 16, 36, "512", None, 10**12, 1.5),
    "num_hidden_layers": (0, -1, 2, "1", 10**9),
    "hidden_size": (0, -1, 16, "32", None),
    "num_attention_heads": (0, 3, "2"),
    "intermediate_size": (0, 8),
    "vocab_size": (0, 5, "126"),
    "type_vocab_size": (0,),
    "hidden_act": ("nope",),
    "model_type": ("gpt2", 7, ["bert"]),
    "id2label": ([7],),
}
WRONG_NUMBERS = (10**6, 4 * 10**9, 10**12, -5, "x", None)


def use(folder: Path, odd_text: Path) -> None:
    """Load a checkpoint as the recipe does before its first update."""
    check_checkpoint(str(folder), 32)
    load_bert(str(folder), data_for(str(folder), odd_text), 0.1)


def changed_json(path: Path, change: Callable[[Any], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def damages(folder: Path) -> Iterator[Callable[[Path], None]]:
    """Yield functions that each damage one file of a folder in one way."""
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        whole = (folder / name).read_bytes()
        for content in (*WRONG_CONTENT, whole[: len(whole) // 2], whole + whole):
            yield lambda path, name=name, content=content: (path / name).write_bytes(content)
        yield lambda path, name=name: (path / name).unlink()
        yield lambda path, name=name: ((path / name).unlink(), (path / name).mkdir())
    for field, values in WRONG_FIELDS.items():
        for wrong in values:
            yield lambda path, given={field: wrong}: changed_json(
                path / "config.json", lambda value: value.update(given)
            )
    for number in WRONG_NUMBERS:
        for change in (
            lambda value, number=number: value["model"]["vocab"].update(cat=number),
            lambda value, number=number: value["added_tokens"][0].update(id=number),
        ):
            yield lambda path, change=change: changed_json(path / "tokenizer.json", change)
    for part in ("model", "added_tokens", "post_processor", "pre_tokenizer"):
        for wrong in ({}, [7], "x"):
            yield lambda path, given={part: wrong}: changed_json(
                path / "tokenizer.json", lambda value: value.update(given)
            )


@pytest.mark.slow
def test_damaged_checkpoint_is_refused_in_one_sentence(
    odd_text: Path, checkpoint: Path, tmp_path: Path, thorough: bool
) -> None:
    """Each file is damaged in many ways. The sentence names the folder, and no weight is random."""
    use(checkpoint, odd_text)
    passed = 0
    refusals = []
    every = [*damages(checkpoint)]
    for number, damage in enumerate(every[:: 1 if thorough else 4]):
        folder = tmp_path / f"checkpoint-{number}"
        shutil.copytree(checkpoint, folder)
        damage(folder)
        try:
            use(folder, odd_text)
            passed += 1
        except UserError as error:
            require_no_own_class(error)
            refusals.append((str(folder), error.message))
    assert len(refusals) > (60 if thorough else 15)
    # Some damage is harmless: to a tokenizer's added token, or an empty part of it.
    assert passed <= (12 if thorough else 6), passed
    for folder, message in refusals:
        assert folder in message
        assert "\n" not in message
        assert len(message) < 800


@pytest.mark.parametrize(("positions", "length"), [(512, 513), (64, 128), (100, 100)])
def test_max_length_beyond_the_model_is_refused(
    positions: int, length: int, checkpoint: Path, tmp_path: Path
) -> None:
    """The message has the flag and both numbers, before anything is tokenised."""
    shutil.copytree(checkpoint, tmp_path / "short")
    changed_json(
        tmp_path / "short" / "config.json",
        lambda value: value.update(max_position_embeddings=positions),
    )
    config = SimpleNamespace(model=str(tmp_path / "short"), init_from=None, max_length=length)
    accelerator = SimpleNamespace(is_main_process=True, device=torch.device("cpu"))
    with pytest.raises(UserError) as error:
        choose_checkpoint(config, accelerator)  # type: ignore[arg-type]
    assert f"--max-length {length}" in error.value.message
    assert str(positions) in error.value.message
    config.max_length = positions // 8 * 8
    assert choose_checkpoint(config, accelerator) == config.model  # type: ignore[arg-type]
    config.model = "scratch"
    config.max_length = 513
    with pytest.raises(UserError):
        choose_checkpoint(config, accelerator)  # type: ignore[arg-type]
