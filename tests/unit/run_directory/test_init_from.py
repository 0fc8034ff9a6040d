"""Initial weights of a run, a folder or a file: new heads for new classes, and timm's settings."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from common.checkpoints.export import save_model
from common.checkpoints.initial_weights import keep_initial, load_initial
from common.data.images import load_images
from common.data.sources import find_named
from common.errors import UserError
from common.run_directory import init_from
from common.run_directory.init_from import initial_facts, initial_shapes, weights_file
from common.run_directory.model_records import ImageFormat, InitialFacts
from recipes.resnet import ResNet
from tests.local_data import write_image_folder
from tests.own_errors import require_no_own_class

MEAN = [0.485, 0.456, 0.406]
STD = [0.229, 0.224, 0.225]


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Return a folder of weights and a config.json, as timm publishes them."""
    folder = tmp_path / "published"
    folder.mkdir()
    save_file(ResNet("resnet18", 3, 7, 1000).state_dict(), folder / "model.safetensors")
    settings: dict[str, Any] = {"input_size": [3, 20, 20], "mean": MEAN, "std": STD}
    config = {"architecture": "resnet18", "num_classes": 1000, "pretrained_cfg": settings}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def config(source: Path, **values: Any) -> SimpleNamespace:
    flags = {"init_from": str(source), "resume": None, "evaluate_only": False}
    return SimpleNamespace(**flags | values)


def test_published_weights_load_except_for_the_head(published: Path, tmp_path: Path) -> None:
    """The head of 1,000 other classes stays new. A resume uses the run's copy of the weights."""
    for source in (published, published / "model.safetensors"):
        run = tmp_path / f"run-{source.name}"
        run.mkdir()
        model = ResNet("resnet18", 3, 7, 4)
        shapes = initial_shapes(str(source))
        head = model.fc.weight.clone()
        load_initial(model, config(source), list("abcd"))
        keep_initial(config(source, evaluate_only=True), run)
        keep_initial(config(source, resume="auto"), run)
        assert not (run / "initial").exists()
        keep_initial(config(source), run)
        assert torch.equal(model.fc.weight, head)
        resumed = ResNet("resnet18", 3, 7, 4)
        load_initial(resumed, config(run / "initial", resume="auto"), list("abcd"))
        for name, value in model.state_dict().items():
            if not name.startswith("fc."):
                assert torch.equal(value, resumed.state_dict()[name])
                assert shapes[name] == tuple(value.shape)


@pytest.mark.parametrize("contents", ["{", "[]", "{}", '{"input_size": [3, 0, 0]}'])
def test_damaged_facts_of_published_weights_are_refused(contents: str, published: Path) -> None:
    """The file of weights can still be used without its facts, so the advice names it."""
    (published / "config.json").write_text(contents)
    with pytest.raises(UserError, match=r"config\.json") as refused:
        initial_facts(str(published))
    require_no_own_class(refused.value)
    assert refused.value.advice == f"pass --init-from {published / 'model.safetensors'}"
    assert initial_facts(str(published / "model.safetensors")) == InitialFacts()


@pytest.mark.parametrize("has_same_cache", [True, False])
def test_rank_on_another_machine_downloads_the_model_itself(
    published: Path, monkeypatch: pytest.MonkeyPatch, has_same_cache: bool
) -> None:
    """Rank 0 names the folder in its own cache, which other machines need not have."""
    downloads: list[str] = []

    def snapshot_download(name: str, **options: object) -> str:
        downloads.append(name)
        return str(published)

    folder_of_rank_zero = published if has_same_cache else published / "nowhere"
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr(init_from, "ask_rank_zero", lambda question: str(folder_of_rank_zero))
    name = f"owner/resnet-{has_same_cache}"  # a name for each case, because results are cached
    assert weights_file(name) == published / "model.safetensors"
    assert downloads == ([] if has_same_cache else [name])


def test_damaged_facts_of_a_finished_model_are_refused(published: Path) -> None:
    """A model is copied again or replaced. A new run of its recipe would not help."""
    (published / "model.json").write_text("{")
    with pytest.raises(UserError, match=r"model\.json can't be read") as refused:
        initial_facts(str(published))
    advice = "copy the model's folder again from where it came, or pass another model"
    assert refused.value.advice == advice


def test_shape_that_does_not_fit_is_named(published: Path, tmp_path: Path) -> None:
    """One sentence names the first tensor whose shape does not fit."""
    with pytest.raises(UserError, match=r"conv1\.weight has the shape \(64, 3, 7, 7\) in it"):
        load_initial(ResNet("resnet18", 3, 3, 4), config(published), list("abcd"))
    with pytest.raises(UserError, match="there is no finished model"):
        initial_facts(str(tmp_path))


