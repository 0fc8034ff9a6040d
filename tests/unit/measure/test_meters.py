"""Meters over all ranks, some of which lack some figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from common.data.samples import Work
from common.data.stored_samples import TensorSamples
from common.measure import compile_time
from common.measure.flops import TrainingFlops
from common.measure.meters import Meters
from tests.small_run import FLAGS, run


class TwoRanks(SimpleNamespace):
    """A stand-in for an Accelerator, whose other rank reports this rank's row with changes."""

    device = torch.device("cpu")
    is_main_process = True
    num_processes = 2

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Return both ranks' rows."""
        return torch.cat([mine, self.other(mine.clone())])


def trained(accelerator: Any) -> Meters:
    """Return meters after one update."""
    meters = Meters(accelerator, 1)
    meters.stopwatch.start()
    meters.count(torch.tensor(1.0), {}, Work(8), 0.0, True)
    return meters


def test_figure_that_one_rank_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's driver may fail on one rank, at any time, and the run continues."""

    def other(row: torch.Tensor) -> torch.Tensor:
        row[row == 250.0] = math.nan
        row[row == 0.5] = 0.75
        return row

    meters = trained(TwoRanks(other=other))
    readings = {"gpu/utilization": 0.5, "gpu/power_watts": 250.0}
    monkeypatch.setattr(meters.power, "readings", lambda: readings)
    monkeypatch.setattr(meters.stopwatch, "energy", lambda: math.nan)
    values = meters.end_interval()
    assert (values["gpu/utilization"], values["gpu/utilization_min"]) == (0.625, 0.5)
    assert values["train/loss"] == 1.0
    assert values["perf/samples_per_second"] > 0
    assert not {"gpu/power_watts", "perf/joules_per_sample"} & values.keys()
    assert not any(math.isnan(value) for value in values.values())
    assert not any(math.isnan(value) for value in meters.whole_run_figures().values())


class StreamedSamples(TensorSamples):
    is_sized = False


