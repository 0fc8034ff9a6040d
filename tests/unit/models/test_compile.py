"""`--compile`: which code is compiled, and which is not."""

from __future__ import annotations

from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from common.config import TrainingConfig
from common.errors import UserError
from common.models import compile as compile_module
from common.models.compile import as_written, compile_layers, compile_model, is_compiled

# The first compilation imports Inductor, and with it modules of torch that use what torch itself
# calls deprecated.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:`torch\.jit\.script_method` is deprecated:DeprecationWarning"
)


class Small(torch.nn.Module):
    """A user's model. torch never compiles one of its own layers by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return a linear map with dropout."""
        return self.dropout(self.layer(values))


def test_evaluation_of_a_compiled_model_compiles_nothing() -> None:
    """Neither evaluation mode nor a smaller batch compiles again, and training keeps its code."""
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


def test_cpu_model_is_compiled_without_cuda_graphs() -> None:
    """Accumulation makes no difference."""
    for accumulation in (1, 2):
        model = Small()
        compile_model(model, TrainingConfig(gradient_accumulation_steps=accumulation))
        assert is_compiled(model)


@pytest.mark.parametrize(
    ("processes", "accumulation", "mode"),
    [("1", 1, "reduce-overhead"), ("2", 1, None), ("1", 2, None)],
)
@pytest.mark.usefixtures("cuda")
def test_cuda_graphs_are_for_one_process_without_accumulation(
    processes: str,
    accumulation: int,
    mode: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With several processes or accumulation, a line says that there are no CUDA graphs."""
    monkeypatch.setenv("WORLD_SIZE", processes)
    model = Small()
    chosen = create_autospec(model.compile)
    monkeypatch.setattr(model, "compile", chosen)
    compile_model(model, TrainingConfig(gradient_accumulation_steps=accumulation))
    chosen.assert_called_once_with(dynamic=False, mode=mode)
    assert ("does not use CUDA graphs" in capsys.readouterr().out) == (mode is None)


def test_device_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence comes before the first batch, where Inductor would raise an error."""
    monkeypatch.setattr(compile_module, "default_device", lambda: torch.device("lazy"))
    model = Small()
    for compile_it in (
        lambda: compile_model(model, TrainingConfig()),
        lambda: compile_layers([model]),
    ):
        with pytest.raises(UserError, match="lazy: leave --compile out; on a resume"):
            compile_it()
    assert not is_compiled(model)
    monkeypatch.setattr(compile_module, "default_device", lambda: torch.device("mps"))
    compile_layers([model])
    assert is_compiled(model)
