"""Finds the facts in which an old run and its repetition differ."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from pydantic import JsonValue

from common.flags import spelled
from common.run_directory.records import Attempt
from common.tools.reproduce.compared_run import ComparedRun
from common.tools.reproduce.facts import (
    FACTS_OF_LOCATION,
    FACTS_OF_PROCESSES,
    FLAGS_OF_DATA,
    FLAGS_OF_OTHER_FACTS,
    FLAGS_OF_ROWS,
    OTHER_VALUE,
    RecordedFact,
    facts_of,
    text_of_flag,
)
from common.tools.reproduce.receipt import FactDifference


def differences_of(old: ComparedRun, new: ComparedRun) -> list[FactDifference]:
    """Return the facts in which two runs differ.

    A fact whose value a run did not record is not compared. A package, for example, that a run is
    known to lack counts as a difference.

    If the old run was resumed, the new run uses the facts of the last attempt from the first update
    on. So facts that changed between the attempts of the old run are also returned.
    """
    return [
        *differences_of_last_attempts(old, new),
        *fact_differences_within(old),
        *flag_differences_within(old),
    ]


def fact_differences_within(run: ComparedRun) -> list[FactDifference]:
    """Return the facts in which the earlier attempts of a run differ from its last one."""
    differences = []
    last = replace(run, attempts=run.attempts[-1:])
    for attempt, following in pairwise(run.attempts):
        earlier = replace(run, attempts=[attempt])
        for difference in differences_of_last_attempts(earlier, last):
            label = f"{difference.fact}{until_attempt(following)}"
            differences.append(difference.model_copy(update={"fact": label}))
    return differences


def flag_differences_within(run: ComparedRun) -> list[FactDifference]:
    """Return the flags whose value in an earlier attempt of a run differs from the last value.

    A resume can change only flags that do not matter for what the model learns, and those that it
    adapts to the number of processes. So these differences may change bits, but not the experiment.
    """
    differences = []
    for change in flag_changes(run):
        last_value = text_of_flag(run.saved_config.flags.get(change.name, change.after))
        if change.before is None:
            # The run recorded only the new value of this change. Its old value was another one. If
            # the new value is also the last value, the old value differs from the last value.
            # Otherwise the two may be equal, so nothing is reported.
            differs = text_of_flag(change.after) == last_value
        else:
            differs = change.before != last_value
        if differs:
            differences.append(
                FactDifference(
                    fact=f"{spelled(change.name)}{until_attempt(change.attempt)}",
                    before=change.before or OTHER_VALUE,
                    now=last_value,
                    changes_bits=change.name not in FLAGS_OF_ROWS,
                )
            )
    return differences


class FlagChange(NamedTuple):
    """A change of a flag between two attempts of a run."""

    name: str
    attempt: Attempt  # the first attempt with the new value
    before: str | None  # in words; None before the first change, because a run does not record it
    after: JsonValue


def flag_changes(run: ComparedRun) -> Iterator[FlagChange]:
    """Yield the changes of flags in their order, except of flags that other facts stand for."""
    latest_values: dict[str, str] = {}  # in words, of each flag that was changed so far
    for attempt in run.attempts[1:]:
        for name, value in attempt.changed_flags.items():
            if name not in (*FLAGS_OF_OTHER_FACTS, *FLAGS_OF_DATA):
                yield FlagChange(name, attempt, latest_values.get(name), value)
                latest_values[name] = text_of_flag(value)


def until_attempt(attempt: Attempt) -> str:
    """Return the end of the label of a fact that held until an attempt began."""
    return f" until update {attempt.global_step}"


def differences_of_last_attempts(old: ComparedRun, new: ComparedRun) -> list[FactDifference]:
    """Return the facts in which the last attempts of two runs differ."""
    old_facts = facts_of(old)
    new_facts = facts_of(new)
    differences = []
    for label in dict.fromkeys([*old_facts, *new_facts]):
        old_fact = old_facts.get(label)
        new_fact = new_facts.get(label)
        if old.attempts and new.attempts:
            # Attempts list all of their packages and variables, so a missing one is a difference.
            # This also holds for a flag that only one version of the recipe has.
            old_fact = old_fact or missing_fact(new_fact)
            new_fact = new_fact or missing_fact(old_fact)
        if old_fact is None or new_fact is None:
            continue
        difference = fact_difference(label, old_fact, new_fact)
        if difference is not None and not is_cut_path(old, difference):
            differences.append(difference)
    differences = excuse_explained_weights(differences)
    if is_data_equal(old, new):
        return [
            difference for difference in differences if difference.fact not in FACTS_OF_LOCATION
        ]
    return differences


def missing_fact(other: RecordedFact | None) -> RecordedFact:
    """Return the fact of a package, variable or flag that a run lacks and the other run has."""
    return RecordedFact("none", changes_bits=other is None or other.changes_bits)


def fact_difference(label: str, old: RecordedFact, new: RecordedFact) -> FactDifference | None:
    """Return how two runs differ in a fact; None if they agree, or if one did not record it."""
    if old.value is None or new.value is None or old.value == new.value:
        return None
    return FactDifference(
        fact=label,
        before=old.value,
        now=new.value,
        changes_bits=old.changes_bits or new.changes_bits,
        defines_experiment=old.defines_experiment or new.defines_experiment,
    )


def is_cut_path(old: ComparedRun, difference: FactDifference) -> bool:
    """Whether a flag differs only because publishing a run replaced a path by its last part."""
    is_flag = difference.fact.startswith("--")
    return old.is_published and is_flag and difference.before == Path(difference.now).name


def excuse_explained_weights(differences: Sequence[FactDifference]) -> list[FactDifference]:
    """Return the differences; initial weights are excused if another difference explains them.

    A different device or version, for example, may change the last bits of random initial weights.
    Such weights do not make the new run a different experiment, so `defines_experiment` becomes
    false.
    """
    if not any(may_change_initialization(difference) for difference in differences):
        return [*differences]
    return [
        difference.model_copy(update={"defines_experiment": False})
        if difference.fact == "initial weights"
        else difference
        for difference in differences
    ]


def may_change_initialization(difference: FactDifference) -> bool:
    """Whether a differing fact may change the last bits of randomly initialized weights.

    Numbers of processes, machines and threads do not.
    """
    is_of_machine = difference.changes_bits and not difference.defines_experiment
    return is_of_machine and difference.fact not in FACTS_OF_PROCESSES


def is_data_equal(old: ComparedRun, new: ComparedRun) -> bool:
    """Whether two runs read the same data, wherever stored, by fingerprint."""
    fingerprint = old.saved_config.data.fingerprint
    return fingerprint is not None and fingerprint == new.saved_config.data.fingerprint