def test_weights_without_a_head_can_be_loaded(published: Path) -> None:
    """Backbones are published this way."""
    weights = {n: v for n, v in load_file(published / "model.safetensors").items() if n[:2] != "fc"}
    save_file(weights, published / "model.safetensors")
    model = ResNet("resnet18", 3, 7, 4)
    load_initial(model, config(published), list("abcd"))
    assert torch.equal(model.bn1.running_var, weights["bn1.running_var"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"mean": [0.5]},
        {"std": [0.1] * 4},
        {"std": [1.0, 0.0, 1.0]},
        {"mean": None},
        {"std": "x"},
        {"input_size": [3, 0, 0]},
        {"input_size": [3, -5, -5]},
        {"input_size": 224},
        {"input_size": [3, 224]},
        {"input_size": [3, 10**9, 10**9]},
    ],
)
def test_invalid_settings_of_weights_are_refused(
    wrong: Any, published: Path, tmp_path: Path
) -> None:
    """This happens before training uses them."""
    saved = json.loads((published / "config.json").read_text())
    saved["pretrained_cfg"] |= wrong
    (published / "config.json").write_text(json.dumps(saved))
    folder = write_image_folder(tmp_path / "data", ["a", "b"], per_class=3)
    flags: dict[str, Any] = {"image_column": None, "label_column": None, "dtype": torch.float32}
    with pytest.raises(UserError, match="published") as refused:
        load_images(find_named(str(folder), None), image_size=9, init_from=str(published), **flags)
    require_no_own_class(refused.value)


def test_head_is_kept_only_for_the_same_class_names(tmp_path: Path) -> None:
    """Equally many classes of other names need a new head. An evaluation replaces nothing."""
    trained = ResNet("resnet18", 1, 3, 2)
    run = tmp_path / "run"
    save_model(run / "model", trained, {"class_names": ["a", "b"]}, card="", skeleton=None)
    for names, is_kept in ((["a", "b"], True), (["b", "c"], False)):
        model = ResNet("resnet18", 1, 3, 2)
        load_initial(model, config(run), names)
        assert torch.equal(model.fc.weight, trained.fc.weight) == is_kept
        assert torch.equal(model.conv1.weight, trained.conv1.weight)  # type: ignore[arg-type]
    model = ResNet("resnet18", 1, 3, 2)
    load_initial(model, config(run, evaluate_only=True), ["b", "c"])
    assert torch.equal(model.fc.weight, trained.fc.weight)


def test_images_follow_the_published_settings(published: Path, tmp_path: Path) -> None:
    """Grey images become colour, and the size is the published one unless a flag states another."""
    for name in ("a", "b"):
        for split in ("train", "test"):
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for number in range(2):
                pixels = np.full((9, 9), 100 + number, np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    source = find_named(str(tmp_path / "data"), None)
    flags: dict[str, Any] = {"image_column": None, "label_column": None, "dtype": torch.float32}
    data = load_images(source, image_size=None, init_from=str(published), **flags)
    expected = ImageFormat(channels=3, image_size=20, mean=MEAN, std=STD)
    assert data.image_format == expected
    images = data.splits["train"].fetch(torch.tensor([0]), None)["images"]
    assert images.shape == (1, 20, 20, 3)
    assert images.float().mean().item() == pytest.approx(100, abs=1)
    assert load_images(source, image_size=9, init_from=str(published), **flags).image_size == 9


class TwoHeads(nn.Module):
    """A model with a head for classes and a second head."""

    def __init__(self, classes: int, others: int = 1, hidden: int = 8) -> None:
        super().__init__()
        self.body = nn.Linear(4, hidden)
        self.classes = nn.Linear(hidden, classes)
        self.figure = nn.Linear(hidden, others)


@pytest.mark.parametrize(
    ("classes", "names", "new_layers"),
    [
        (3, list("abc"), set()),
        (3, list("xyz"), {"classes"}),
        (5, list("vwxyz"), {"classes"}),
        (3, None, set()),
    ],
)
def test_only_the_class_head_is_replaced(
    classes: int, names: list[str] | None, new_layers: set[str], tmp_path: Path
) -> None:
    """The number of outputs and the class names tell which of two heads it is."""
    trained = TwoHeads(3)
    run = tmp_path / "run"
    save_model(run / "model", trained, {"class_names": list("abc")}, card="", skeleton=None)
    model = TwoHeads(classes)
    load_initial(model, config(run), names)
    for name in ("body", "classes", "figure"):
        is_kept = torch.equal(getattr(model, name).weight, getattr(trained, name).weight)
        assert is_kept == (name not in new_layers), name


def test_hidden_layer_of_another_width_is_refused(tmp_path: Path) -> None:
    """A hidden layer is not taken for a head, though it is as wide as the number of classes."""
    run = tmp_path / "run"
    save_model(
        run / "model", TwoHeads(5, hidden=8), {"class_names": list("vwxyz")}, card="", skeleton=None
    )
    with pytest.raises(
        UserError, match=r"does not fit this model, because body\.bias has the shape"
    ):
        load_initial(TwoHeads(5, hidden=5), config(run), list("vwxyz"))


def test_weights_of_another_architecture_are_refused(published: Path) -> None:
    """The message says so instead of naming the first missing tensor."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    with pytest.raises(
        UserError, match=r"of another model: this model has none of its \d+ tensors \("
    ):
        load_initial(model, config(published), list("abcd"))
