"""What is advised where memory ran out."""

from __future__ import annotations

import pytest

from common.config import TrainingConfig
from common.training.batch_size import out_of_memory_advice


@pytest.mark.parametrize("data", [0.0, 300.0])
def test_advice_names_the_data_that_lie_on_a_gpu(data: float) -> None:
    """With half the batch, and only where they take of its memory."""
    said = out_of_memory_advice(TrainingConfig(batch_size=8), None, 1000.0, data)
    assert "--batch-size 4 --gradient-accumulation-steps 2" in said
    placed = "The data take 300 of them, and none with --data-placement workers."
    assert (placed in said) == (data > 0)
