"""What `config.json` says of a run: its flags as resolved, and what else its figures depend on."""

from __future__ import annotations

import platform
import secrets
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from common.config import TrainingConfig
from common.runtime import usable_cores

if TYPE_CHECKING:
    from common.run import Run

PACKAGES = ("torch", "accelerate", "transformers", "datasets", "wandb", "numpy")


def describe_run(run: Run) -> dict[str, Any]:
    """Return the content of `config.json`."""
    data = run.data
    return {
        "recipe": run.recipe,
        "config": vars(run.config),
        "given": run.given,
        # Chosen before anything is tracked: a run that is killed at once keeps it all the same.
        "wandb_run_id": secrets.token_hex(4),
        "environment": describe_environment(run.accelerator, run.config),
        "data": {
            "name": data.source.name,
            "reason": data.source.reason,
            "sizes": {name: len(split) for name, split in data.splits.items()},
            "classes": len(data.class_names),
            "notes": data.notes,
        },
        "model": {
            "name": run.description["name"],
            "parameters": sum(p.numel() for p in run.unwrapped.parameters()),
        },
        "plan": {
            "total_steps": run.plan.total_steps,
            "updates_per_epoch": run.plan.updates_per_epoch,
        },
        "memory_plan": run.memory_plan.facts(),
        # What `perf/mfu` is a share of, for each device.
        "peak": {"tflops": run.meters.peak, "source": run.meters.peak_source},
    }


def device_name(device: torch.device) -> str:
    """Return the name of the hardware behind `device`, such as "NVIDIA H100 80GB HBM3"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {usable_cores()} cores" if device.type == "cpu" else name


def describe_environment(accelerator: Accelerator, config: TrainingConfig) -> dict[str, Any]:
    """Return what a run's figures depend on besides its flags, for `config.json`."""
    return {
        "device": device_name(accelerator.device),
        "device_type": accelerator.device.type,
        "world_size": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "effective_batch_size": config.batch_size
        * config.gradient_accumulation_steps
        * accelerator.num_processes,
        "threads_per_process": torch.get_num_threads(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "tf32": torch.get_float32_matmul_precision() == "high",
        "deterministic": config.deterministic,
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "git_commit": git_commit(),
    }


def git_commit() -> str | None:
    """Return the commit of the checkout that holds this module, or None outside of one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
