"""The final model on disk: whole, used again, and refused in words where it does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from common.errors import UserError
from common.export import ImagePreprocessor, load_model, load_weights, model_folder, save_model
from recipes.mnist_mlp import MLP
from recipes.resnet import ResNet

FACTS = {
    "arguments": {"in_features": 12, "hidden_sizes": [5], "classes": 3, "dropout": 0.5},
    "class_names": ["a", "b", "c"],
    "channels": 3,
    "image_size": 2,
    "mean": [0.1, 0.2, 0.3],
    "std": [0.5, 0.25, 0.2],
}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, nn.Module]:
    """A run's directory with a model in it, and the model."""
    torch.manual_seed(0)
    model = MLP(12, [5], 3, 0.5)
    save_model(tmp_path / "model", model, FACTS)
    return tmp_path, model


def test_model_predicts_after_loading(saved: tuple[Path, nn.Module]) -> None:
    """Loaded from the run or from its `model` folder, a model gives the same outputs."""
    directory, model = saved
    images = torch.randn(4, 3, 2, 2)
    for path in (directory, directory / "model", str(directory)):
        loaded, preprocess = load_model(MLP, path)
        assert not loaded.training
        assert torch.equal(loaded(images), model.eval()(images))
        assert preprocess.class_names == ["a", "b", "c"]


def test_resnet_weights_are_plain(tmp_path: Path) -> None:
    """Weights in the layout of convolutions on a CPU are saved and read again."""
    model = ResNet("resnet18", 3, 8, 4).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    arguments = {"name": "resnet18", "channels": 3, "image_size": 8, "classes": 4}
    save_model(tmp_path / "model", model, FACTS | {"arguments": arguments})
    loaded, _ = load_model(ResNet, tmp_path)
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(loaded(images), model.eval()(images))


def test_preprocessing_is_that_of_training() -> None:
    """An image of any size and mode becomes the normalised batch of one."""
    pixels = np.random.default_rng(0).integers(0, 256, (2, 2, 3), dtype=np.uint8)
    preprocess = ImagePreprocessor(FACTS)
    batch = preprocess(Image.fromarray(pixels))
    expected = (pixels / 255 - np.array(FACTS["mean"])) / np.array(FACTS["std"])
    assert batch.dtype == torch.float32
    np.testing.assert_allclose(batch[0].permute(1, 2, 0).numpy(), expected, rtol=1e-5)
    for other in (Image.new("L", (30, 20)), Image.new("RGBA", (1, 9)), Image.new("1", (2, 2))):
        assert preprocess(other).shape == (1, 3, 2, 2)


def test_damaged_weights_are_named(saved: tuple[Path, nn.Module]) -> None:
    """A truncated file ends in a message with its path."""
    directory, model = saved
    path = directory / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(UserError) as error:
        load_weights(model, directory)
    assert str(path) in error.value.message
    assert "damaged" in error.value.message


def test_another_architecture_is_named(saved: tuple[Path, nn.Module]) -> None:
    """Weights that don't fit end in a message with the tensor and both shapes."""
    directory, _ = saved
    with pytest.raises(UserError) as error:
        load_weights(MLP(12, [6], 3, 0.5), directory)
    assert "body.0" in error.value.message
    assert "5" in error.value.message
    assert "6" in error.value.message


@pytest.mark.parametrize("missing", ["model.safetensors", "model.json"])
def test_unfinished_run_has_no_model(saved: tuple[Path, nn.Module], missing: str) -> None:
    """A run that did not finish is refused with what would do."""
    directory, _ = saved
    (directory / "model" / missing).unlink()
    with pytest.raises(UserError) as error:
        model_folder(directory)
    assert "--init-from" in error.value.message
    assert str(directory) in error.value.message


def test_facts_are_json(saved: tuple[Path, nn.Module]) -> None:
    """What is beside the weights can be read by any program."""
    directory, _ = saved
    assert json.loads((directory / "model" / "model.json").read_text()) == FACTS
