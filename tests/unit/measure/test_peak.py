"""What a device could do at most, by its name or as measured."""

from typing import Any

import pytest
import torch

from common.measure import peak
from common.measure.peak import peak_tflops

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "half", "full"),
    [
        ("NVIDIA A100-SXM4-80GB", 312, 156),
        ("NVIDIA A10", 125, 62.5),
        ("NVIDIA A10G", 70, 35),
        ("NVIDIA H100 80GB HBM3", 989.4, 494.7),
        ("NVIDIA H100 PCIe", 756, 378),
        ("NVIDIA H200", 989.4, 494.7),
        ("NVIDIA GH200 480GB", 989.4, 494.7),
        ("NVIDIA L4", 121, 60),
        ("NVIDIA L40S", 362, 183),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("Tesla V100-SXM2-16GB", 125, 15.7),
        ("Tesla T4", 65, 8.1),
    ],
)
def test_known_gpus_have_the_peak_of_their_data_sheet(
    name: str, half: float, full: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name counts as a whole word: the A10 is no A100."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_tflops(GPU, torch.bfloat16) == (half, "data sheet")
    assert peak_tflops(GPU, torch.float32) == (full, "data sheet")


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA L40", "NVIDIA A1000", "NVIDIA A100X", "NVIDIA T400", "AMD Instinct MI300X"),
        *("NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 Laptop GPU"),
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    ],
)
def test_other_gpus_are_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that only begins like a known one, another chip's or a slice's, says nothing."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(peak, "measured_tflops", lambda device, dtype: 12.5)
    assert peak_tflops(GPU, torch.float16) == (12.5, "measured")


@pytest.mark.parametrize("error", [NotImplementedError, torch.OutOfMemoryError])
def test_peak_that_cannot_be_measured_is_unknown(
    error: type[RuntimeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is 0, and no reason to stop."""

    def fail(*others: Any) -> float:
        raise error("no such product")

    monkeypatch.setattr(peak, "measured_tflops", fail)
    assert peak_tflops(torch.device("cpu"), torch.float16) == (0.0, "unknown")


def test_cpu_is_measured() -> None:
    """A core does between a billion and a quadrillion operations a second."""
    rate, source = peak_tflops(torch.device("cpu"), torch.float32)
    assert source == "measured"
    assert 1e-4 < rate < 1e3
