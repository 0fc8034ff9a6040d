"""What `--auto-batch-size` changes once a size is chosen, and its message if the loss fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from common.config import TrainingConfig
from common.errors import LostProcessError, UserError
from common.lifecycle.resolution import ConfigResolution
from common.lifecycle.trying_loss import fit_batch_size, use_batch_size


def test_chosen_size_takes_effect_everywhere() -> None:
    """The flags, the Accelerator, the meters and the loaders of all splits get it."""
    config = TrainingConfig(batch_size=16, gradient_accumulation_steps=8)
    accumulations: list[int] = []
    cuts: list[tuple[int, int]] = []
    accelerator = SimpleNamespace(gradient_accumulation_steps=8)
    context: Any = SimpleNamespace(
        flag_resolution=ConfigResolution(config),
        accelerator=accelerator,
        meters=SimpleNamespace(use_accumulation=accumulations.append),
    )
    loader = SimpleNamespace(cut_into=lambda *cut: cuts.append(cut))
    loaded: Any = SimpleNamespace(loaders={"train": loader, "test": loader})
    use_batch_size(context, loaded, 32, 4)
    assert (config.batch_size, config.gradient_accumulation_steps) == (32, 4)
    assert accelerator.gradient_accumulation_steps == 4
    assert accumulations == [4]
    assert cuts == [(32, 4), (32, 4)]


def fit_with_error(error: Exception, processes: int) -> None:
    """Try sizes with a loss that raises an error."""

    def compute_loss(model: nn.Module, batch: Any) -> Any:
        raise error

    config = TrainingConfig(batch_size=4, gradient_accumulation_steps=1)
    context: Any = SimpleNamespace(
        config=config,
        accelerator=SimpleNamespace(num_processes=processes, device=torch.device("cpu")),
    )
    loader = SimpleNamespace(
        device=torch.device("cpu"),
        order=SimpleNamespace(lengths=None),
        samples=range(8),
        batch_of=lambda indices: {"rows": torch.ones(len(indices), 3)},
    )
    model = nn.Linear(3, 1)
    kept: Any = SimpleNamespace(bare_model=model, optimizer=torch.optim.SGD(model.parameters()))
    loaded: Any = SimpleNamespace(loaders={"train": loader})
    fit_batch_size(context, loaded, kept, compute_loss, couples_samples=False)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("error", [KeyError("labels"), ValueError("two rows"), TypeError("None")])
def test_loss_that_fails_on_a_batch_of_the_loader_ends_in_a_sentence(
    error: Exception, processes: int
) -> None:
    """The loop may add labels to a batch. The sentence names the error and its line."""
    with pytest.raises(UserError) as ended:
        fit_with_error(error, processes)
    assert "a batch as the loader yields it" in ended.value.problem
    assert "in test_trying_loss.py, line " in ended.value.problem
    assert f"({type(error).__name__}: {error})" in ended.value.problem
    assert "--no-auto-batch-size" in ended.value.advice


def test_lost_process_and_exhausted_memory_keep_their_meaning() -> None:
    with pytest.raises(LostProcessError):
        fit_with_error(LostProcessError("gone"), 1)
    # The trials take it as "does not fit". Before them, on two processes, it passes unchanged.
    with pytest.raises(torch.OutOfMemoryError):
        fit_with_error(torch.OutOfMemoryError("CUDA out of memory. Tried"), 2)
