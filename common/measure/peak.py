"""What the hardware could do at most, and what a GPU draws."""

import math
import re
import time
import timeit
from contextlib import suppress
from typing import Any

import torch

from common.devices import device_name, is_accelerator
from common.measure.stopwatch import synchronize

# Dense matrix products in TFLOP/s, fp16 or bf16 with fp32 sums, then TF32 (fp32 where there is
# none), then fp32, from NVIDIA's data sheets and architecture white papers of the named products.
# The first that the device's name contains as whole words counts.
PEAK_TFLOPS = {
    "GB200": (2500.0, 1250.0, 80.0),
    "B200": (2250.0, 1125.0, 75.0),
    "G?H200": (989.4, 494.7, 66.9),
    "H100 PCIe": (756.0, 378.0, 51.2),
    "H100 NVL": (835.0, 417.5, 60.0),
    "H100": (989.4, 494.7, 66.9),
    "A100": (312.0, 156.0, 19.5),
    "A30": (165.0, 82.0, 10.3),
    "A10G": (70.0, 35.0, 31.5),
    "A10": (125.0, 62.5, 31.2),
    "L40S": (362.0, 183.0, 91.6),
    "L4": (121.0, 60.0, 30.3),
    "RTX 4090": (165.2, 82.6, 82.6),
    "RTX 3090": (71.0, 35.6, 35.6),
    "V100": (125.0, 15.7, 15.7),
    "T4": (65.0, 8.1, 8.1),
}
# Another chip under the same name, or a slice of one.
VARIANT = re.compile(r"\b(Ti|D|SUPER|Laptop|Max-Q|MIG)\b")

SMALLEST_PRODUCT, LARGEST_PRODUCT = 512, 8192  # rows
LONG_PRODUCT_SECONDS = 0.03

UTILIZATION = 1  # NVML_GPU_UTILIZATION_SAMPLES
SAMPLED_EVERY = 5  # seconds, in which the driver forgets none


def peak_tflops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Return the peak of products in `dtype` (0: unknown; TF32's if fp32 is), and its source."""
    name = device_name(device) if is_accelerator(device) else ""
    is_tf32 = torch.get_float32_matmul_precision() == "high"
    column = 0 if dtype != torch.float32 else 1 if is_tf32 else 2
    for known, figures in PEAK_TFLOPS.items():
        if re.search(rf"\b{known}\b", name) and not VARIANT.search(name):
            return figures[column], "data sheet"
    try:
        return measured_tflops(device, dtype), "measured"
    except Exception:  # no room for it, or no such product: a figure less, never a stop
        return 0.0, "unknown"


def measured_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the rate of square products of 512 rows; on an accelerator, of as many as it needs.

    It needs up to 8192 rows to be busy, which may take a slow one minutes.
    """
    size = SMALLEST_PRODUCT
    seconds = product_seconds(size, device, dtype)
    while is_accelerator(device) and size < LARGEST_PRODUCT and seconds < LONG_PRODUCT_SECONDS:
        size *= 2
        seconds = product_seconds(size, device, dtype)
    return 2 * size**3 / seconds / 1e12


def product_seconds(size: int, device: torch.device, dtype: torch.dtype) -> float:
    """Return the least time of a product of two matrices of `size` rows and columns."""
    left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))

    def multiply() -> None:
        left @ right
        synchronize(device)

    return min(timeit.repeat(multiply, number=1, repeat=6))  # the first one chooses its kernel


class PowerMeter:
    """Reads a GPU's energy, power and utilisation through NVML; NaN where, or while, that fails."""

    def __init__(self, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"  # NVML is NVIDIA's
        self.nvml: Any = None
        if self.is_gpu:
            with suppress(Exception):  # no driver, no permission: a figure less, never a stop
                import pynvml

                pynvml.nvmlInit()
                identity = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
                self.handle = pynvml.nvmlDeviceGetHandleByUUID(identity)
                self.nvml = pynvml
        self.sampled_until, self.samples = 0, list[int]()  # by the driver's clock; percent
        self.last_reading = time.perf_counter(), self.joules()
        self.utilization()  # of what came before

    def ask(self, function: str, *arguments: int) -> Any:
        """Return what NVML says of this GPU, or None."""
        with suppress(Exception):
            return getattr(self.nvml, function)(self.handle, *arguments)

    def joules(self) -> float:
        """Return the energy drawn since the driver was loaded; 0 without a GPU."""
        millijoules = self.ask("nvmlDeviceGetTotalEnergyConsumption") if self.is_gpu else 0
        return math.nan if millijoules is None else millijoules / 1000

    def readings(self) -> dict[str, float]:
        """Return means since the last call: ``gpu/utilization`` (0 to 1), ``gpu/power_watts``."""
        if not self.is_gpu:
            return {}
        before, self.last_reading = self.last_reading, (time.perf_counter(), self.joules())
        seconds, joules = (now - then for now, then in zip(self.last_reading, before, strict=True))
        return {"gpu/utilization": self.utilization(), "gpu/power_watts": joules / seconds}

    def sample(self) -> None:
        """Take the driver's samples of the utilisation, which it forgets after some seconds."""
        self.sampled_at = time.perf_counter()
        _, samples = self.ask("nvmlDeviceGetSamples", UTILIZATION, self.sampled_until) or (0, [])
        if samples:
            self.sampled_until = samples[-1].timeStamp
            self.samples += [sample.sampleValue.uiVal for sample in samples]

    def sample_if_due(self) -> None:
        if self.is_gpu and time.perf_counter() > self.sampled_at + SAMPLED_EVERY:
            self.sample()

    def utilization(self) -> float:
        self.sample()
        if samples := self.samples:
            self.samples = []
            return sum(samples) / len(samples) / 100
        latest = self.ask("nvmlDeviceGetUtilizationRates")
        return math.nan if latest is None else latest.gpu / 100
