"""The readings of a GPU's driver."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.measure import power
from common.measure.power import PowerMeter
from tests.cuda_stand_in import Nvml

GPU = torch.device("cuda", 0)


def test_power_and_utilisation_are_means_since_the_last_reading(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Power is energy over time.

    Utilisation is the mean of the driver's samples, or the latest one.
    """
    now = [0.0]
    monkeypatch.setattr(power, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    meter = PowerMeter(GPU)
    now[0] = 2.0
    nvml.millijoules = 601_000
    nvml.samples = [(1, 20), (2, 40)]
    assert meter.readings() == {"gpu/utilization": 0.3, "gpu/power_watts": 300}
    now[0] = 3.0
    nvml.samples = [(1, 20), (2, 40), (3, 60)]
    assert meter.readings() == {"gpu/utilization": 0.6, "gpu/power_watts": 0}
    assert meter.joules() == 601
    now[0] = 3.1
    assert meter.readings()["gpu/utilization"] == 0.9


def test_long_interval_is_sampled_several_times(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver forgets samples after some seconds, so the meter reads them in between."""
    now = [0.0]
    busy = list(range(1, 41))
    monkeypatch.setattr(power, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    meter = PowerMeter(GPU)
    get_samples: Any = sys.modules["pynvml"].nvmlDeviceGetSamples
    get_samples.reset_mock()
    for second in range(40):
        now[0] = second
        nvml.samples = [(at, busy[at - 1]) for at in range(1, second + 2)][-16:]
        meter.sample_if_due()
    assert meter.readings()["gpu/utilization"] == pytest.approx(sum(busy) / 40 / 100)
    assert get_samples.call_count < 10


def test_utilisation_before_the_run_does_not_count(nvml: Nvml) -> None:
    """The driver still has samples of another program."""
    nvml.samples = [(1, 100), (2, 100)]
    meter = PowerMeter(GPU)
    nvml.samples.append((3, 50))
    assert meter.readings()["gpu/utilization"] == 0.5


def test_driver_that_fails_later_gives_nan(nvml: Nvml) -> None:
    """Readings keep their keys, so that ranks can still be gathered."""
    meter = PowerMeter(GPU)
    keys = list(meter.readings())
    assert meter.joules() == 1
    nvml.is_broken = True
    readings = meter.readings()
    assert list(readings) == keys
    assert all(math.isnan(value) for value in [*readings.values(), meter.joules()])


def test_missing_driver_gives_nan(nvml: Nvml) -> None:
    """A GPU without a driver has the same keys. A CPU has no readings and no energy."""
    nvml.is_broken = True
    readings = PowerMeter(GPU).readings()
    assert list(readings) == ["gpu/utilization", "gpu/power_watts"]
    assert all(math.isnan(value) for value in readings.values())
    cpu = PowerMeter(torch.device("cpu"))
    assert (cpu.readings(), cpu.joules()) == ({}, 0)
