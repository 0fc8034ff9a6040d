"""`--auto-batch-size`: which sizes are tried, which one all ranks take, and what is printed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from common.config import TrainingConfig
from common.errors import TrainingError, UserError
from common.flags import flag
from common.measure.memory import peaks
from common.training.batch_size import choice as module
from common.training.batch_size.checks import batch_norm_sentence, refuse_unsuitable_loss
from common.training.batch_size.choice import choose_batch_size, sizes_to_try
from common.training.batch_size.trials import Trial, time_size
from common.training.out_of_memory import (
    END_OTHER_PROGRAMS,
    one_sample_advice,
    out_of_memory_error,
    placed_bytes,
)

CPU = torch.device("cpu")
Trials = dict[int, Trial]  # of one rank, by size


class Gathered(Exception):  # noqa: N818
    """Raised instead of a gather, to end a simulated rank there."""


class Rank:
    """One of two ranks, on which each size has a rate in samples a second, or does not fit."""

    def __init__(self, rates: dict[int, float], config: TrainingConfig) -> None:
        self.rates = rates
        self.config = config
        self.tried_sizes: list[int] = []

    def try_size(self, size: int) -> Trial:
        self.tried_sizes.append(size)
        rate = self.rates.get(size, 0.0)
        return Trial(rate, 100.0 * size, has_room=rate > 0)

    def choose(self, gather: Callable[[Trials], list[Trials]]) -> int:
        """Return the size that this rank chooses, and check that choosing changes nothing.

        Args:
            gather: returns the trials of all ranks, given those of this rank.
        """
        loader: Any = SimpleNamespace(device=CPU, samples=range(500))  # it has no `cut_into`
        requested = (self.config.batch_size, self.config.gradient_accumulation_steps)
        accelerator: Any = SimpleNamespace(
            device=CPU,
            num_processes=2,
            gradient_accumulation_steps=requested[1],
        )
        flags = dict(vars(self.config))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "gather_from_ranks", lambda accelerator, trials: gather(trials))
            size, accumulation = choose_batch_size(
                self.try_size, {"train": loader}, self.config, accelerator
            )
        assert vars(self.config) == flags
        assert accelerator.gradient_accumulation_steps == requested[1]
        assert size * accumulation == requested[0] * requested[1]
        return size


def chosen_size(
    rates: dict[int, float],
    requested: int = 16,
    accumulation: int = 4,
    others: list[dict[int, float]] | None = None,
    **flags: Any,
) -> tuple[int, list[int]]:
    """Return the size that `--auto-batch-size` takes, and the sizes that it tries.

    Args:
        rates: samples a second by size. Other sizes do not fit.
        requested: the size of the command line.
        accumulation: the accumulation of the command line.
        others: the rates of each other rank, which tries sizes by itself.
        flags: further flags of the run.
    """
    config = TrainingConfig(batch_size=requested, gradient_accumulation_steps=accumulation, **flags)
    trials_of_others: list[Trials] = []

    def keep_trials(trials: Trials) -> list[Trials]:
        trials_of_others.append(trials)
        raise Gathered

    for other_rates in others or []:
        with pytest.raises(Gathered):
            Rank(other_rates, config).choose(keep_trials)
    rank = Rank(rates, config)
    size = rank.choose(lambda trials: [trials, *trials_of_others])
    return size, rank.tried_sizes


def test_sizes_halve_within_the_update_and_double_within_the_data() -> None:
    """Smaller sizes divide the update. The number of samples limits larger ones."""
    assert sizes_to_try(16, 64, 150) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert sizes_to_try(12, 36, 20) == [1, 3, 6, 12]
    assert sizes_to_try(7, 7, 7) == [1, 7]


@pytest.mark.parametrize(
    ("rates", "best_size", "tried", "flags"),
    [
        # The speed grows up to 64. An update has 64 samples, so no accumulation is left.
        ({16: 100, 32: 180, 64: 300, 128: 305}, 64, [16, 32, 64, 128], (64, 1)),
        # A size for other updates is named, but not taken.
        ({16: 10, 32: 20, 64: 40, 128: 80, 256: 160}, 64, [16, 32, 64, 128, 256], (256, 1)),
        # The requested size is as fast as the next, so it stays.
        ({16: 100, 32: 105, 64: 900}, 16, [16, 32], (16, 4)),
        # The next size does not fit.
        ({16: 100, 32: 180}, 32, [16, 32, 64], (32, 2)),
        # The requested size does not fit.
        ({4: 30, 2: 20}, 4, [16, 8, 4], (4, 16)),
    ],
)
def test_fastest_size_for_the_same_updates_is_taken(
    rates: dict[int, float],
    best_size: int,
    tried: list[int],
    flags: tuple[int, int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A table shows memory and speed of each size, and the fastest flags of all are named."""
    assert chosen_size(rates) == (best_size, tried)
    output = capsys.readouterr().out
    assert f"fastest --batch-size {flags[0]} --gradient-accumulation-steps {flags[1]}" in output
    assert ("would then have 256 samples instead of 64" in output) == (flags[0] == 256)
    for size in tried:
        shown_rate = f"{rates[size]:,.0f}" if size in rates else "does not fit"
        (row,) = [line.split("│") for line in output.splitlines() if f"│ {size:,} " in line[:12]]
        assert [cell.strip() for cell in row[1:4]] == [f"{size:,}", f"{100 * size:,}", shown_rate]


