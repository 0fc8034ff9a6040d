"""Composes the contents of `config.json`, which a run writes when it starts."""

import secrets
from dataclasses import fields
from typing import Literal, TypedDict

from common.config import TrainingConfig
from common.flags import role_of
from common.lifecycle.stages import PlannedRun
from common.lifecycle.start.initial_digest import digest_of_model
from common.run_directory.records import Architecture, Flags, PeakRate, RunConfig, Source
from common.storage.json_files import json_safe
from common.track.card import flags_as_text

Decision = Literal["compared", "free_on_resume"]  # the names of parts of a `Role`


class RolesOfRecipe(TypedDict, total=False):
    """The fields of `RunConfig` for the flags to which a recipe gives another role."""

    compared: dict[str, bool]
    free_on_resume: dict[str, bool]


def compose_run_config(
    planned: PlannedRun, source: Source, earlier_config: RunConfig | None
) -> RunConfig:
    """Return the contents of `config.json`.

    A resumed run must have restored its checkpoint before.

    Args:
        source: the recipe's text, at the start and after each change.
        earlier_config: the contents that an earlier attempt wrote; None on a first start.
    """
    context = planned.context
    config = context.config
    meters = context.meters
    parameters = sum(parameter.numel() for parameter in planned.kept.bare_model.parameters())
    given_flags = flags_at_first_start(context.flag_resolution.given_flags, earlier_config)
    return RunConfig(
        recipe=context.recipe,
        objective=str(context.objective),
        flags=json_safe(vars(config)),
        given_flags=json_safe(given_flags),
        environment=planned.environment,
        data=planned.data_facts,
        architecture=Architecture(name=str(planned.description["name"]), parameters=parameters),
        plan=planned.plan.facts(),
        memory_plan=planned.memory_plan.facts(),
        peak=PeakRate(tflops=meters.peak, source=meters.peak_source),
        command=f"{context.recipe}.py {flags_as_text(config, given_flags)}",
        run_id=context.directory.run_id,
        wandb_run_id=wandb_run_id_of(earlier_config),
        source=source,
        initial_weights=digest_of_initial_weights(planned, earlier_config),
        **roles_of_recipe(config),
    )


def flags_at_first_start(given_flags: Flags, earlier_config: RunConfig | None) -> Flags:
    """Return all flags of the run's first start, before any was resolved.

    Flags that no longer exist are left out.

    Args:
        given_flags: all flags of this start, before any was resolved.
        earlier_config: the contents of `config.json` that an earlier attempt wrote; None on a first
            start.
    """
    if earlier_config is None:
        return given_flags
    earlier_flags = earlier_config.given_flags
    return {name: value for name, value in earlier_flags.items() if name in given_flags}


def wandb_run_id_of(earlier_config: RunConfig | None) -> str:
    """Return the id of the run at W&B, which a first start chooses.

    The id is chosen before the tracker starts, so that a run that is killed right after its start
    resumes the same W&B run. See `flags_at_first_start` for `earlier_config`.
    """
    return secrets.token_hex(4) if earlier_config is None else earlier_config.wandb_run_id


def digest_of_initial_weights(planned: PlannedRun, earlier_config: RunConfig | None) -> str | None:
    """Return the digest of the weights that training starts with.

    A resume after the first update returns the digest in the run's `config.json`. Otherwise, the
    result is None on ranks other than 0, which do not write it, with `--evaluate-only`, and where
    `digest_of_model` returns None.
    """
    context = planned.context
    if earlier_config is not None and context.progress.global_step > 0:
        return earlier_config.initial_weights
    if context.config.evaluate_only or not context.accelerator.is_main_process:
        return None
    return digest_of_model(context.accelerator.structure_of(planned.kept.bare_model))


def roles_of_recipe(config: TrainingConfig) -> RolesOfRecipe:
    """Return the flags to which the recipe gives another role, as fields of `RunConfig`.

    A field without flags is left out here, and thus in the file.
    """
    roles = RolesOfRecipe()
    compared = overridden_decisions(config, "compared")
    if compared:
        roles["compared"] = compared
    free_on_resume = overridden_decisions(config, "free_on_resume")
    if free_on_resume:
        roles["free_on_resume"] = free_on_resume
    return roles


def overridden_decisions(config: TrainingConfig, decision: Decision) -> dict[str, bool]:
    """Return the flags for which the recipe overrides the decision of `TrainingConfig`.

    Tools read these decisions from `config.json`, because they do not import the recipes of runs.
    For all other flags, they ask `TrainingConfig`.

    Args:
        decision: a part of a flag's role. For example, `recipes compare` compares runs only by the
            flags that are "compared".

    Returns:
        For each such flag, what the recipe decides.
    """
    overridden: dict[str, bool] = {}
    for field in fields(config):
        by_recipe: bool = getattr(role_of(type(config), field.name), decision)
        by_default: bool = getattr(role_of(TrainingConfig, field.name), decision)
        if by_recipe != by_default:
            overridden[field.name] = by_recipe
    return overridden
