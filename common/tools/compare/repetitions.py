"""The values of a group of runs that count as independent of each other."""

import math
from collections.abc import Sequence
from statistics import fmean

from common.tools.compare.comparison import Comparison
from common.tools.compare.groups import RunGroup
from common.tools.compare.readers import RunRecord
from common.tools.statistics.samples import Sample

Values = Sequence[float | None]  # a figure of all runs of a comparison; None if unknown


def counted_places(comparison: Comparison, group: RunGroup) -> list[int]:
    """Return the places of a group's runs that count: each finished run, once.

    An unfinished run has trained for less time, so its figures are not those of the group.
    """
    places: list[int] = []
    sources: set[str] = set()
    for place in group.places:
        run = comparison.runs[place]
        if run.status == "finished" and run.source not in sources:
            places.append(place)
            sources.add(run.source)
    return places


def sample_of_runs(comparison: Comparison, group: RunGroup, values: Values) -> Sample:
    """Describe a figure of speed or memory in a group. Each run counts, whatever its seed."""
    chosen = [values[place] for place in counted_places(comparison, group)]
    return Sample.of([value for value in chosen if value is not None])


def sample_of_seeds(comparison: Comparison, group: RunGroup, values: Values) -> Sample:
    """Describe a figure of the trained models in a group. Each seed counts once.

    Runs with the same seed repeat each other, and would make the group look more certain than it
    is. The mean of such runs counts.
    """
    values_of_seeds: dict[str, list[float]] = {}
    for place in counted_places(comparison, group):
        value = values[place]
        if value is not None and math.isfinite(value):
            seed = seed_of(comparison.runs[place])
            values_of_seeds.setdefault(seed, []).append(value)
    return Sample.of([fmean(values_of_seed) for values_of_seed in values_of_seeds.values()])


def seed_of(run: RunRecord) -> str:
    """Return a run's seed as text. A run that states no seed counts as a seed of its own."""
    seed = run.flags.get("seed")
    return f"of {run.source}" if seed is None else str(seed)
