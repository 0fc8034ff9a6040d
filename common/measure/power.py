"""The power, energy and utilisation of an NVIDIA GPU."""

import math
import time
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch

from common.metric_names import GPU_POWER, GPU_UTILIZATION

UTILIZATION = 1  # NVML's number for samples of the utilisation, NVML_GPU_UTILIZATION_SAMPLES
SAMPLED_EVERY = 5  # seconds; the driver keeps its samples for longer


class PowerMeter:
    """Reads an NVIDIA GPU's energy, power and utilisation through NVML.

    Values that can't be read are NaN. On other devices there are no readings.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"  # NVML is NVIDIA's
        self.nvml: ModuleType | None = None
        self.handle: object = None  # NVML's object for the GPU
        if self.is_gpu:
            with suppress(Exception):  # no driver or no permission must not stop the run
                import pynvml

                pynvml.nvmlInit()
                identity = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
                self.handle = pynvml.nvmlDeviceGetHandleByUUID(identity)
                self.nvml = pynvml
        self.sampled_at = 0.0  # clock time of the last call of `sample`
        self.sampled_until = 0  # the time of the last sample, in µs by the driver's clock
        self.samples: list[int] = []  # samples of the utilisation, in percent
        self.last_reading = (time.perf_counter(), self.joules())
        self.utilization()  # this drops the samples from before the run

    def ask(self, function: str, *arguments: int) -> Any:
        """Return the result of one of NVML's functions for this GPU; None if it can't be called."""
        with suppress(Exception):  # without NVML, `self.nvml` is None and has no function
            return getattr(self.nvml, function)(self.handle, *arguments)
        return None

    def joules(self) -> float:
        """Return the joules that the GPU has drawn since its driver was loaded.

        The result is 0 without a GPU, and NaN if the GPU does not report its energy.
        """
        millijoules = self.ask("nvmlDeviceGetTotalEnergyConsumption") if self.is_gpu else 0
        return math.nan if millijoules is None else millijoules / 1000

    def readings(self) -> dict[str, float]:
        """Return means since the last call: ``gpu/utilization`` (0 to 1), ``gpu/power_watts``."""
        if not self.is_gpu:
            return {}
        clock_before, joules_before = self.last_reading
        self.last_reading = (time.perf_counter(), self.joules())
        clock, total_joules = self.last_reading
        seconds = clock - clock_before
        joules = total_joules - joules_before
        return {GPU_UTILIZATION: self.utilization(), GPU_POWER: joules / seconds}

    def sample(self) -> None:
        """Fetch the driver's samples of the utilisation, which it keeps for only some seconds."""
        self.sampled_at = time.perf_counter()
        _, samples = self.ask("nvmlDeviceGetSamples", UTILIZATION, self.sampled_until) or (0, [])
        if samples:
            self.sampled_until = samples[-1].timeStamp
            self.samples += [sample.sampleValue.uiVal for sample in samples]

    def sample_if_due(self) -> None:
        """Fetch samples often enough that the driver forgets none."""
        if self.is_gpu and time.perf_counter() > self.sampled_at + SAMPLED_EVERY:
            self.sample()

    def utilization(self) -> float:
        """Return the mean utilisation since the last call, from 0 to 1.

        Without samples since then, return the latest value that the driver reports.
        """
        self.sample()
        samples = self.samples
        if samples:
            self.samples = []
            return sum(samples) / len(samples) / 100
        latest = self.ask("nvmlDeviceGetUtilizationRates")
        return math.nan if latest is None else latest.gpu / 100
