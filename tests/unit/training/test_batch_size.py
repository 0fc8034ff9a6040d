"""`--auto-batch-size`: what is tried, what all ranks take, and what is said of it."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from common.config import TrainingConfig
from common.errors import TrainingError, UserError
from common.measure.memory import peaks
from common.training import batch_size
from common.training.batch_size import Trial, fit_batch_size, sizes_to_try

CPU = torch.device("cpu")


def fit(
    rates: dict[int, float],
    asked: int = 16,
    accumulation: int = 4,
    others: list[dict[int, float]] | None = None,
    **flags: Any,
) -> tuple[int, list[int]]:
    """Return the size taken and those tried, where sizes have `rates`; 0 does not fit.

    Args:
        others: what other ranks have, which try by themselves.
    """
    sizes = list[int]()

    def run(rates: dict[int, float], gather: Any) -> int:
        def try_size(size: int) -> Trial:
            sizes.append(size)
            rate = rates.get(size, 0.0)
            return Trial(rate, 100.0 * size, has_room=rate > 0)

        config = TrainingConfig(batch_size=asked, gradient_accumulation_steps=accumulation, **flags)
        cut = list[tuple[int, int]]()
        loader: Any = SimpleNamespace(
            device=CPU, samples=range(500), cut_into=lambda *size: cut.append(size)
        )
        accelerator: Any = SimpleNamespace(
            device=torch.device("cpu"),
            num_processes=2,
            gather=gather,
            gradient_accumulation_steps=accumulation,
        )
        before = dict(vars(config))
        size = fit_batch_size(try_size, {"train": loader}, config, accelerator)
        assert vars(config) == before, "the caller resolves the flags"
        assert cut == ([] if size == (asked, accumulation) else [size])
        assert size[0] * size[1] == asked * accumulation
        assert accelerator.gradient_accumulation_steps == size[1]
        return size[0]

    class Gathered(Exception):  # noqa: N818
        pass

    def keep(mine: torch.Tensor) -> torch.Tensor:
        theirs.append(mine)
        raise Gathered

    theirs = list[torch.Tensor]()
    for rank in others or []:
        with pytest.raises(Gathered):
            run(rank, keep)
    sizes.clear()
    return run(rates, lambda mine: torch.cat([mine, *theirs])), sizes


def test_sizes_halve_within_the_update_and_double_within_the_data() -> None:
    """Each divides the update on the way down; upwards the data end it."""
    assert sizes_to_try(16, 64, 150) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert sizes_to_try(12, 36, 20) == [1, 3, 6, 12]
    assert sizes_to_try(7, 7, 7) == [1, 7]


@pytest.mark.parametrize(
    ("rates", "taken", "tried", "flags"),
    [
        # Larger ones pay up to 64, and the update is 64: no accumulation is left.
        ({16: 100, 32: 180, 64: 300, 128: 305}, 64, [16, 32, 64, 128], (64, 1)),
        # What makes other updates is named, and not taken.
        ({16: 10, 32: 20, 64: 40, 128: 80, 256: 160}, 64, [16, 32, 64, 128, 256], (256, 1)),
        # As fast as it gets: the size asked for stays.
        ({16: 100, 32: 105, 64: 900}, 16, [16, 32], (16, 4)),
        # The next does not fit.
        ({16: 100, 32: 180}, 32, [16, 32, 64], (32, 2)),
        # Nor does the one asked for.
        ({4: 30, 2: 20}, 4, [16, 8, 4], (4, 16)),
    ],
)
def test_fastest_size_for_the_same_updates_is_taken(
    rates: dict[int, float],
    taken: int,
    tried: list[int],
    flags: tuple[int, int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What was tried is shown with memory and speed, and the best flags of all are named."""
    assert fit(rates) == (taken, tried)
    said = capsys.readouterr().out
    assert f"fastest --batch-size {flags[0]} --gradient-accumulation-steps {flags[1]}" in said
    assert ("other updates, of 256 samples in place of 64" in said) == (flags[0] == 256)
    for size in tried:
        shown = f"{rates[size]:,.0f}" if size in rates else "does not fit"
        (row,) = [line.split("│") for line in said.splitlines() if f"│ {size:,} " in line[:12]]
        assert [cell.strip() for cell in row[1:4]] == [f"{size:,}", f"{100 * size:,}", shown]


