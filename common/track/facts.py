"""Collects the contents of `config.json`: the flags, and everything the figures depend on."""

import platform
import secrets
from contextlib import suppress
from dataclasses import fields
from importlib import metadata
from pathlib import Path

import torch

from common.config import TrainingConfig
from common.data.batch import Data
from common.flags import role_of
from common.json_files import json_safe
from common.run_directory.code_tree import commit_of
from common.run_directory.records import (
    Architecture,
    DataFacts,
    Environment,
    Flags,
    MemoryPlanFacts,
    PeakRate,
    PlanFacts,
    RunConfig,
)
from common.system.devices import device_name
from common.system.machine import processor_kind
from common.track.card import flags_given
from common.training.precision import running_precision
from common.training.sharding import ShardingAccelerator

PACKAGES = ("torch", "accelerate", "transformers", "datasets", "wandb", "numpy")


def collect(
    recipe: str,
    config: TrainingConfig,
    given: Flags,
    saved: RunConfig | None,
    *,
    run_id: str,
    environment: Environment,
    objective: str,
    data: DataFacts,
    architecture: Architecture,
    plan: PlanFacts,
    memory_plan: MemoryPlanFacts | None,
    peak: PeakRate,
) -> RunConfig:
    """Return the contents of `config.json`.

    Args:
        recipe: the name of the recipe's file, without ``.py``.
        config: the flags, with `auto` resolved.
        given: the flags before anything resolved `auto`.
        saved: the contents that the run's first attempt wrote; None on a first start.

    The other arguments are fields of `RunConfig`.
    """
    if saved is not None:  # take the first attempt's flags that the recipe still has
        given = {name: saved.given[name] for name in saved.given if name in given}
        wandb_run_id = saved.wandb_run_id
    else:
        # The id is chosen before the tracker starts, so that a run that is killed at once resumes
        # the same W&B run.
        wandb_run_id = secrets.token_hex(4)
    run_config = RunConfig(
        recipe=recipe,
        config=json_safe(vars(config)),
        given=json_safe(given),
        command=f"{recipe}.py {flags_given(config, given, all_of_them=True)}",
        wandb_run_id=wandb_run_id,
        run_id=run_id,
        environment=environment,
        objective=objective,
        data=data,
        architecture=architecture,
        plan=plan,
        memory_plan=memory_plan,
        peak=peak,
    )
    compared = compared_otherwise(config)
    return run_config.model_copy(update={"compared": compared}) if compared else run_config


def compared_otherwise(config: TrainingConfig) -> dict[str, bool]:
    """Return whether to compare each flag whose role the recipe changed in this respect.

    `recipes compare` reads the answers from `config.json`, because it does not import recipes. For
    all other flags it asks `TrainingConfig`.
    """
    changed: dict[str, bool] = {}
    for field in fields(config):
        is_compared = role_of(type(config), field.name).compared
        if is_compared != role_of(TrainingConfig, field.name).compared:
            changed[field.name] = is_compared
    return changed


def flags_of(data: Data) -> Flags:
    """Return the flags that name the data set which `--dataset auto` chose.

    `config.json` keeps these flags, so that a run which repeats it by `--config` reads the same
    data.
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
