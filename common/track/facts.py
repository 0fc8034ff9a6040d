"""Finds what `config.json` says: how the flags were stated, and the environment of the run."""

import platform
import secrets
from contextlib import suppress
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch

from common.config import TrainingConfig
from common.data.samples import Data
from common.flags import role_of
from common.run_directory.records import Environment, Flags, RunConfig
from common.system.devices import device_name
from common.system.git import commit_of
from common.system.processor import processor_kind
from common.training.precision import running_precision
from common.training.sharding import ShardingAccelerator

Decision = Literal["compared", "free"]  # the names of parts of a `Role`
PACKAGES = ("torch", "accelerate", "transformers", "datasets", "wandb", "numpy")


def flags_given_at_first_start(given: Flags, earlier_config: RunConfig | None) -> Flags:
    """Return the flags as the run's first start stated them, without flags that no longer exist.

    Args:
        given: all flags of this start, before anything resolved `auto`.
        earlier_config: the contents of `config.json` that an earlier attempt wrote; None on a first
            start.
    """
    if earlier_config is None:
        return given
    earlier_given = earlier_config.given
    return {name: earlier_given[name] for name in earlier_given if name in given}


def wandb_run_id_of(earlier_config: RunConfig | None) -> str:
    """Return the id of the run at W&B, which a first start chooses.

    The id is chosen before the tracker starts, so that a run that is killed right after its start
    resumes the same W&B run. See `flags_given_at_first_start` for `earlier_config`.
    """
    return secrets.token_hex(4) if earlier_config is None else earlier_config.wandb_run_id


def decided_otherwise(config: TrainingConfig, decision: Decision) -> dict[str, bool]:
    """Return the flags for which the recipe decides otherwise than `TrainingConfig`.

    Tools read these decisions from `config.json`, because they do not import the recipes of runs.
    For all other flags, they ask `TrainingConfig`.

    Args:
        decision: a part of a flag's role. For example, `recipes compare` compares runs only by the
            flags that are "compared".

    Returns:
        For each such flag, what the recipe decides.
    """
    decided: dict[str, bool] = {}
    for field in fields(config):
        by_recipe: bool = getattr(role_of(type(config), field.name), decision)
        by_default: bool = getattr(role_of(TrainingConfig, field.name), decision)
        if by_recipe != by_default:
            decided[field.name] = by_recipe
    return decided


def flags_of(data: Data) -> Flags:
    """Return the flags that name the data set of a run, also where `--dataset auto` chose it.

    `config.json` keeps these flags, so that a run which repeats it by `--config` reads the same
    data. There are none if the recipe made its data itself.
    """
    source = data.source
    if source is None:
        return {}
    is_folder = Path(source.location).is_absolute()
    return {
        "dataset": source.location if is_folder else source.name,
        "dataset_config": source.configuration,
    }


def environment(
    config: TrainingConfig, accelerator: ShardingAccelerator, placement: str
) -> Environment:
    """Return the hardware, settings and versions on which a run's figures depend.

    Args:
        config: the flags.
        accelerator: the run's Accelerator.
        placement: where batches are made, "device" or "workers".
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
        git_commit=git_commit(),
    )


def package_versions() -> dict[str, str]:
    """Return the versions of those `PACKAGES` that are installed."""
    versions = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def git_commit() -> str | None:
    """Return the git commit of the checkout that this module is in; None without a checkout."""
    return commit_of(Path(__file__).parent)