@pytest.mark.parametrize(
    ("rates", "others", "taken"),
    [
        ({16: 100, 32: 200, 64: 400}, {16: 100}, 16),
        ({16: 100, 32: 200, 64: 400}, {4: 10}, 4),
        ({4: 10}, {16: 100, 32: 200}, 4),
        ({16: 100, 32: 200, 64: 400}, {16: 100, 32: 101}, 16),
    ],
)
def test_all_ranks_hold_what_is_taken(
    rates: dict[int, float],
    others: dict[int, float],
    taken: int,
) -> None:
    """And it is the fastest of the slowest rank, wherever each has stopped to try."""
    assert fit(rates, others=[others])[0] == taken
    assert fit(others, others=[rates])[0] == taken


def test_run_that_goes_on_keeps_its_size() -> None:
    """Or a resumed run would be another one by chance; a smaller one is taken where it must."""
    fast = {8: 50.0, 16: 100.0, 32: 200.0}
    assert fit(fast, resume="runs/mine") == (16, [16])
    assert fit({8: 50.0}, resume="runs/mine") == (8, [16, 8])


def test_nothing_fits() -> None:
    """Not one sample: a sentence."""
    with pytest.raises(TrainingError, match="one sample a batch"):
        fit({})


def small_attempt(held: float = math.inf, compiled: bool = False) -> tuple[Trial, nn.Module]:
    """Try 64 samples of 1 MiB on a small model that holds as many."""
    model = nn.Sequential(nn.Linear(2**18, 1, bias=False), nn.BatchNorm1d(1))
    if compiled:
        model.compile(backend=lambda *_: pytest.fail("it was compiled"))
    samples = torch.ones(64, 2**18)

    def compute_loss(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, None]:
        if len(batch) > held:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried")
        return model(batch + 0).sum(), None

    order = SimpleNamespace(lengths=np.arange(100))
    loader: Any = SimpleNamespace(
        device=CPU, order=order, batch_of=lambda taken: samples[taken - 36]
    )
    optimizer = torch.optim.AdamW(model.parameters())
    return batch_size.attempt(model, optimizer, loader, compute_loss, 64), model


@pytest.mark.parametrize("compiled", [False, True])
def test_attempt_measures_and_leaves_nothing(compiled: bool) -> None:
    """Speed and memory of the model as it is written; gradients and statistics as they were."""
    trial, model = small_attempt(compiled=compiled)
    assert trial.rate > 0
    assert trial.peak_mib > 64
    assert trial.has_room
    assert all(parameter.grad is None for parameter in model.parameters())
    assert int(model[1].num_batches_tracked) == 0  # type: ignore[index,arg-type]


def test_attempt_that_runs_out_of_memory_has_no_rate() -> None:
    """And no room for more."""
    trial, model = small_attempt(held=63)
    assert (trial.rate, trial.has_room) == (0.0, False)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_peaks_are_those_of_training_alone() -> None:
    """What the attempts took is forgotten."""
    torch.ones(2**26)  # 256 MiB
    before = peaks(CPU)[0]
    fit({16: 1.0})
    assert peaks(CPU)[0] < before - 2**27


def loss_of(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, None]:
    return model(batch).square().mean(), None


def loss_with_a_collective(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, None]:
    everywhere = model(batch)
    torch.distributed.all_reduce(everywhere.detach().clone())
    return everywhere.square().mean(), None


def small_loader(count: int = 10) -> Any:
    samples = torch.ones(count, 3)
    return SimpleNamespace(samples=samples, batch_of=lambda taken: samples[taken])


def test_loss_that_asks_other_processes_is_refused(tmp_path: Path) -> None:
    """It is seen in one small trial, which all ranks make alike, and which leaves nothing."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1
    )
    try:
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        with pytest.raises(UserError, match="communicates with other processes"):
            batch_size.refuse_unfit_loss(model, small_loader(), loss_with_a_collective, 2, False)
        batch_size.refuse_unfit_loss(model, small_loader(), loss_of, 2, False)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert int(model[1].num_batches_tracked) == 0  # type: ignore[arg-type]
    finally:
        torch.distributed.destroy_process_group()


def test_loss_that_couples_samples_is_refused() -> None:
    """By the recipe's own word, before anything is tried."""
    with pytest.raises(UserError, match="couples_samples"):
        batch_size.refuse_unfit_loss(nn.Linear(3, 2), small_loader(), pytest.fail, 1, True)


def test_batch_norm_is_named_where_its_samples_change() -> None:
    """Not where the size stays, nor where its statistics are fixed."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    sentence = batch_size.batch_norm_sentence(model, 64, 128)
    assert sentence is not None
    assert "128 samples in place of 64" in sentence
    assert batch_size.batch_norm_sentence(model, 64, 64) is None
    assert batch_size.batch_norm_sentence(model.eval(), 64, 128) is None
    assert batch_size.batch_norm_sentence(nn.Linear(3, 2), 64, 128) is None
