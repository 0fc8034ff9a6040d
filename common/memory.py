"""Memory that was really taken: on the device where there is one, of the process on a CPU."""

from __future__ import annotations

import psutil
import torch

MEBIBYTE = 2**20


def memory_used(device: torch.device) -> dict[str, float]:
    """Return this rank's ``memory/`` metrics, in MiB; those of a GPU are peaks."""
    metrics = {"memory/host_rss_mib": psutil.Process().memory_info().rss / MEBIBYTE}
    if device.type == "cuda":
        metrics["memory/peak_allocated_mib"] = torch.cuda.max_memory_allocated(device) / MEBIBYTE
        metrics["memory/peak_reserved_mib"] = torch.cuda.max_memory_reserved(device) / MEBIBYTE
    return metrics
