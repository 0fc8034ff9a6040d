"""The settings on which a run's figures may depend, and which of them must be the same.

A setting is a flag, or another fact about a run that a comparison shows, such as the device.
"""

from collections.abc import Mapping, Sequence
from itertools import chain

from common.config import TrainingConfig
from common.flags import role_of, spelled
from common.run_directory.records import RunConfig
from common.storage.digests import shown_digest
from common.track.names import precision_name

Settings = Mapping[str, object]  # JSON values by the label that a table shows


def settings_of(run_config: RunConfig, run_configs: Sequence[RunConfig]) -> Settings:
    """Return a run's settings, first those that must be the same.

    A flag is left out if the recipe of any of the runs says that it is not to be compared.

    Args:
        run_config: the run to describe.
        run_configs: all runs of the comparison.
    """
    return {
        **settings_that_must_agree(run_config),
        **settings_that_differ_on_purpose(run_config),
        **settings_of_code(run_config, run_configs),
        **compared_flags(run_config, run_configs),
    }


def settings_that_must_agree(run_config: RunConfig) -> Settings:
    """Return the settings that make the figures of two runs incomparable if they differ."""
    return {
        **settings_of_task(run_config),
        **settings_of_measurement(run_config),
        **changes_of_recipe(run_config),
    }


def settings_of_task(run_config: RunConfig) -> Settings:
    """Return the recipe, the model and the data of the run."""
    return {
        "recipe": run_config.recipe,
        "objective": run_config.objective,
        "data set": run_config.data.name,
        **settings_by_name("samples of", run_config.data.sizes),
        "data's fingerprint": run_config.data.fingerprint,
        "model": run_config.architecture.name,
        "parameters": run_config.architecture.parameters,
    }


def settings_of_measurement(run_config: RunConfig) -> Settings:
    """Return the device, the effective batch and the versions with which figures were measured."""
    environment = run_config.environment
    settings: dict[str, object] = {"device": environment.device}
    if environment.device_type == "cpu":  # on other devices, the host hardly changes figures
        settings["processor"] = environment.processor
        settings["threads per process"] = environment.threads_per_process
    return {
        **settings,
        "effective batch": environment.effective_batch_size,
        "python": environment.python,
        **settings_by_name("version of", environment.versions),
    }


def changes_of_recipe(run_config: RunConfig) -> Settings:
    """Return when the text of the recipe changed during the run; empty if it did not."""
    steps = [str(change.global_step) for change in run_config.source.changes]
    return {"recipe changed": f"at update {', '.join(steps)}"} if steps else {}


def settings_that_differ_on_purpose(run_config: RunConfig) -> Settings:
    """Return the settings that often differ on purpose, apart from the flags."""
    environment = run_config.environment
    return {
        "processes": environment.world_size,
        # This is the precision that ran, also if `auto` chose it.
        "precision": precision_name(environment.mixed_precision),
        "updates planned": run_config.plan.total_steps,
    }


def settings_of_code(run_config: RunConfig, run_configs: Sequence[RunConfig]) -> Settings:
    """Return digests of the code that trained.

    Comments and docstrings of the recipe do not matter. If a run has no digest of the code beside
    its recipe, the commit takes its place. A commit says less: it may change no code that trains,
    and changes may be uncommitted. If a run has no digest of its recipe's code, that of its text
    takes its place.

    Args:
        run_configs: all runs of the comparison.
    """
    settings: dict[str, object] = {}
    source = run_config.source
    if source.code_sha256 and all(each.source.code_sha256 for each in run_configs):
        settings["code of the recipe"] = shown_digest(source.code_sha256)
    elif source.sha256 is not None:
        settings["text of the recipe"] = shown_digest(source.sha256)
    digest = run_config.environment.code_sha256
    commit = run_config.environment.git_commit
    if digest is not None and all(each.environment.code_sha256 for each in run_configs):
        settings["code beside the recipe"] = shown_digest(digest)
    else:
        settings["commit"] = None if commit is None else shown_digest(commit)
    return settings


def compared_flags(run_config: RunConfig, run_configs: Sequence[RunConfig]) -> Settings:
    """Return the flags of a run that the recipes of all runs want compared."""
    settings: dict[str, object] = {}
    for name, value in run_config.flags.items():
        if name == "mixed_precision":  # the setting "precision" replaces this flag
            continue
        if all(is_compared(name, each_config) for each_config in run_configs):
            settings[spelled(name)] = value
    return settings


def is_compared(flag: str, run_config: RunConfig) -> bool:
    """Return whether a comparison shows a flag in which runs differ, by the run's recipe.

    `config.json` has this only for flags in which the recipe differs from `TrainingConfig`, which
    has the flags that all recipes share.
    """
    default = role_of(TrainingConfig, flag).compared
    return run_config.compared.get(flag, default)


def settings_by_name(beginning: str, values: Mapping[str, object]) -> Settings:
    """Return a setting for each of several values, such as "version of torch".

    Without values, there is one empty setting, so that a run without them differs from one that has
    some.

    Args:
        beginning: the words of each label before the name of its value.
    """
    if not values:
        return {beginning: {}}
    return {f"{beginning} {name}": value for name, value in values.items()}


def differing_settings(settings_of_runs: Sequence[Settings]) -> dict[str, list[object]]:
    """Return each run's value of the settings in which the runs differ, by label.

    Args:
        settings_of_runs: each run's settings. A run that lacks a setting has the value None.
    """
    differences = {}
    for label in dict.fromkeys(chain(*settings_of_runs)):
        values = [settings.get(label) for settings in settings_of_runs]
        if any(value != values[0] for value in values):
            differences[label] = values
    return differences
