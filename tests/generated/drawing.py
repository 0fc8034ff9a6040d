"""Draws cases, always the same ones of a seed, and chooses few that have much between them."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from tests.generated.grammar import Case, cases


def drawn(count: int, seed: int) -> list[Case]:
    """Return so many different cases."""
    found: dict[Case, None] = {}

    # Some are drawn twice.
    @seeded(seed)
    @settings(
        max_examples=2 * count + 10,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    @given(cases())
    def collect(case: Case) -> None:
        found[case] = None

    collect()
    return [*found][:count]


def covering(count: int, pool: list[Case]) -> list[Case]:
    """Return cases of a pool, each with as many features as possible that those before lack."""
    chosen: list[Case] = []
    seen: set[str] = set()
    left = [*pool]
    while left and len(chosen) < count:
        best = max(left, key=lambda case: len({*case.features()} - seen))
        if not {*best.features()} - seen:  # every feature is there: begin anew
            seen.clear()
            best = max(left, key=lambda case: len(case.features()))
        chosen.append(best)
        left.remove(best)
        seen.update(best.features())
    return chosen
