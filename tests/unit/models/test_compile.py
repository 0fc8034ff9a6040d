"""`--compile`: what is compiled, and what runs as it was written."""

from __future__ import annotations

from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from common.config import TrainingConfig
from common.errors import UserError
from common.models import compile as compile_module
from common.models.compile import as_written, compile_layers, compile_model, is_compiled
from tests.cuda_stand_in import Cuda


class Small(torch.nn.Module):
    """A model of one's own: a layer of torch's by itself is never compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = torch.nn.Linear(3, 2), torch.nn.Dropout(0.5)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return a linear map, dropped in part while training."""
        return self.dropout(self.layer(values))


def test_evaluation_of_a_compiled_model_compiles_nothing() -> None:
    """Neither for evaluation mode nor for a smaller last batch; training's code is kept."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = Small()
    model.compile(dynamic=False, backend=backend)
    assert is_compiled(model)
    model(torch.ones(4, 3))
    assert len(graphs) == 1
    model.eval()
    with torch.inference_mode(), as_written(model):
        for size in (4, 3):
            values = torch.ones(size, 3)
            assert torch.equal(model(values), model.layer(values))
    model.train()
    model(torch.ones(4, 3))
    assert len(graphs) == 1


def test_model_compiled_for_the_host_takes_no_graphs_of_a_gpu() -> None:
    """On a CPU it is compiled in the default mode, whatever the accumulation is."""
    for accumulation in (1, 2):
        model = Small()
        compile_model(model, TrainingConfig(gradient_accumulation_steps=accumulation))
        assert is_compiled(model)


@pytest.mark.parametrize(
    ("processes", "accumulation", "mode"),
    [("1", 1, "reduce-overhead"), ("2", 1, None), ("1", 2, None)],
)
def test_graphs_of_a_gpu_are_for_one_process(
    processes: str,
    accumulation: int,
    mode: str | None,
    cuda: Cuda,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And without accumulation; that there are none is said."""
    monkeypatch.setenv("WORLD_SIZE", processes)
    model = Small()
    chosen = create_autospec(model.compile)
    monkeypatch.setattr(model, "compile", chosen)
    compile_model(model, TrainingConfig(gradient_accumulation_steps=accumulation))
    chosen.assert_called_once_with(dynamic=False, mode=mode)
    assert ("without CUDA graphs" in capsys.readouterr().out) == (mode is None)


def test_device_that_nothing_is_compiled_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sentence, before the first batch; Inductor would raise in the middle of it."""
    monkeypatch.setattr(compile_module, "default_device", lambda: torch.device("lazy"))
    model = Small()
    for compile_it in (
        lambda: compile_model(model, TrainingConfig()),
        lambda: compile_layers([model]),
    ):
        with pytest.raises(UserError, match="does not support lazy: leave out --compile"):
            compile_it()
    assert not is_compiled(model)
    monkeypatch.setattr(compile_module, "default_device", lambda: torch.device("mps"))
    compile_layers([model])
    assert is_compiled(model)
