"""Groups of runs that differ only in the seed, or in settings that never affect results."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from common.flags import spelled
from common.tools.compare.readers.run_record import RunRecord
from common.tools.compare.setting_text import value_text
from common.tools.compare.settings import Settings, differing_settings

SEED_FLAG = "seed"
SEED_LABEL = spelled(SEED_FLAG)  # the label of its setting
# The most characters of a label that has settings; see `label_groups`.
MAX_LABEL_LENGTH = 48


@dataclass(frozen=True)
class RunGroup:
    """Runs with the same settings."""

    label: str
    run_indices: tuple[int, ...]  # its runs' indices in the comparison, in order


def group_runs(
    runs: Sequence[RunRecord],
    settings_of_runs: Sequence[Settings],
    labels: Sequence[str] | None,
) -> list[RunGroup]:
    """Put runs that differ in the seed alone into one group; the first run's group comes first.

    Args:
        runs: all runs of a comparison.
        settings_of_runs: each run's settings.
        labels: the name of each run's group. `recipes vary` passes them, because its groups may
            differ in the seed alone. By default, runs whose settings are equal, apart from the
            seed, form one group, and `label_groups` names it.
    """
    if labels is not None:
        return [RunGroup(label, indices) for label, indices in indices_by_key(labels).items()]
    keys = [group_key(settings) for settings in settings_of_runs]
    indices_of_groups = [*indices_by_key(keys).values()]
    group_labels = label_groups(runs, settings_of_runs, indices_of_groups)
    return [
        RunGroup(label, indices)
        for label, indices in zip(group_labels, indices_of_groups, strict=True)
    ]


def indices_by_key(keys: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the indices at which each key occurs, the keys in the order of first occurrence."""
    indices: dict[str, tuple[int, ...]] = {}
    for index, key in enumerate(keys):
        indices[key] = (*indices.get(key, ()), index)
    return indices


def group_key(settings: Settings) -> str:
    """Return a text that is equal for runs of one group. The order of the flags does not matter."""
    settings_without_seed = {
        label: value for label, value in settings.items() if label != SEED_LABEL
    }
    return json.dumps(settings_without_seed, sort_keys=True, default=str)


def label_groups(
    runs: Sequence[RunRecord],
    settings_of_runs: Sequence[Settings],
    indices_of_groups: Sequence[Sequence[int]],
) -> list[str]:
    """Return a label for each group, such as ``dropout=0.1``.

    A label has all settings in which the groups differ, except the seed. All labels are names of
    runs instead, such as ``a and 2 more``, in two cases: each group is a single run; or a label of
    settings would be empty or too long, or equal to another one.
    """
    names = []
    for indices in indices_of_groups:
        names.append(name_of_group([runs[index].name for index in indices]))
    if len(indices_of_groups) == len(runs):
        return names
    settings_of_groups = [settings_of_runs[indices[0]] for indices in indices_of_groups]
    differing_labels = [
        label for label in differing_settings(settings_of_groups) if label != SEED_LABEL
    ]
    labels = [settings_text(settings, differing_labels) for settings in settings_of_groups]
    is_readable = all(0 < len(label) <= MAX_LABEL_LENGTH for label in labels)
    has_repetition = len(set(labels)) < len(labels)
    return labels if is_readable and not has_repetition else names


def settings_text(settings: Settings, labels: Sequence[str]) -> str:
    """Return some of a run's settings, such as ``dropout=0.1, precision=bf16``."""
    texts = [f"{label.removeprefix('--')}={value_text(settings.get(label))}" for label in labels]
    return ", ".join(texts)


def name_of_group(names: Sequence[str]) -> str:
    """Return a name for a group of runs, from their names."""
    first, *others = names
    return f"{first} and {len(others)} more" if others else first
