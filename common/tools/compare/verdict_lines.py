"""The verdicts of a comparison as lines of text."""

from collections.abc import Sequence
from typing import NamedTuple

from common.system.wording import counted
from common.tools.compare.repetition_text import percent
from common.tools.compare.verdicts import GroupVerdict

MAX_PAIRS_IN_TEXT = 10  # all pairs of five groups; a page and JSON have all pairs


class PairOfGroups(NamedTuple):
    """The labels of two groups that are compared with each other."""

    baseline: str
    group: str


def verdict_lines(
    verdicts: Sequence[GroupVerdict],
    most_pairs: int | None = MAX_PAIRS_IN_TEXT,
    source_of_all: str = "--json or --html",
) -> list[str]:
    """Return lines of text: a heading for each pair of groups, with its verdicts indented below.

    A pair can't be judged if one of its groups has a single run. If there are several such pairs,
    one sentence at the end stands for all of them.

    Args:
        most_pairs: how many pairs to show. A sentence counts the others. None shows all of them.
        source_of_all: where a user finds all pairs, for that sentence.
    """
    verdicts_by_pair = group_by_pair(verdicts)
    pairs_of_single_runs = [
        pair
        for pair, verdicts_of_pair in verdicts_by_pair.items()
        if not any(verdict.is_repeated for verdict in verdicts_of_pair)
    ]
    left_out = pairs_of_single_runs if len(pairs_of_single_runs) > 1 else []
    pairs = [pair for pair in verdicts_by_pair if pair not in left_out]
    shown_pairs = pairs[:most_pairs]
    lines: list[str] = []
    for pair in shown_pairs:
        lines.append(f"{pair.group} against {pair.baseline}:")
        for verdict in verdicts_by_pair[pair]:
            lines.append(f"  {verdict.figure}: {verdict.text}")
    further_pairs = [verdicts_by_pair[pair] for pair in pairs[len(shown_pairs) :]]
    if further_pairs:
        lines.append(further_pairs_text(further_pairs, source_of_all))
    if left_out:
        lines.append(single_runs_text(left_out))
    return lines


def group_by_pair(verdicts: Sequence[GroupVerdict]) -> dict[PairOfGroups, list[GroupVerdict]]:
    """Return the verdicts on each pair of groups, the pairs in the order of first occurrence."""
    verdicts_by_pair: dict[PairOfGroups, list[GroupVerdict]] = {}
    for verdict in verdicts:
        pair = PairOfGroups(verdict.baseline, verdict.group)
        verdicts_by_pair.setdefault(pair, []).append(verdict)
    return verdicts_by_pair


def single_runs_text(pairs: Sequence[PairOfGroups]) -> str:
    """Return the sentence that stands for pairs of a baseline and a group with a single run."""
    baselines = {pair.baseline for pair in pairs}
    from_baseline = f" from {baselines.pop()}" if len(baselines) == 1 else ""
    return (
        f"{len(pairs)} differences{from_baseline} can't be judged, because a single run does not "
        "show what is chance: repeat these runs with several seeds"
    )


def further_pairs_text(further_pairs: Sequence[Sequence[GroupVerdict]], source_of_all: str) -> str:
    """Return a sentence on the pairs of groups that a text leaves out.

    Args:
        further_pairs: the verdicts of each of these pairs.
        source_of_all: where a user finds all pairs.
    """
    differing = [
        verdicts
        for verdicts in further_pairs
        if any(verdict.is_distinguishable for verdict in verdicts)
    ]
    pairs = counted(len(further_pairs), "further pair")
    count = len(differing) or "none"
    return f"and {pairs} of groups, of which {count} can be told apart: see {source_of_all}"


def correction_note(verdicts: Sequence[GroupVerdict]) -> str | None:
    """Return a sentence on the width of the intervals, if several pairs are compared.

    Only pairs of groups with several runs count. The result is None if there are fewer than two
    such pairs, or if none of their verdicts has an interval.
    """
    repeated = [verdict for verdict in verdicts if verdict.is_repeated]
    pair_count = len(group_by_pair(repeated))
    intervals = [verdict.interval for verdict in repeated if verdict.interval is not None]
    if pair_count < 2 or not intervals:
        return None
    return (
        f"{pair_count} pairs of groups are compared. Each interval is widened to "
        f"{percent(intervals[0].confidence)} (Bonferroni), so that all intervals of a "
        "figure hold together in 95 % of such comparisons"
    )
