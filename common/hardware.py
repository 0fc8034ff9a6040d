"""What the hardware could do at most, and what a GPU draws."""

from __future__ import annotations

import time
from typing import Any

import torch

# Dense matrix products in TFLOP/s, fp16 or bf16 with fp32 sums, then TF32 (fp32 where there is
# none), from NVIDIA's data sheets and architecture white papers of the named products. The first
# name that the device's contains counts.
PEAK_TFLOPS = (
    ("B200", 2250.0, 1125.0),
    ("H200", 989.4, 494.7),
    ("H100 PCIe", 756.0, 378.0),
    ("H100 NVL", 835.0, 417.5),
    ("H100", 989.4, 494.7),
    ("A100", 312.0, 156.0),
    ("A30", 165.0, 82.0),
    ("A10G", 70.0, 35.0),
    ("A10", 125.0, 62.5),
    ("L40S", 362.0, 183.0),
    ("L4", 121.0, 60.0),
    ("RTX 4090", 165.2, 82.6),
    ("RTX 3090", 71.0, 35.6),
    ("V100", 125.0, 15.7),
    ("T4", 65.0, 8.1),
)


def peak_tflops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Return the peak of matrix products in `dtype`, and where it is from.

    It is the data sheet's for a known GPU, and measured otherwise.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, half, full in PEAK_TFLOPS:
            if known in name:
                return (full if dtype == torch.float32 else half), "data sheet"
    return measured_tflops(device, dtype), "measured"


def measured_tflops(device: torch.device, dtype: torch.dtype, size: int = 512) -> float:
    """Return the best rate of five square matrix products, in TFLOP/s."""
    size *= 1 if device.type == "cpu" else 16
    left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(6):  # the first one chooses its kernel
        began = time.perf_counter()
        left @ right
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best / 1e12


class PowerMeter:
    """Reads a GPU's energy, power and utilisation through NVML, where both are present."""

    def __init__(self, device: torch.device) -> None:
        self.handle: Any = None
        if device.type != "cuda":
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            identity = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self.handle = pynvml.nvmlDeviceGetHandleByUUID(identity)
            self.nvml = pynvml
            self.joules()
        except Exception:  # no driver, no permission, an old GPU: a figure less, never a stop
            self.handle = None

    def joules(self) -> float:
        """Return the energy drawn since the driver was loaded; 0 where that is not known."""
        if self.handle is None:
            return 0.0
        return self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1000

    def readings(self) -> dict[str, float]:
        """Return ``gpu/utilization`` (0 to 1) and ``gpu/power_watts`` as they are now."""
        if self.handle is None:
            return {}
        return {
            "gpu/utilization": self.nvml.nvmlDeviceGetUtilizationRates(self.handle).gpu / 100,
            "gpu/power_watts": self.nvml.nvmlDeviceGetPowerUsage(self.handle) / 1000,
        }
