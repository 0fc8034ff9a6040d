"""Finds the environment of a run, as `config.json` states it: hardware, settings and versions."""

import platform
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch

from common.config import TrainingConfig
from common.run_directory.code_digest import digest_of_code_beside
from common.run_directory.records import Environment
from common.system.devices import device_name
from common.system.git import commit_of_library
from common.system.processor import processor_kind
from common.training.precision import running_precision
from common.training.sharding.accelerator import ShardingAccelerator

PACKAGES = ("torch", "accelerate", "transformers", "datasets", "wandb", "numpy")


def current_environment(
    config: TrainingConfig, accelerator: ShardingAccelerator, placement: str, recipe_file: Path
) -> Environment:
    """Return the hardware, settings and versions on which a run's figures depend.

    Args:
        config: the flags.
        accelerator: the run's Accelerator.
        placement: where batches are made, "device" or "workers".
        recipe_file: the recipe's file.
    """
    world_size = accelerator.num_processes
    batch_size_of_rank = config.batch_size * config.gradient_accumulation_steps
    return Environment(
        device=device_name(accelerator.device),
        device_type=accelerator.device.type,
        processor=processor_kind(torch.backends.cpu.get_cpu_capability()),
        world_size=world_size,
        sharding="no" if accelerator.mesh is None else "FSDP2",
        mixed_precision=running_precision(accelerator),
        data_placement=placement,
        effective_batch_size=batch_size_of_rank * world_size,
        threads_per_process=torch.get_num_threads(),
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        deterministic=config.deterministic,
        python=platform.python_version(),
        versions=package_versions(),
        git_commit=commit_of_library(),
        code_sha256=digest_of_code_beside(recipe_file),
    )


def package_versions() -> dict[str, str]:
    """Return the versions of those `PACKAGES` that are installed."""
    versions = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
