"""Groups of runs that differ in the seed alone, or in what never matters to results."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.flags import spelled
from common.tools.compare.readers import RunRecord
from common.tools.compare.words import value_text

SEED = spelled("seed")
# A group is called by its settings up to this length, and by its first run otherwise.
LONGEST_LABEL = 48

Facts = Mapping[str, object]  # facts and flags that a run's figures may depend on, by label


@dataclass(frozen=True)
class RunGroup:
    """Runs with the same settings."""

    label: str
    places: tuple[int, ...]  # places of its runs in the comparison, in order


def group_runs(
    runs: Sequence[RunRecord], facts: Sequence[Facts], labels: Sequence[str] | None = None
) -> list[RunGroup]:
    """Put runs that differ in the seed alone into one group; the first run's group comes first.

    Args:
        runs: all runs of a comparison.
        facts: for each run, what its figures may depend on. The seed does not count here.
        labels: the group of each run. By default, runs with equal facts are one group, which is
            called by the settings that tell the groups apart.
    """
    if labels is not None:
        return [RunGroup(label, places) for label, places in places_by_key(labels).items()]
    all_places = [*places_by_key([group_key(own_facts) for own_facts in facts]).values()]
    group_labels = label_groups(runs, facts, all_places)
    return [RunGroup(label, places) for label, places in zip(group_labels, all_places, strict=True)]


def places_by_key(keys: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the places at which each key stands, in the order of the keys' first places."""
    places: dict[str, tuple[int, ...]] = {}
    for place, key in enumerate(keys):
        places[key] = (*places.get(key, ()), place)
    return places


def group_key(facts: Facts) -> str:
    """Return a text that is the same for runs of one group. The order of flags does not matter."""
    settings = {label: value for label, value in facts.items() if label != SEED}
    return json.dumps(settings, sort_keys=True, default=str)


def label_groups(
    runs: Sequence[RunRecord], facts: Sequence[Facts], all_places: Sequence[Sequence[int]]
) -> list[str]:
    """Return a label for each group, such as ``dropout=0.1``.

    A label has all settings in which the groups differ. If a label would be too long, or if two
    would look the same, all groups are called by their first run. If each group is a single run,
    groups have the runs' names as well.
    """
    names = [name_of_group([runs[place].name for place in places]) for places in all_places]
    if len(all_places) == len(runs):
        return names
    facts_of_groups = [facts[places[0]] for places in all_places]
    settings = differing_settings(facts_of_groups)
    labels = [settings_text(own_facts, settings) for own_facts in facts_of_groups]
    is_readable = all(0 < len(label) <= LONGEST_LABEL for label in labels)
    has_repetition = len(set(labels)) < len(labels)
    return labels if is_readable and not has_repetition else names


def differing_settings(facts_of_groups: Sequence[Facts]) -> list[str]:
    """Return the labels of the facts that differ between groups, without the seed."""
    first = facts_of_groups[0]
    labels = dict.fromkeys(label for facts in facts_of_groups for label in facts if label != SEED)
    return [
        label
        for label in labels
        if any(facts.get(label) != first.get(label) for facts in facts_of_groups)
    ]


def settings_text(facts: Facts, labels: Sequence[str]) -> str:
    """Return some of a run's settings, such as ``dropout=0.1, precision=bf16``."""
    settings = [f"{label.removeprefix('--')}={value_text(facts.get(label))}" for label in labels]
    return ", ".join(settings)


def name_of_group(names: Sequence[str]) -> str:
    """Return a name for a group of runs, from their names."""
    first, *others = names
    return f"{first} and {len(others)} more" if others else first
