"""How often the ranks ask each other whether to stop."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.training.stop import Agreement


def test_ranks_ask_about_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second look on, whatever an update takes, and also where that changes."""
    clock = 0.0
    monkeypatch.setattr("common.training.stop.time", SimpleNamespace(perf_counter=lambda: clock))
    ranks: Any = SimpleNamespace(
        num_processes=2, device=torch.device("cpu"), reduce=lambda mine, _: 2 * mine
    )
    agreement = Agreement(ranks, Path(), failure=lambda: None)
    asked = []
    for global_step in range(1, 2001):
        clock += 0.01 if global_step <= 1000 else 0.1
        if global_step % agreement.every == 0:
            asked.append(clock)
            agreement.check(global_step)
    assert asked[:2] == pytest.approx([0.01, 0.02])
    gaps = [after - before for before, after in itertools.pairwise(asked[2:])]
    assert sum(gap > 1.5 for gap in gaps) <= 1, "but for the one in which updates get slower"
    assert min(gaps) > 0.1
    assert max(gaps) < 10
    assert not agreement.stopping
