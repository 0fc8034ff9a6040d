"""Peak performance of a device, by its name or as measured."""

from typing import Any

import pytest
import torch

from common.measure import peak
from common.measure.peak import peak_tflops

GPU = torch.device("cuda", 0)


# Device name: TFLOP/s in fp16 or bf16, in TF32, and in fp32.
KNOWN = """
NVIDIA A100-SXM4-80GB: 312 156 19.5
NVIDIA A10: 125 62.5 31.2
NVIDIA A10G: 70 35 31.5
NVIDIA H100 80GB HBM3: 989.4 494.7 66.9
NVIDIA H100 PCIe: 756 378 51.2
NVIDIA H200: 989.4 494.7 66.9
NVIDIA H200 NVL: 835.5 417.5 60
NVIDIA GH200 480GB: 989.4 494.7 66.9
NVIDIA L4: 121 60 30.3
NVIDIA L40S: 362 183 91.6
NVIDIA GeForce RTX 4090: 165.2 82.6 82.6
Tesla V100-SXM2-16GB: 125 15.7 15.7
Tesla V100-PCIE-16GB: 112 14 14
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


@pytest.mark.parametrize(
    ("times", "shortest", "count"),
    [
        ([0.010, 0.011, 0.012, 0.010, 0.011, 0.001], 0.010, 5),  # steady: no further products
        ([0.010, 0.030, 0.010, 0.010, 0.010, *[0.020] * 4, 0.002, *[0.020] * 5], 0.002, 15),
        ([0.020, 0.100, 0.090, 0.090, 0.090, 0.001], 0.020, 5),  # unsteady, but no more time
    ],
)
def test_unsteady_products_are_repeated(
    times: list[float], shortest: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A moment without other programs shows the peak, but the search for it soon ends."""
    left = iter(times)
    used: list[float] = []

    def repeat(multiply: object, number: int, repeat: int) -> list[float]:
        seconds = [next(left) for _ in range(repeat)]
        used.extend(seconds)
        return seconds

    monkeypatch.setattr(peak.timeit, "repeat", repeat)
    assert peak.product_seconds(8, torch.device("cpu"), torch.float32) == shortest
    assert len(used) == count