@pytest.mark.parametrize(
    ("samples_class", "cause"),
    [
        # The second attempt, on real samples, gets further than the first one.
        (TensorSamples, "KeyError: 'labels'"),
        # A stream can't be read ahead, so there is no second attempt.
        (StreamedSamples, "NotImplementedError: no meta kernel"),
    ],
)
def test_uncountable_model_still_has_a_peak(
    samples_class: type[TensorSamples], cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the first update, one line gives the cause that the user can mend, and its line.

    Before it, the loop may still meet the same error, and report it better.
    """
    meters = trained(TwoRanks(other=lambda row: row))

    def compute_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, None]:
        if batch["rows"].device.type == "meta":
            raise NotImplementedError("no meta kernel\nof this operation")
        return model(batch["rows"]).sum() + batch["labels"].sum(), None

    samples = samples_class(rows=torch.randn(8, 4))
    meters.find_flops(nn.Linear(4, 1), compute_loss, samples, torch.float32)
    meters.count(0.5, None, Work(1), 0.0, is_update=False)
    assert capsys.readouterr().out == ""
    for _ in range(2):
        meters.count(0.5, None, Work(1), 0.0, is_update=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert f"FLOPs can't be counted ({cause}, in test_meters.py, line " in line
    assert "a batch as the loader yields it" in line
    assert meters.peak > 0
    assert "perf/tflops_per_device" not in meters.end_interval()


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_operations_of_several_passes_count(passes: int) -> None:
    """A loop that makes several passes with each micro-batch reaches more TFLOP/s in its time."""
    meters = trained(TwoRanks(other=lambda row: row))
    samples = TensorSamples(rows=torch.randn(8, 4))

    def compute_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(batch["rows"])
        return logits.square().mean(), logits

    meters.find_flops(nn.Linear(4, 3), compute_loss, samples, torch.float32, passes)
    assert meters.flops is not None
    forward = 2 * 4 * 3
    backward = 2 * 4 * 3  # the weights' gradients; the input needs none
    assert meters.flops.per_sample == passes * (forward + backward)


def test_resume_on_more_ranks_after_the_last_update_has_its_loss_and_time() -> None:
    """The first rank takes the losses of all ranks, so the other ranks have none."""
    meters_of_ranks = []
    for loss in (1.0, 2.0):
        meters = Meters(TwoRanks(other=lambda row: row), 1)  # type: ignore[arg-type]
        meters.stopwatch.start()
        meters.count(torch.tensor(loss), {}, Work(8), 0.0, True)
        meters.stopwatch.stop()
        meters_of_ranks.append(meters)

    def without_loss(row: torch.Tensor) -> torch.Tensor:
        cpu_times = len([*resumed.load.times().values()])
        row[-cpu_times - 2 : -cpu_times] = 0.0  # the loss and the number of its micro-batches
        return row

    resumed = Meters(TwoRanks(other=without_loss), 1)  # type: ignore[arg-type]
    resumed.load_from_ranks([meters.state_dict() for meters in meters_of_ranks])
    assert resumed.whole_run_figures()["train/loss"] == 1.5
    assert resumed.stopwatch.training_seconds == meters_of_ranks[0].stopwatch.training_seconds > 0


@pytest.mark.parametrize("rank_count", [1, 2])
def test_compile_time_covers_all_attempts(monkeypatch: pytest.MonkeyPatch, rank_count: int) -> None:
    """Each attempt compiles again, in a process of its own, on as many ranks or on others."""
    monkeypatch.setattr(compile_time, "compile_seconds_of_process", lambda: 70.0)
    state = Meters(TwoRanks(other=lambda row: row), 1).state_dict()  # type: ignore[arg-type]
    monkeypatch.setattr(compile_time, "compile_seconds_of_process", lambda: 13.0)
    resumed = Meters(TwoRanks(other=lambda row: row), 1)  # type: ignore[arg-type]
    if rank_count == 1:
        resumed.load_state_dict(state)
    else:
        resumed.load_from_ranks([state] * rank_count)
    assert resumed.compile_time.seconds == 83.0


@pytest.mark.parametrize(("peak_before", "has_mfu"), [(0.0, True), (80.0, True), (312.0, False)])
def test_resume_on_another_device_has_no_mfu_of_the_whole_run(
    peak_before: float, has_mfu: bool
) -> None:
    """Time on a faster device would count as a share of the slower one's peak."""
    first = trained(TwoRanks(other=lambda row: row))
    first.peak = peak_before
    resumed = trained(TwoRanks(other=lambda row: row))
    resumed.flops = TrainingFlops(1e9, 0.0, 0.0)
    resumed.peak = 65.0
    resumed.load_state_dict(first.state_dict())
    resumed.count(torch.tensor(1.0), {}, Work(8), 0.0, True)
    assert "perf/mfu" in resumed.end_interval()
    assert ("perf/mfu" in resumed.whole_run_figures()) == has_mfu


def test_idle_gpus_are_reported_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """All intervals but the first count. Busy or unknown GPUs are not mentioned."""
    for shares, word in (
        ((0.1, 0.6, 0.8), "70%"),
        ((0.1, 0.8, 0.9), None),
        ((0.1,), None),
        ((0.1, math.nan), None),
    ):
        meters = trained(TwoRanks(other=lambda row: row))
        for share in shares:
            readings = {"gpu/utilization": share}
            monkeypatch.setattr(meters.power, "readings", lambda readings=readings: readings)
            meters.end_interval()
        sentence = meters.idle_sentence()
        assert (sentence is None) == (word is None), shares
        assert word is None or f"computed for {word} of the time" in str(sentence)


@pytest.mark.usefixtures("quick_runs")
def test_moved_clock_changes_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goodput counts elapsed seconds, even if the time of day jumps back and forth."""
    times = iter(10.0**9 * (1 + number % 2) for number in range(10**9))
    monkeypatch.setattr("time.time", lambda: next(times))
    directory = tmp_path / "run"
    assert run(*FLAGS, "--output-dir", directory)[0] is None
    goodput = json.loads((directory / "summary.json").read_text())["perf/goodput"]
    assert 1e-4 < goodput < 0.9