@pytest.mark.parametrize(
    ("rates", "others", "expected"),
    [
        ({16: 100, 32: 200, 64: 400}, {16: 100}, 16),
        ({16: 100, 32: 200, 64: 400}, {4: 10}, 4),
        ({4: 10}, {16: 100, 32: 200}, 4),
        ({16: 100, 32: 200, 64: 400}, {16: 100, 32: 101}, 16),
    ],
)
def test_size_fits_all_ranks(
    rates: dict[int, float],
    others: dict[int, float],
    expected: int,
) -> None:
    """The size is the fastest on the slowest rank, wherever each rank stopped trying."""
    assert chosen_size(rates, others=[others])[0] == expected
    assert chosen_size(others, others=[rates])[0] == expected


def test_resumed_run_keeps_its_size() -> None:
    """A resumed run takes a smaller size only if its own no longer fits."""
    fast = {8: 50.0, 16: 100.0, 32: 200.0}
    assert chosen_size(fast, resume="runs/mine") == (16, [16])
    assert chosen_size({8: 50.0}, resume="runs/mine") == (8, [16, 8])


@pytest.mark.parametrize("resume", [None, "runs/mine"])
def test_no_fitting_size_is_an_error(resume: str | None) -> None:
    """One sentence says that not even one sample fits, with flags only for a new run."""
    with pytest.raises(TrainingError, match="one sample per batch") as refused:
        chosen_size({}, resume=resume)
    assert refused.value.advice == (
        f"{END_OTHER_PROGRAMS}, or start a new run with "
        "--gradient-checkpointing or a smaller model or smaller samples"
    )


@dataclass(kw_only=True)
class SizedConfig(TrainingConfig):
    """Flags of a recipe that has a flag for the size of its samples."""

    image_size: int = flag(32, role="size")


def test_advice_for_one_sample_leaves_out_what_is_set() -> None:
    """It names the placement only if data lie in the memory, and the recipe's flags of size."""
    config = SizedConfig(gradient_checkpointing=True)
    assert one_sample_advice(config, has_placed_data=True) == (
        f"{END_OTHER_PROGRAMS}, pass --data-placement workers, or start a new "
        "run with a lower --image-size"
    )


def test_data_of_a_cpu_are_not_placed_elsewhere() -> None:
    """On a GPU, the loaders' data count."""
    loaders: Any = [SimpleNamespace(placed_bytes=3), SimpleNamespace(placed_bytes=4)]
    assert placed_bytes(CPU, loaders) == 0
    assert placed_bytes(torch.device("cuda"), loaders) == 7


@pytest.mark.parametrize(("size", "words"), [(1, "end other programs"), (6, "--batch-size 3")])
def test_out_of_memory_in_training_names_what_helps(size: int, words: str, tmp_path: Path) -> None:
    """Other sizes of the model or its samples need a new run."""
    error = out_of_memory_error(SizedConfig(batch_size=size), tmp_path, CPU, [])
    assert f"out of memory at batch size {size}, " in error.problem
    assert words in error.advice
    assert "start a new run with " in error.advice
    assert "a lower --image-size" in error.advice


def test_out_of_memory_in_an_evaluation_names_what_helps(tmp_path: Path) -> None:
    """A run that only evaluates makes no updates, and can't choose another model size."""
    config = SizedConfig(batch_size=6, evaluate_only=True, init_from="runs/a")
    error = out_of_memory_error(config, tmp_path, CPU, [])
    assert error.advice.startswith("evaluate with half the batch size: ")
    assert "--batch-size 3" in error.advice
    assert "new run" not in error.advice


