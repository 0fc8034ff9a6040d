"""The last stage before the loop: resolves open flags, restores a checkpoint, opens the logs."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import set_seed

from common.checkpoints import initial_weights
from common.checkpoints.adapters import State
from common.checkpoints.initial_copies import checksums_of_matrices, copies_of, give_weights
from common.config import TrainingConfig
from common.console import say
from common.data.dataset import Data
from common.data.iterable import IterableSamples
from common.flags import role_of
from common.lifecycle.saving import restore
from common.lifecycle.stages import Context, KeptParts, LoadedData, PlannedRun, StartedRun
from common.lifecycle.start.environment import current_environment
from common.lifecycle.start.environment_changes import say_changed_environment
from common.lifecycle.start.run_config import compose_run_config
from common.lifecycle.training_figures import current_position
from common.measure.memory_plan import MemoryPlan
from common.profile.profiler import Profiler
from common.run_directory.records import CONFIG, Flags, RunConfig, Source
from common.run_directory.status import read_status
from common.run_directory.stored_run import StoredRun
from common.storage.json_files import json_safe
from common.system.allocator import HEAP
from common.system.launch_variables import local_world_size
from common.system.wording import listed
from common.training.plan import Plan

# A process keeps freed memory only if the memory plans of all processes of the machine take at most
# this share of the machine's memory.
MAX_KEPT = 0.5


def start(
    context: Context,
    loaded: LoadedData,
    plan: Plan,
    kept: KeptParts,
    description: Mapping[str, object],
) -> StartedRun:
    """Load initial weights, resolve the last flags, restore a checkpoint, and open the logs.

    Args:
        description: the model's ``name``, and whatever else is needed to build it again.

    Raises:
        UserError: the weights of `--init-from` or the checkpoint do not fit this run.
    """
    replaced_weights: frozenset[int] = frozenset()
    if context.config.init_from is not None:
        replaced_weights = load_initial_with_copies(context, loaded, kept)
        initial_weights.keep_initial(context.config, context.directory.path)
    planned = plan_run(context, loaded, plan, kept, description)
    earlier_config = config_to_resume(context)
    random_states = restore_checkpoint(planned, earlier_config)
    saved_config = record_start(planned, earlier_config)
    context.logs.start(context.config, saved_config, partial(current_position, context, plan))
    warn_of_missing_fingerprints(saved_config)
    seed_or_restore_generators(context, random_states)
    return StartedRun(**vars(planned), saved_config=saved_config, replaced_weights=replaced_weights)


def load_initial_with_copies(
    context: Context, loaded: LoadedData, kept: KeptParts
) -> frozenset[int]:
    """Load the weights of `--init-from` into the model, and into networks that are copies of it.

    Returns:
        The checksums of the model's weights that were replaced; empty without `--evaluate-only`,
        because only an evaluation needs them.
    """
    config = context.config
    model = kept.bare_model
    copies = copies_of(model, context.parts.networks())
    checksums_before: frozenset[int] = frozenset()
    if config.evaluate_only:
        checksums_before = checksums_of_matrices(model)
    initial_weights.load_initial(model, config, loaded.data.class_names)
    give_weights(model, copies.values())
    if copies and config.resume is None:  # a resume restores what the copies were later
        parts = f"{listed([*copies])} of run.keep(...)"
        say(f"--init-from also gives its weights to {parts}, because they began as the model's")
    if config.evaluate_only:
        return checksums_before - checksums_of_matrices(model)
    return frozenset()


def plan_run(
    context: Context,
    loaded: LoadedData,
    plan: Plan,
    kept: KeptParts,
    description: Mapping[str, object],
) -> PlannedRun:
    """Plan the memory and the profile, add the run's own parts, and resolve the last flags."""
    memory_plan = make_memory_plan(context, loaded, kept)
    profiler = make_profiler(context, plan)
    keep_own_parts(context, loaded)
    context.flag_resolution.resolve(**flags_of_data(loaded.data))
    context.flag_resolution.freeze()
    placement = loaded.loaders["train"].placement
    return PlannedRun(
        context=context,
        loaded=loaded,
        plan=plan,
        kept=kept,
        description=description,
        memory_plan=memory_plan,
        profiler=profiler,
        data_facts=loaded.data.facts(),
        environment=current_environment(
            context.config, context.accelerator, placement, context.recipe_file
        ),
    )


def make_memory_plan(context: Context, loaded: LoadedData, kept: KeptParts) -> MemoryPlan:
    return MemoryPlan(
        context.accelerator,
        kept.model,
        kept.optimizer,
        loaded.loaders["train"],
        # Not earlier, because kept memory would change what the plan measures.
        when_measured=lambda share: keep_freed_memory(context.accelerator.device, share),
    )


