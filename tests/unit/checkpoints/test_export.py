"""The exported model: complete, loadable, and refused in one sentence where it does not fit."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from common.checkpoints import export
from common.checkpoints.export import save_model
from common.checkpoints.model_weights import load_weights
from common.errors import UserError
from common.run_directory.finished_model import model_folder
from common.run_directory.init_from import weights_file
from common.storage import files

FACTS = {
    "arguments": {"in_features": 12, "hidden_sizes": [5], "classes": 3, "dropout": 0.5},
    "class_names": ["a", "b", "c"],
    "channels": 3,
    "image_size": 2,
    "mean": [0.1, 0.2, 0.3],
    "std": [0.5, 0.25, 0.2],
}


class MLP(nn.Module):
    """A model that is built from arguments, like a recipe's."""

    def __init__(
        self, in_features: int, hidden_sizes: list[int], classes: int, dropout: float
    ) -> None:
        super().__init__()
        sizes = [in_features, *hidden_sizes]
        layers = [nn.Linear(*pair) for pair in pairwise(sizes)]
        self.body = nn.Sequential(*layers, nn.ReLU(), nn.Dropout(dropout))
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images.flatten(1)))


class Convolutions(nn.Module):
    """A model with kernels and batch norm."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2)
        )
        self.head = nn.Linear(8, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images).mean((2, 3)))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, nn.Module]:
    """Return a run's directory that contains a model, and the model."""
    torch.manual_seed(0)
    model = MLP(12, [5], 3, 0.5)
    save_model(tmp_path / "model", model, FACTS, card="", skeleton=None)
    return tmp_path, model


def load_model(model_class: type[Any], path: str | Path) -> Any:
    """Build a model from its saved arguments, and load its weights."""
    facts = json.loads((model_folder(path) / "model.json").read_text())
    model = model_class(**facts["arguments"])
    load_weights(model, path)
    return model.eval()


def test_model_predicts_after_loading(saved: tuple[Path, nn.Module]) -> None:
    """Loaded from the run or from its `model` folder, it gives the same outputs."""
    directory, model = saved
    images = torch.randn(4, 3, 2, 2)
    for path in (directory, directory / "model", str(directory)):
        loaded = load_model(MLP, path)
        assert torch.equal(loaded(images), model.eval()(images))


def test_channels_last_weights_survive(tmp_path: Path) -> None:
    """Convolutions on a CPU keep their weights in this layout."""
    model = Convolutions(3, 4).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    arguments = {"channels": 3, "classes": 4}
    model(torch.randn(8, 3, 8, 8))  # batch norm's statistics are part of it
    save_model(tmp_path / "model", model, FACTS | {"arguments": arguments}, card="", skeleton=None)
    loaded = load_model(Convolutions, tmp_path)
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(loaded(images), model.eval()(images))


def test_damaged_weights_are_named(saved: tuple[Path, nn.Module]) -> None:
    """The message has the path of the truncated file."""
    directory, model = saved
    path = directory / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(UserError) as error:
        load_weights(model, directory)
    assert f"{path} has changed since" in error.value.message
    with pytest.raises(UserError, match="SHA-256"):
        weights_file(path)


def test_weights_that_do_not_fit_are_refused(saved: tuple[Path, nn.Module]) -> None:
    """The message has the tensor and both shapes."""
    directory, _ = saved
    with pytest.raises(UserError) as error:
        load_weights(MLP(12, [6], 3, 0.5), directory)
    assert "body.0" in error.value.message
    assert "5" in error.value.message
    assert "6" in error.value.message


@pytest.mark.parametrize("missing", ["model.safetensors", "model.json"])
def test_unfinished_run_has_no_model(saved: tuple[Path, nn.Module], missing: str) -> None:
    """The message says what to pass instead."""
    directory, _ = saved
    (directory / "model" / missing).unlink()
    with pytest.raises(UserError) as error:
        model_folder(directory)
    assert "--init-from" in error.value.message
    assert str(directory) in error.value.message


def test_facts_beside_the_weights_are_json(saved: tuple[Path, nn.Module]) -> None:
    """Any program can read them."""
    directory, _ = saved
    facts = json.loads((directory / "model" / "model.json").read_text())
    weights = (directory / "model" / "model.safetensors").read_bytes()
    assert facts == FACTS | {"weights_sha256": hashlib.sha256(weights).hexdigest()}