@pytest.mark.parametrize("has_begun", [False, True])
def test_run_that_has_begun_is_resumed_with_half_the_batch(
    has_begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first update is the likeliest to run out of memory, before there is a checkpoint.

    A command with the same `--output-dir` would be refused then, because it contains a run.
    """
    monkeypatch.setattr("sys.argv", ["train.py", "--output-dir", str(tmp_path)])
    if has_begun:
        (tmp_path / "config.json").write_text("{}")
    error = out_of_memory_error(SizedConfig(batch_size=6), tmp_path, CPU, [])
    flag_of_folder = "--resume" if has_begun else "--output-dir"
    expected = f"python train.py {flag_of_folder} {tmp_path} --batch-size 3"
    assert expected in error.advice


def small_trial(most_samples: float = math.inf, compiled: bool = False) -> tuple[Trial, nn.Module]:
    """Try a batch of 64 samples of 1 MiB on a small model; at most `most_samples` fit."""
    model = nn.Sequential(nn.Linear(2**18, 1, bias=False), nn.BatchNorm1d(1))
    if compiled:
        model.compile(backend=lambda *_: pytest.fail("it was compiled"))
    samples = torch.ones(64, 2**18)

    def compute_loss(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, None]:
        if len(batch) > most_samples:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried")
        return model(batch + 0).sum(), None

    order = SimpleNamespace(lengths=np.arange(100))
    loader: Any = SimpleNamespace(
        device=CPU, order=order, batch_of=lambda taken: samples[taken - 36]
    )
    optimizer = torch.optim.AdamW(model.parameters())
    return time_size(model, optimizer, loader, compute_loss, 64), model


@pytest.mark.parametrize("compiled", [False, True])
def test_trial_measures_and_leaves_no_trace(compiled: bool) -> None:
    """It runs the uncompiled model. Gradients and statistics stay as they were."""
    trial, model = small_trial(compiled=compiled)
    assert trial.rate > 0
    assert trial.peak_mib > 64
    assert trial.has_room
    assert all(parameter.grad is None for parameter in model.parameters())
    assert int(model[1].num_batches_tracked) == 0  # type: ignore[index,arg-type]


def test_trial_that_runs_out_of_memory_has_no_rate() -> None:
    """A trial that runs out of memory has no rate and no room for a larger batch."""
    trial, model = small_trial(most_samples=63)
    assert (trial.rate, trial.has_room) == (0.0, False)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_trials_do_not_count_in_the_peak_of_memory() -> None:
    """Training reports its own peak only."""
    torch.ones(2**26)  # 256 MiB
    before = peaks(CPU)[0]
    chosen_size({16: 1.0})
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


def test_loss_that_communicates_is_refused(tmp_path: Path) -> None:
    """One small trial on each rank reveals it, and leaves no trace."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1
    )
    try:
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        with pytest.raises(
            UserError, match=r"communicates.*: pass .* keeps this flag, .* one process"
        ):
            refuse_unsuitable_loss(model, small_loader(), loss_with_a_collective, 2, False)
        refuse_unsuitable_loss(model, small_loader(), loss_of, 2, False)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert int(model[1].num_batches_tracked) == 0  # type: ignore[arg-type]
    finally:
        torch.distributed.destroy_process_group()


def test_loss_whose_operations_call_functions_is_tried() -> None:
    """Such an operation communicates with no process."""

    def loss_by_value(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, None]:
        return model(torch.cond(batch.sum() > 0, torch.sin, torch.cos, (batch,))).mean(), None

    refuse_unsuitable_loss(nn.Linear(3, 2), small_loader(), loss_by_value, 2, False)


def test_loss_that_couples_samples_is_refused() -> None:
    """The recipe declares it, and nothing is tried."""
    with pytest.raises(UserError, match="couples_samples"):
        refuse_unsuitable_loss(nn.Linear(3, 2), small_loader(), pytest.fail, 1, True)


def test_batch_norm_is_mentioned_if_its_samples_change() -> None:
    """It is not if the size stays or its statistics are frozen."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    sentence = batch_norm_sentence(model, 64, 128)
    assert sentence is not None
    assert "128 samples instead of 64" in sentence
    assert batch_norm_sentence(model, 64, 64) is None
    assert batch_norm_sentence(model.eval(), 64, 128) is None
    assert batch_norm_sentence(nn.Linear(3, 2), 64, 128) is None
