"""What `--auto-batch-size` changes in a run once a size is chosen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from common.config import TrainingConfig
from common.lifecycle.resolution import ConfigResolution
from common.lifecycle.trying_loss import use_batch_size


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
