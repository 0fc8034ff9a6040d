"""Two ranks train networks whose layers are frozen and unfrozen at random: a script, not a test.

Each case is drawn from its number, in the same way on both ranks. Each update must have the
gradients of one process that trains on all samples, and both ranks must end with the same bits.

Then a weight is changed on one rank only, and a layer is left out of the loss. Both must end in a
sentence that names the parameter.

python tests/frozen_at_times.py FIRST LAST
"""

import random
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from common.config import TrainingConfig
from common.errors import TrainingError
from common.training.accelerator import build_accelerator
from common.training.unequal_weights import require_equal_weights

WIDTHS = (3, 5, 4, 2)
UPDATES = 5


def build() -> nn.Sequential:
    """Return three linear layers."""
    layers = [nn.Linear(a, b) for a, b in pairwise(WIDTHS)]
    return nn.Sequential(*layers)


def freeze(model: Any, pattern: list[bool]) -> None:
    """Set for each layer whether it requires gradients."""
    for layer, is_trainable in zip(model, pattern, strict=True):
        layer.requires_grad_(is_trainable)


def draw_patterns(drawn: random.Random, count: int) -> list[list[bool]]:
    """Return which layers train in each micro-batch; at least one layer always does."""
    patterns: list[list[bool]] = []
    for _ in range(count):
        if patterns and drawn.random() < 0.6:
            patterns.append(patterns[-1])
            continue
        pattern = [drawn.random() < 0.5 for _ in WIDTHS[1:]]
        patterns.append(pattern if any(pattern) else [False, False, True])
    return patterns


def check(number: int, accelerator: Any) -> None:
    """Train one drawn case, and raise an `AssertionError` if it differs from one process."""
    drawn = random.Random(number)
    accumulation = drawn.choice([1, 1, 2, 3])
    accelerator.gradient_accumulation_steps = accumulation
    accelerator.step = 0  # the number of micro-batches so far
    is_frozen_at_first = [drawn.random() < 0.4 for _ in WIDTHS[1:]]
    patterns = draw_patterns(drawn, UPDATES * accumulation)
    torch.manual_seed(number)
    bare = build()
    reference = build()
    reference.load_state_dict(bare.state_dict())
    samples = torch.randn(UPDATES * accumulation, 2, 4, WIDTHS[0])  # micro-batch, rank, sample
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (bare, reference)]
    freeze(bare, [not frozen for frozen in is_frozen_at_first])
    wrapper, optimizer = accelerator.prepare(bare, optimizers[0])
    kept = id(wrapper)
    for index, pattern in enumerate(patterns):
        freeze(bare, pattern)
        freeze(reference, pattern)
        with accelerator.accumulate(wrapper):
            loss = wrapper(samples[index, accelerator.process_index]).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        (reference(samples[index].flatten(0, 1)).square().mean() / accumulation).backward()
        if (index + 1) % accumulation == 0:
            optimizers[1].step()
            optimizers[1].zero_grad()
    assert id(wrapper) == kept
    for mine, expected in zip(bare.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
    require_equal_weights(accelerator, {"model": bare})
    accelerator._models.clear()
    accelerator._optimizers.clear()


def check_drift(accelerator: Any) -> None:
    """Change one weight on rank 1, and expect the sentence that names it."""
    model = build()
    torch.nn.init.ones_(model[1].weight)
    with torch.no_grad():
        model[1].weight[0, 0] += accelerator.process_index
    other = nn.Linear(2, 2).requires_grad_(False)
    torch.nn.init.zeros_(other.weight)
    torch.nn.init.zeros_(other.bias)
    for layer in (model[0], model[2]):
        for parameter in layer.parameters():
            torch.nn.init.ones_(parameter)
    torch.nn.init.ones_(model[1].bias)
    with pytest.raises(TrainingError) as error:
        require_equal_weights(accelerator, {"other": other, "model": model})
    assert "first in model.1.weight (1 of 8 parameters)" in error.value.message


def check_unused(accelerator: Any) -> None:
    """Leave a layer out of the loss; DDP notices it in the next forward pass."""
    model = build()
    wrapper = accelerator.prepare(model)
    model.forward = lambda samples: model[0](samples)  # type: ignore[assignment]
    accelerator.backward(wrapper(torch.ones(2, WIDTHS[0])).sum())
    with pytest.raises(TrainingError) as error:
        wrapper(torch.ones(2, WIDTHS[0]))
    assert "1.weight got no gradient" in error.value.message
    assert 'ddp={"find_unused_parameters": True}' in error.value.message


def main() -> None:
    """Check all cases; an error names the case that failed."""
    accelerator = build_accelerator(TrainingConfig(mixed_precision="no"))
    first, last = map(int, sys.argv[1:3])
    for number in range(first, last):
        try:
            check(number, accelerator)
        except (Exception, SystemExit) as problem:
            raise AssertionError(f"case {number}: {problem}") from problem
    check_drift(accelerator)
    accelerator.gradient_accumulation_steps = 1
    accelerator.gradient_state._set_sync_gradients(True)
    check_unused(accelerator)
    accelerator.wait_for_everyone()
    print(f"{last - first} cases agree")


if __name__ == "__main__":
    main()
