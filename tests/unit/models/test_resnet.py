"""Names and shapes of the ResNets' weights: those of the published models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.resnet import ResNet

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
