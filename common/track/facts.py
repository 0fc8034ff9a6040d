"""What `config.json` says of a run: its flags as resolved, and what else its figures depend on."""

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from common.config import TrainingConfig
from common.data.batch import Data
from common.machine import device_name

PACKAGES = ("torch", "accelerate", "transformers", "datasets", "wandb", "numpy")


def resolved(config: TrainingConfig, data: Data) -> dict[str, Any]:
    """Return the flags, with what `--dataset` turned out to be: `--config` repeats that."""
    if (source := data.source) is not None:
        is_folder = Path(source.location).is_absolute()
        config.dataset = source.location if is_folder else source.name
        config.dataset_config = source.configuration
    return vars(config)


def environment(
    accelerator: Accelerator, config: TrainingConfig, precision: str, placement: str
) -> dict[str, Any]:
    processes = accelerator.num_processes
    return {
        "device": device_name(accelerator.device),
        "device_type": accelerator.device.type,
        "world_size": processes,
        "sharding": "no" if getattr(accelerator, "mesh", None) is None else "FSDP2",
        "mixed_precision": precision,
        "data_placement": placement,
        "effective_batch_size": config.batch_size * config.gradient_accumulation_steps * processes,
        "threads_per_process": torch.get_num_threads(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
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