class TiedModel(nn.Module):
    """A model with tied weights, and a frozen layer under an adapter."""

    def __init__(self, is_tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down = nn.Linear(4, 2, bias=False)
        self.up = nn.Linear(2, 4, bias=False)
        self.head = nn.Linear(4, 7, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        return self.head(self.base(hidden) + self.up(self.down(hidden)))


def test_tied_weights_and_frozen_weights_are_exported(tmp_path: Path) -> None:
    """Tied weights are stored once, and the model ties them again."""
    model = TiedModel()
    tokens = torch.arange(7)
    save_model(tmp_path / "model", model, {"class_names": []}, card="", skeleton=None)
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert stored.keys() == model.state_dict().keys() - {"head.weight"}
    loaded = TiedModel()
    load_weights(loaded, tmp_path)
    assert loaded.head.weight is loaded.embedding.weight
    assert torch.equal(loaded(tokens), model(tokens))
    with pytest.raises(UserError, match=r"it has no head\.weight, which this model needs"):
        load_weights(TiedModel(is_tied=False), tmp_path)


def test_untied_equal_weights_load_into_tied_ones(tmp_path: Path) -> None:
    """Another program may write them under either name or both."""
    model = TiedModel()
    save_model(tmp_path / "model", model, {}, card="", skeleton=None)
    path = tmp_path / "model" / "model.safetensors"
    (tmp_path / "model" / "model.json").write_text("{}")  # another program writes no digest
    stored = load_file(path)
    weight = stored.pop("embedding.weight")
    for names in (("head.weight",), ("head.weight", "embedding.weight")):
        save_file(stored | {name: weight.clone() for name in names}, path)
        loaded = TiedModel()
        load_weights(loaded, tmp_path)
        assert torch.equal(loaded.head.weight, model.head.weight)


def test_files_are_copied_beside_the_model(tmp_path: Path) -> None:
    """An example is a tokenizer. Their source is not recorded."""
    tokenizer = tmp_path / "tokenizer"
    (tokenizer / "deep").mkdir(parents=True)
    (tokenizer / "vocab.txt").write_text("[PAD]")
    (tokenizer / "deep" / "merges.txt").write_text("a b")
    (tokenizer / "model.json").write_text("not this one")
    save_model(
        tmp_path / "model",
        nn.Linear(1, 1),
        {"name": "tiny", "files": tokenizer},
        card="",
        skeleton=None,
    )
    assert (tmp_path / "model" / "vocab.txt").read_text() == "[PAD]"
    assert (tmp_path / "model" / "deep" / "merges.txt").read_text() == "a b"
    assert json.loads((tmp_path / "model" / "model.json").read_text())["name"] == "tiny"
    save_model(tmp_path / "plain", nn.Linear(1, 1), {"files": None}, card="", skeleton=None)
    assert len([*(tmp_path / "plain").iterdir()]) == 2


def test_transformers_model_with_tied_weights_is_loaded(tmp_path: Path) -> None:
    """Both `from_pretrained` and `load_weights` read the folder."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                        intermediate_size=8, max_position_embeddings=8)  # fmt: skip
    model = BertForMaskedLM(config).eval()
    save_model(tmp_path / "model", model, {}, card="", skeleton=None)
    tokens = torch.arange(6)[None]
    other = BertForMaskedLM(config).eval()
    load_weights(other, tmp_path)
    for loaded in (other, BertForMaskedLM.from_pretrained(tmp_path / "model").eval()):
        assert (
            loaded.cls.predictions.decoder.weight is loaded.bert.embeddings.word_embeddings.weight
        )
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("was_enabled", [False, True])
def test_export_of_a_transformers_model_shows_no_bar(
    was_enabled: bool, is_sharded: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The user's own setting is as before."""
    from transformers import BertConfig, BertForTokenClassification
    from transformers.utils import logging

    config = BertConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                        intermediate_size=8, max_position_embeddings=8)  # fmt: skip
    model = BertForTokenClassification(config)
    before = logging.is_progress_bar_enabled()
    set_bar = logging.enable_progress_bar if was_enabled else logging.disable_progress_bar
    set_bar()
    try:
        skeleton = BertForTokenClassification(config).to("meta") if is_sharded else None
        save_model(tmp_path / "model", model, {}, card="", skeleton=skeleton)
        assert logging.is_progress_bar_enabled() == was_enabled
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()
    assert capfd.readouterr().err == ""


def test_export_is_atomic(saved: tuple[Path, nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a new model is complete, the old one stays. The next attempt replaces it."""
    directory, model = saved
    newer = MLP(12, [5], 3, 0.5)

    def fail(path: Path) -> None:
        raise OSError(28, "No space left on device")

    for module, name in ((export, "write_tensors"), (files, "sync")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda path, *rest: fail(path))
            with pytest.raises(UserError, match="No space") as failed:
                save_model(directory / "model", newer, FACTS, card="", skeleton=None)
        assert failed.value.resumable, "a full disk is no mistake of the user's"
        assert torch.equal(load_model(MLP, directory).body[0].weight, model.body[0].weight)
    with pytest.raises(TypeError):
        save_model(directory / "model", newer, {"names": object()}, card="", skeleton=None)
    save_model(directory / "model", newer, FACTS, card="", skeleton=None)
    assert torch.equal(load_model(MLP, directory).body[0].weight, newer.body[0].weight)
    assert [path.name for path in directory.iterdir()] == ["model"]


def test_flipped_bit_of_an_exported_model_is_refused(saved: tuple[Path, nn.Module]) -> None:
    """Prediction and `--init-from` compare the digest. Published weights have none."""
    directory, model = saved
    path = directory / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    calls = (model_folder, weights_file, lambda run: load_weights(model, run))
    # A model of Transformers has a config.json as well, as published weights do.
    (directory / "model" / "config.json").write_text("{}")
    places = [*((call, directory) for call in calls), (weights_file, path)]
    for load, place in [*places, (weights_file, path.parent)]:
        with pytest.raises(UserError, match="its SHA-256 is not the one in"):
            load(place)
    (directory / "model" / "model.json").write_text(json.dumps(FACTS))
    load_weights(model, directory)
    assert weights_file(path) == path
