"""What `config.json` says of a run: its flags as resolved, and what else its figures depend on."""

import platform
import secrets
import subprocess
from contextlib import suppress
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from common.config import TrainingConfig
from common.data.batch import Data
from common.flags import role_of
from common.machine import device_name
from common.track.card import flags_given
from common.track.names import Facts
from common.training.accelerator import running_precision

PACKAGES = ("torch", "accelerate", "transformers", "datasets", "wandb", "numpy")


def collect(
    recipe: str, config: TrainingConfig, given: Facts, saved: Facts, **others: Any
) -> dict[str, Any]:
    """Return the facts of a run; of one that goes on, what was `saved` of its first start."""
    given = {name: value for name, value in saved.get("given", given).items() if name in given}
    compared = compared_otherwise(config)
    return {
        "recipe": recipe,
        "config": vars(config),
        "given": given,
        **({"compared": compared} if compared else {}),
        "command": f"{recipe}.py {flags_given(config, given, all_of_them=True)}",
        # Chosen before anything is tracked: a run that is killed at once keeps it all the same.
        "wandb_run_id": saved.get("wandb_run_id", secrets.token_hex(4)),
        **others,
    }


def compared_otherwise(config: TrainingConfig) -> dict[str, bool]:
    """Return the flags to whose field a recipe gives another role, and whether to compare them.

    `common.compare` takes the others as `TrainingConfig` has them.
    """
    return {
        field.name: role_of(type(config), field.name).compared
        for field in fields(config)
        if role_of(type(config), field.name).compared
        != role_of(TrainingConfig, field.name).compared
    }


def resolve(config: TrainingConfig, data: Data) -> None:
    """Note in the flags what `--dataset` turned out to be: `--config` repeats that."""
    if (source := data.source) is not None:
        is_folder = Path(source.location).is_absolute()
        config.dataset = source.location if is_folder else source.name
        config.dataset_config = source.configuration


def environment(config: TrainingConfig, accelerator: Any, placement: str) -> dict[str, Any]:
    processes = accelerator.num_processes
    return {
        "device": device_name(accelerator.device),
        "device_type": accelerator.device.type,
        "world_size": processes,
        "sharding": "no" if accelerator.mesh is None else "FSDP2",
        "mixed_precision": running_precision(accelerator),
        "data_placement": placement,
        "effective_batch_size": config.batch_size * config.gradient_accumulation_steps * processes,
        "threads_per_process": torch.get_num_threads(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "deterministic": config.deterministic,
        "python": platform.python_version(),
        "versions": package_versions(),
        "git_commit": git_commit(),
    }


def package_versions() -> dict[str, str]:
    """Return the versions of `PACKAGES`, without those that are not installed."""
    versions = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def git_commit() -> str | None:
    """Return the commit of the checkout that holds this module, or None outside of one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        answer = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
