"""The values of a group of runs that count as independent of each other."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from common.tools.compare.comparison import Comparison
from common.tools.compare.groups import SEED_FLAG, RunGroup
from common.tools.compare.readers.run_record import RunRecord
from common.tools.statistics.samples import Sample

Values = Sequence[float | None]  # a figure of all runs of a comparison; None if unknown


def finished_indices(comparison: Comparison, group: RunGroup) -> list[int]:
    """Return the indices of a group's finished runs. A run counts once, whatever its copies.

    An unfinished run has trained for less time, so its figures are not those of the group.
    """
    indices: list[int] = []
    identities: set[str] = set()
    for index in group.run_indices:
        run = comparison.runs[index]
        if run.status == "finished" and run.identity not in identities:
            indices.append(index)
            identities.add(run.identity)
    return indices


def sample_of_runs(comparison: Comparison, group: RunGroup, values: Values) -> Sample:
    """Describe a figure of speed or memory in a group. Each run counts, whatever its seed."""
    values_of_group = [values[index] for index in finished_indices(comparison, group)]
    return Sample.of([value for value in values_of_group if value is not None])


def sample_of_seeds(comparison: Comparison, group: RunGroup, values: Values) -> Sample:
    """Describe a figure of the trained models in a group. Each seed counts once."""
    return Sample.of([*values_of_seeds(comparison, group, values).values()])


def values_of_seeds(comparison: Comparison, group: RunGroup, values: Values) -> dict[str, float]:
    """Return a figure of the trained models in a group, by seed. Unknown values are left out."""
    known: list[tuple[str, float]] = []
    for index in finished_indices(comparison, group):
        value = values[index]
        if value is not None and math.isfinite(value):
            known.append((seed_of(comparison.runs[index]), value))
    return means_of_seeds(known)


def means_of_seeds(seeds_and_values: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the mean value of each seed, in the order in which the seeds occur first.

    Runs with the same seed repeat each other, and would make a group look more certain than it is.

    Args:
        seeds_and_values: the seed and the value of each run of one group.
    """
    values_by_seed: dict[str, list[float]] = {}
    for seed, value in seeds_and_values:
        values_by_seed.setdefault(seed, []).append(value)
    return {seed: fmean(values) for seed, values in values_by_seed.items()}


def seed_of(run: RunRecord) -> str:
    """Return a run's seed as text. A run that states no seed counts as a seed of its own."""
    seed = run.flags.get(SEED_FLAG)
    return f"of {run.source}" if seed is None else str(seed)
