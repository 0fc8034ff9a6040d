"""Peak performance of a device, by its name or as measured, and the readings of its driver."""

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.measure import peak
from common.measure.peak import PowerMeter, peak_tflops
from tests.cuda_stand_in import Nvml

GPU = torch.device("cuda", 0)


# Device name: TFLOP/s in fp16 or bf16, in TF32, and in fp32.
KNOWN = """
NVIDIA A100-SXM4-80GB: 312 156 19.5
NVIDIA A10: 125 62.5 31.2
NVIDIA A10G: 70 35 31.5
NVIDIA H100 80GB HBM3: 989.4 494.7 66.9
NVIDIA H100 PCIe: 756 378 51.2
NVIDIA H200: 989.4 494.7 66.9
NVIDIA GH200 480GB: 989.4 494.7 66.9
NVIDIA L4: 121 60 30.3
NVIDIA L40S: 362 183 91.6
NVIDIA GeForce RTX 4090: 165.2 82.6 82.6
Tesla V100-SXM2-16GB: 125 15.7 15.7
Tesla T4: 65 8.1 8.1
"""


@pytest.mark.parametrize("known", KNOWN.strip().splitlines())
def test_known_gpus_have_the_peak_of_their_data_sheet(
    known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs are found by whole words of their names: A100 is not A10. TF32 and fp32 differ."""
    name, _, figures = known.partition(": ")
    half, tf32, full = map(float, figures.split())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    for setting, expected in (("high", tf32), ("highest", full)):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda setting=setting: setting)
        assert peak_tflops(GPU, torch.bfloat16) == (half, "data sheet")
        assert peak_tflops(GPU, torch.float32) == (expected, "data sheet")


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA L40",
        "NVIDIA A1000",
        "NVIDIA A100X",
        "NVIDIA T400",
        "AMD Instinct MI300X",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    ],
)
def test_other_gpus_are_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that only begins like a known one is another chip or a slice."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(peak, "measured_tflops", lambda device, dtype: 12.5)
    assert peak_tflops(GPU, torch.float16) == (12.5, "measured")


@pytest.mark.parametrize("error", [NotImplementedError, torch.OutOfMemoryError, AssertionError])
def test_peak_that_cannot_be_measured_is_unknown(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peak that can't be measured is 0, and the run continues."""

    def fail(*others: Any) -> float:
        raise error("no such product")

    monkeypatch.setattr(peak, "measured_tflops", fail)
    assert peak_tflops(torch.device("cpu"), torch.float16) == (0.0, "unknown")


def test_cpu_is_measured() -> None:
    """The rate lies between 10^8 and 10^15 operations a second."""
    rate, source = peak_tflops(torch.device("cpu"), torch.float32)
    assert source == "measured"
    assert 1e-4 < rate < 1e3


def test_power_and_utilisation_are_means_since_the_last_reading(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Power is energy over time.

    Utilisation is the mean of the driver's samples, or the latest one.
    """
    now = [0.0]
    monkeypatch.setattr(peak, "time", SimpleNamespace(perf_counter=lambda: now[0]))
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
    monkeypatch.setattr(peak, "time", SimpleNamespace(perf_counter=lambda: now[0]))
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
