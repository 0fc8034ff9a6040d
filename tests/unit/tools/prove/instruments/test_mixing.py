"""The instrument that finds modules whose outputs mix the samples of a micro-batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from common.tools.prove.instruments.mixing import MixingObserver
from common.tools.prove.observation.session import Session

FEATURES = 4
SAMPLES = 6


class Function(nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.function(features)


class TwoParts(nn.Module):
    """A module with a part that mixes samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Function(lambda features: features - features.mean(0))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.inner(features).relu()


def modules_found(module: nn.Module, tmp_path: Path, **config: bool) -> list[str]:
    """Return the classes that the instrument names for a layer, the module, and another layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), module, nn.Linear(FEATURES, 2))
    settings = {"compile": False, "gradient_checkpointing": False} | config
    progress = SimpleNamespace(global_step=0)
    run: Any = SimpleNamespace(
        config=SimpleNamespace(**settings),
        context=SimpleNamespace(parts=SimpleNamespace(shared={"model": model})),
        progress=progress,
    )
    session = Session(folder=tmp_path, launch=0, rank=0, run=run, sample_indices=[*range(SAMPLES)])
    observer = MixingObserver(session)
    observer.around_start(lambda run: None, run)
    model(torch.randn(SAMPLES, FEATURES))
    observer.around_record(lambda run: None, run)
    model(torch.randn(SAMPLES, FEATURES))  # later micro-batches are not watched
    path = tmp_path / "launch-0-rank-0.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["module_class"] for line in lines]


@pytest.mark.parametrize(
    "function",
    [
        lambda features: features - features.mean(0),
        lambda features: features.softmax(0),
        lambda features: features.cumsum(0).flip(0),
        lambda features: features + features.roll(1, 0),
        lambda features: features * (features @ features.T).sum(1, keepdim=True),
        lambda features: F.batch_norm(features, None, None, training=True),
    ],
)
def test_modules_that_mix_samples_are_named(
    function: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    assert modules_found(Function(function), tmp_path) == ["Function"]


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(FEATURES),
        nn.Softmax(1),
        nn.Dropout(0.5),
        nn.GroupNorm(2, FEATURES),
        nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU()),
    ],
    ids=lambda module: type(module).__name__,
)
def test_modules_that_keep_samples_apart_are_not_named(module: nn.Module, tmp_path: Path) -> None:
    assert modules_found(module, tmp_path) == []


def test_innermost_module_is_named(tmp_path: Path) -> None:
    assert modules_found(TwoParts(), tmp_path) == ["Function"]


def test_batch_norm_and_modules_around_it_are_left_out(tmp_path: Path) -> None:
    """Another instrument records batch norms."""
    assert modules_found(nn.Sequential(nn.BatchNorm1d(FEATURES)), tmp_path) == []


@pytest.mark.parametrize("flag", ["compile", "gradient_checkpointing"])
def test_compiled_and_recomputed_models_are_left_alone(flag: str, tmp_path: Path) -> None:
    assert modules_found(TwoParts(), tmp_path, **{flag: True}) == []


def test_time_steps_are_not_samples(tmp_path: Path) -> None:
    """A recurrent layer has time in its first dimension unless `batch_first` is set."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.GRU(FEATURES, FEATURES)

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            by_time = features[None].expand(SAMPLES, -1, -1)  # [time, samples, features]
            return self.layers(by_time)[0][-1]

    assert modules_found(Recurrent(), tmp_path) == []
