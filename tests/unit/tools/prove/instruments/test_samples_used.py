"""The instrument that observes the rows of a batch that a model uses."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from common.tools.prove.instruments.samples_used import SampleObserver
from common.tools.prove.observation.session import Session


def test_an_observed_model_can_be_copied(tmp_path: Path) -> None:
    """`examples/lora.py` copies its model. A session can't be copied, because it has a file."""
    with (tmp_path / "notes").open("wb") as file:
        session = Session(folder=tmp_path, launch=0, rank=0, file=file)  # type: ignore[arg-type]
        model = nn.Linear(2, 1)
        run: Any = SimpleNamespace(kept=SimpleNamespace(bare_model=model))
        SampleObserver(session).around_start(lambda run: None, run)
        duplicate = copy.deepcopy(model)
        rows = torch.ones(3, 2)
        assert torch.equal(duplicate(rows), model(rows))
