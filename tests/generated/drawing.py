"""Draws cases, the same ones for a seed, and chooses a few that cover most features."""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from tests.generated.grammar import Case, cases

# Later cases of a round often repeat the first ones with a few choices changed.
CASES_OF_A_ROUND = 4


def drawn(count: int, seed: int) -> list[Case]:
    """Return `count` different cases."""
    distinct: dict[Case, None] = {}
    for number in itertools.count(seed * 1_000_003):
        distinct |= dict.fromkeys(drawn_in_a_round(number))
        if len(distinct) >= count:
            break
    return [*distinct][:count]


def drawn_in_a_round(seed: int) -> list[Case]:
    """Return a few cases, the first of which is the simplest."""
    collected: list[Case] = []

    @seeded(seed)
    @settings(
        max_examples=CASES_OF_A_ROUND,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    @given(cases())
    def collect(case: Case) -> None:
        collected.append(case)

    collect()
    return collected


def covering(count: int, pool: list[Case]) -> list[Case]:
    """Return cases of a pool. Each adds as many features as possible to those before it."""
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
