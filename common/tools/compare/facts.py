"""The facts and flags on which a run's figures may depend, and which of them must be the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.config import TrainingConfig
from common.flags import role_of, spelled
from common.run_directory.records import RunConfig
from common.track.names import precision_name

DIGITS_OF_DIGEST = 8  # digits that a table shows of a SHA-256


@dataclass(frozen=True)
class RunFact:
    """A fact about a run."""

    value: object
    # Whether a different value makes the figures of two runs incomparable. Other facts, such as
    # flags, often differ on purpose.
    makes_unfair: bool = False


RunFacts = dict[str, RunFact]  # by the label that a table shows


def facts_of(run: RunConfig, runs: Sequence[RunConfig]) -> RunFacts:
    """Return a run's facts and flags by label, first the facts that must be the same.

    A flag is left out if the recipe of any of the `runs` says that it is not to be compared.

    Args:
        run: the run to describe.
        runs: all runs of the comparison.
    """
    return {
        **facts_of_task(run),
        **facts_of_machine(run),
        **facts_that_differ_on_purpose(run),
        **facts_of_text(run),
        **facts_of_flags(run, runs),
    }


def facts_of_task(run: RunConfig) -> RunFacts:
    """Return the recipe, the model and the data of the run."""
    return {
        "recipe": RunFact(run.recipe, makes_unfair=True),
        "objective": RunFact(run.objective, makes_unfair=True),
        "data set": RunFact(run.data.name, makes_unfair=True),
        **unfair_facts("samples of", run.data.sizes),
        "data's fingerprint": RunFact(run.data.fingerprint, makes_unfair=True),
        "model": RunFact(run.architecture.name, makes_unfair=True),
        "parameters": RunFact(run.architecture.parameters, makes_unfair=True),
    }


def facts_of_machine(run: RunConfig) -> RunFacts:
    """Return the device and the versions on which the run was measured."""
    environment = run.environment
    facts = {"device": RunFact(environment.device, makes_unfair=True)}
    if environment.device_type == "cpu":  # on other devices, the host hardly changes figures
        facts["processor"] = RunFact(environment.processor, makes_unfair=True)
        facts["threads per process"] = RunFact(environment.threads_per_process, makes_unfair=True)
    return {
        **facts,
        "effective batch": RunFact(environment.effective_batch_size, makes_unfair=True),
        "python": RunFact(environment.python, makes_unfair=True),
        **unfair_facts("version of", environment.versions),
    }


def facts_that_differ_on_purpose(run: RunConfig) -> RunFacts:
    """Return the facts that often differ on purpose."""
    environment = run.environment
    return {
        "processes": RunFact(environment.world_size),
        # This is the precision that ran, also if `auto` chose it.
        "precision": RunFact(precision_name(environment.mixed_precision)),
        "updates planned": RunFact(run.plan.total_steps),
        "commit": RunFact(environment.git_commit),
    }


def facts_of_text(run: RunConfig) -> RunFacts:
    """Return the digest of the recipe's text, and when the text changed during the run."""
    facts = {}
    source = run.source
    if source.sha256 is not None:
        facts["text of the recipe"] = RunFact(source.sha256[:DIGITS_OF_DIGEST])
    if source.changes:
        steps = ", ".join(str(change.global_step) for change in source.changes)
        facts["recipe changed"] = RunFact(f"at update {steps}", makes_unfair=True)
    return facts


def facts_of_flags(run: RunConfig, runs: Sequence[RunConfig]) -> RunFacts:
    """Return the flags of a run that the recipes of all `runs` want compared."""
    return {
        spelled(name): RunFact(value)
        for name, value in run.config.items()
        # The fact "precision" replaces the flag --mixed-precision.
        if name != "mixed_precision" and all(is_compared(name, any_run) for any_run in runs)
    }


def unfair_facts(label: str, values: Mapping[str, object]) -> RunFacts:
    """Return a fact for each of several values, such as "version of torch".

    Without values, there is one fact, which says that there are none.
    """
    if not values:
        return {label: RunFact(values, makes_unfair=True)}
    return {f"{label} {name}": RunFact(value, makes_unfair=True) for name, value in values.items()}


def labels_that_must_agree(facts_of_runs: Sequence[RunFacts]) -> set[str]:
    """Return the labels of the facts that must agree for figures to be comparable."""
    labels: set[str] = set()
    for facts in facts_of_runs:
        labels |= {label for label, fact in facts.items() if fact.makes_unfair}
    return labels


def is_compared(flag: str, run: RunConfig) -> bool:
    """Return whether a run's recipe wants a flag compared.

    `config.json` states this only where the recipe differs from `TrainingConfig`, which has the
    flags that all recipes share.
    """
    is_usually_compared = role_of(TrainingConfig, flag).compared
    return run.compared.get(flag, is_usually_compared)
