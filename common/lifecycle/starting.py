"""The last stage before the loop: resolves open flags, restores a checkpoint, opens the logs."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import set_seed

from common.checkpoints import export
from common.checkpoints.state import State
from common.config import TrainingConfig
from common.console import say
from common.data.iterable import IterableSamples
from common.flags import role_of
from common.lifecycle.environment_changes import tell_changed_environment
from common.lifecycle.initial_digest import digest_of_model
from common.lifecycle.saving import restore
from common.lifecycle.stages import Context, KeptParts, LoadedData, StartedRun
from common.lifecycle.training_figures import position_figures
from common.measure.memory_plan import MemoryPlan
from common.profile.profiler import Profiler
from common.run_directory.records import (
    CONFIG,
    Architecture,
    Flags,
    PeakRate,
    RunConfig,
    Source,
)
from common.run_directory.status import read_status
from common.run_directory.stored_run import StoredRun
from common.storage.json_files import json_safe
from common.system.allocator import HEAP
from common.system.launch_variables import local_world_size
from common.track import facts
from common.track.card import flags_given
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
    """Resolve the flags, restore the checkpoint of a resumed run, and open the logs.

    Args:
        description: the model's ``name``, and whatever else is needed to build it again.

    Raises:
        UserError: the weights of `--init-from` or the checkpoint do not fit this run.
    """
    config = context.config
    if config.init_from is not None:
        export.load_initial(kept.bare_model, config, loaded.data.class_names)
        export.keep_initial(config, context.directory.path)
    memory_plan = make_memory_plan(context, loaded, kept)
    profiler = make_profiler(context, plan)
    keep_own_parts(context, loaded)
    context.resolution.resolve(**facts.flags_of(loaded.data))
    earlier_config = config_to_resume(context)
    # A resume compares these facts with those of its checkpoint, before they are written.
    saved_config = compose_run_config(
        context, loaded, plan, kept, description, memory_plan, earlier_config
    )
    started = StartedRun(
        context=context,
        loaded=loaded,
        plan=plan,
        kept=kept,
        description=description,
        memory_plan=memory_plan,
        profiler=profiler,
        saved_config=saved_config,
    )
    random_states = restore_checkpoint(started, earlier_config)
    started = replace(started, saved_config=write_run_config(started, earlier_config))
    context.logs.start(config, started.saved_config, partial(position_figures, context, plan))
    tell_unknown_contents(started.saved_config)
    seed_or_restore_generators(context, random_states)
    return started


def restore_checkpoint(started: StartedRun, earlier_config: RunConfig | None) -> State | None:
    """Restore the checkpoint of a resumed run; return the states of its random generators.

    The result is None for a new run, and wherever `restore` returns None.
    """
    resume = started.context.config.resume
    if earlier_config is None or resume is None:
        return None
    random_states = restore(started, Path(resume))
    if started.context.progress.global_step > 0:
        tell_changed_environment(earlier_config.environment, started.saved_config.environment)
    return random_states


def make_memory_plan(context: Context, loaded: LoadedData, kept: KeptParts) -> MemoryPlan:
    return MemoryPlan(
        context.accelerator,
        kept.model,
        kept.optimizer,
        loaded.loaders["train"],
        # Not earlier, because kept memory would change what the plan measures.
        when_measured=lambda share: keep_freed_memory(context.accelerator.device, share),
    )


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
    # A resume compares this description with the parts that it begins with. Training may change an
    # optimizer's options, so the parts are described now, before the first update.
    parts.freeze_description()


def config_to_resume(context: Context) -> RunConfig | None:
    """Return the contents of `config.json` of the run to resume; None for a new run."""
    if context.config.resume is None:
        return None
    return StoredRun(context.directory.path).saved_config


def compose_run_config(
    context: Context,
    loaded: LoadedData,
    plan: Plan,
    kept: KeptParts,
    description: Mapping[str, object],
    memory_plan: MemoryPlan,
    earlier_config: RunConfig | None,
) -> RunConfig:
    """Return the contents of `config.json`, without the source and the digest of initial weights.

    `write_run_config` adds these two, because they depend on the step that a resume goes on from.

    Args:
        earlier_config: the contents that an earlier attempt wrote; None on a first start.
    """
    config = context.config
    meters = context.meters
    placement = loaded.loaders["train"].placement
    parameters = sum(parameter.numel() for parameter in kept.bare_model.parameters())
    given = facts.flags_given_at_first_start(context.resolution.given, earlier_config)
    run_config = RunConfig(
        recipe=context.recipe,
        flags=json_safe(vars(config)),
        given=json_safe(given),
        command=f"{context.recipe}.py {flags_given(config, given, all_of_them=True)}",
        wandb_run_id=facts.wandb_run_id_of(earlier_config),
        run_id=context.directory.run_id,
        environment=facts.environment(config, context.accelerator, placement),
        objective=str(context.objective),
        data=loaded.data.facts(),
        architecture=Architecture(name=str(description["name"]), parameters=parameters),
        plan=plan.facts(),
        memory_plan=memory_plan.facts(),
        peak=PeakRate(tflops=meters.peak, source=meters.peak_source),
    )
    return run_config.model_copy(update=roles_of_recipe(config))


def roles_of_recipe(config: TrainingConfig) -> dict[str, dict[str, bool]]:
    """Return the fields of `RunConfig` for the flags to which the recipe gives another role.

    Tools read them from `config.json`. A field without flags is left out of the file.
    """
    roles = {
        "compared": facts.decided_otherwise(config, "compared"),
        "free_on_resume": facts.decided_otherwise(config, "free"),
    }
    return {field: flags for field, flags in roles.items() if flags}


def keep_freed_memory(device: torch.device, share: float) -> None:
    """On a CPU, have the C library keep the memory that tensors free, if the plan leaves room.

    Blocks of different sizes leave holes in kept memory, so it may exceed the plan.

    Args:
        device: the device of the run.
        share: the share of the machine's memory that this process's plan takes.
    """
    if device.type == "cpu" and share * local_world_size() <= MAX_KEPT:
        HEAP.keep()


def write_run_config(started: StartedRun, earlier_config: RunConfig | None) -> RunConfig:
    """Add the source and the digest of initial weights, write `config.json`, return its contents.

    `status.json` says from now on that the run is at the current step, unless a rank has failed.
    The provenance of this attempt is saved in the background.
    """
    context = started.context
    directory = context.directory
    step = context.progress.global_step
    if read_status(directory.path).status == "running":  # another rank may have noted "failed"
        directory.write_status("running", step)
    saved_source = Source() if earlier_config is None else earlier_config.source
    source = context.source.record(directory, saved_source, step)
    beginning = {"source": source, "initial_weights": initial_weights(started, earlier_config)}
    saved_config = started.saved_config.model_copy(update=beginning)
    directory.write(CONFIG, saved_config.to_json())
    changes = changed_flags(context.config, earlier_config)
    context.provenance.begin(step, saved_config.environment, changes)
    return saved_config


def changed_flags(config: TrainingConfig, earlier_config: RunConfig | None) -> Flags:
    """Return the flags that runs are compared by and that this resume has changed.

    A flag that the earlier attempt did not have does not count as changed.
    """
    if earlier_config is None:
        return {}
    flags_before = earlier_config.flags
    return {
        name: value
        for name, value in json_safe(vars(config)).items()
        if role_of(type(config), name).compared and value != flags_before.get(name, value)
    }


def initial_weights(started: StartedRun, earlier_config: RunConfig | None) -> str | None:
    """Return the digest of the weights that training starts with.

    A resume after the first update returns the digest in the run's `config.json`. Otherwise, the
    result is None on ranks other than 0, which do not write it, with `--evaluate-only`, and where
    `digest_of_model` returns None.
    """
    context = started.context
    if earlier_config is not None and context.progress.global_step > 0:
        return earlier_config.initial_weights
    if context.config.evaluate_only or not context.accelerator.is_main_process:
        return None
    return digest_of_model(context.accelerator.structure_of(started.kept.bare_model))


def tell_unknown_contents(saved_config: RunConfig) -> None:
    """Name the splits whose data a resume can't compare with those of the first start.

    The lines follow those of `report.show_plan`, and so they have the same indentation.
    """
    for split in saved_config.data.unknown_contents or ():
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