def keep_freed_memory(device: torch.device, share: float) -> None:
    """On a CPU, have the C library keep the memory that tensors free, if the plan leaves room.

    The system then need not clear the same memory again in each update. Blocks of different sizes
    leave holes in kept memory, so it may exceed the plan.

    Args:
        device: the device of the run.
        share: the share of the machine's memory that this process's plan takes.
    """
    if device.type == "cpu" and share * local_world_size() <= MAX_KEPT:
        HEAP.keep()


def make_profiler(context: Context, plan: Plan) -> Profiler:
    return Profiler(
        config=context.config,
        folder=context.directory.path / "profile",
        accelerator=context.accelerator,
        stopwatch=context.meters.stopwatch,
        plan=plan,
        send_to_tracker=context.logs.send_to_tracker,
    )


def keep_own_parts(context: Context, loaded: LoadedData) -> None:
    """Add the run's own state to the parts that the recipe keeps.

    A part that is not shared has a state of its own on each rank.
    """
    parts = context.parts
    parts.add("progress", context.progress)
    parts.add("log", context.logs.pending_row)
    parts.add("best", context.best)
    if context.accelerator.scaler is not None:
        parts.add("scaler", context.accelerator.scaler)
    samples = loaded.loaders["train"].samples
    if isinstance(samples, IterableSamples):
        parts.add("samples", samples, shared=False)
    parts.add("meters", context.meters, shared=False)
    parts.add("guard", context.guard, shared=False)
    parts.add("random", context.random, shared=False)
    parts.add_left_gradients()
    # A resume compares this description with the parts that it begins with. Training may change an
    # optimizer's options, so the parts are described now, before the first update.
    parts.freeze_description()


def flags_of_data(data: Data) -> Flags:
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


def config_to_resume(context: Context) -> RunConfig | None:
    """Return the contents of `config.json` of the run to resume; None for a new run."""
    if context.config.resume is None:
        return None
    return StoredRun(context.directory.path).saved_config


def restore_checkpoint(planned: PlannedRun, earlier_config: RunConfig | None) -> State | None:
    """Restore the checkpoint of a resumed run; return the states of its random generators.

    The result is None for a new run, and wherever `restore` returns None.
    """
    resume = planned.context.config.resume
    if earlier_config is None or resume is None:
        return None
    random_states = restore(planned, Path(resume))
    if planned.context.progress.global_step > 0:
        say_changed_environment(earlier_config.environment, planned.environment)
    return random_states


def record_start(planned: PlannedRun, earlier_config: RunConfig | None) -> RunConfig:
    """Write the recipe's source and `config.json`, and return the contents of `config.json`.

    `status.json` says from now on that the run is at the current step, unless a rank has failed.
    The provenance of this attempt is saved in the background.
    """
    context = planned.context
    directory = context.directory
    step = context.progress.global_step
    if read_status(directory.path).status == "running":  # another rank may have noted "failed"
        directory.write_status("running", step)
    saved_source = Source() if earlier_config is None else earlier_config.source
    source = context.source.record(directory, saved_source, step)
    saved_config = compose_run_config(planned, source, earlier_config)
    directory.write(CONFIG, saved_config.to_json())
    changes = flags_changed_by_resume(context.config, earlier_config)
    context.provenance.begin(step, planned.environment, changes)
    return saved_config


def flags_changed_by_resume(config: TrainingConfig, earlier_config: RunConfig | None) -> Flags:
    """Return the flags that runs are compared by and that this resume has changed.

    They are for `attempts.json`, because `config.json` has only the flags of the last attempt. A
    flag that the earlier attempt did not have does not count as changed.
    """
    if earlier_config is None:
        return {}
    flags_before = dict(earlier_config.flags)
    if flags_before.get("mixed_precision") == "auto":  # a resume replaces it by what `auto` chose
        flags_before["mixed_precision"] = earlier_config.environment.mixed_precision
    return {
        name: value
        for name, value in json_safe(vars(config)).items()
        if role_of(type(config), name).compared and value != flags_before.get(name, value)
    }


def warn_of_missing_fingerprints(saved_config: RunConfig) -> None:
    """Name the splits whose data a resume can't compare with those of the first start.

    The plan has just been printed, so the lines are indented like its notes.
    """
    splits_without_fingerprint = saved_config.data.unknown_contents or []
    for split in splits_without_fingerprint:
        say(
            f"        split {split} has no fingerprint, so a resume would not notice changed data: "
            "pass a fingerprint with Data(..., fingerprint=TEXT)"
        )


def seed_or_restore_generators(context: Context, random_states: State | None) -> None:
    """Seed the random generators; a resume with `random_states` restores these instead.

    This is the last step before the loop, because any earlier step may draw random numbers.
    """
    step = context.progress.global_step
    rank = context.accelerator.process_index
    # The step is in the seed, so that a resumed run without `random_states` does not repeat the
    # random numbers of its first updates.
    set_seed((context.config.seed + step + rank) % 2**32)
    if random_states is not None:
        context.random.load_state_dict(random_states)
