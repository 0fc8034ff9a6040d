"""Names and shapes of the ResNets' weights: those of the published models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from recipes.resnet import Config, ResNet, build_optimizer

# Names and shapes, in order, of the `state_dict()` of torchvision 0.29.2's `resnet18()`,
# `resnet34()` and `resnet50()`. Those of timm 1.0.31 are the same.
PUBLISHED = json.loads(Path(__file__).with_name("published_resnets.json").read_text())


@pytest.mark.parametrize("name", [*ResNet.DEPTHS])
def test_weights_have_the_published_names_and_shapes(name: str) -> None:
    """Published weights therefore load without a conversion."""
    state = ResNet(name, channels=3, kernel=7, classes=1000).state_dict()
    shapes = {key: list(value.shape) for key, value in state.items()}
    assert shapes == PUBLISHED[name]
    assert [*shapes] == [*PUBLISHED[name]]


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
@pytest.mark.parametrize("name", [*ResNet.DEPTHS])
def test_optimizer_updates_each_parameter_once(name: str, optimizer: str) -> None:
    """None is missing, and none comes twice."""
    model = ResNet(name, channels=3, kernel=3, classes=10)
    config = Config(optimizer=optimizer)  # type: ignore[arg-type]
    groups = build_optimizer(model, config).param_groups
    updated = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(updated) == sorted(id(parameter) for parameter in model.parameters())


def test_muon_makes_only_filters_before_a_batch_norm_orthogonal() -> None:
    """Their scale does not matter, which Muon relies on."""
    model = ResNet("resnet18", channels=3, kernel=3, classes=10)
    first_group, *other_groups = build_optimizer(model, Config(optimizer="muon")).param_groups
    assert first_group["orthogonal"]
    assert not any(group["orthogonal"] for group in other_groups)
    convolutions = [m.weight for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert {id(p) for p in first_group["params"]} == {id(p) for p in convolutions}
