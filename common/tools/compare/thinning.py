"""Thins long curves: fewer points, without hiding the extremes."""

from collections.abc import Sequence


def kept_indices(columns: Sequence[Sequence[float]], limit: int) -> list[int]:
    """Return the indices of the points that a drawing of a curve needs, in order.

    A curve of at most `limit` points keeps all of them. A longer one is divided into stretches of
    equal length, and each stretch keeps the least and the greatest value of each column. The first
    and the last point of the curve stay as well.

    Args:
        columns: values at each point: those of a curve, or the edges of a band.
        limit: the most indices to return: at least four, and two more for each further column.
    """
    count = len(columns[0])
    if count <= limit:
        return [*range(count)]
    kept = {0, count - 1}
    stretch_count = (limit - len(kept)) // (2 * len(columns))
    for number in range(stretch_count):
        stretch = range(
            number * count // stretch_count,
            (number + 1) * count // stretch_count,
        )
        for column in columns:
            kept.add(min(stretch, key=column.__getitem__))
            kept.add(max(stretch, key=column.__getitem__))
    return sorted(kept)


def points_per_curve(lengths: Sequence[int], most: int, fewest: int, most_in_all: int) -> int:
    """Return the limit on the points of a curve, so that all curves together are not too many.

    Args:
        lengths: the number of points of each curve.
        most: the largest limit.
        fewest: the smallest limit, even if the points are too many in all with it.
        most_in_all: the most points of all curves together.
    """
    # Curves that are shorter than the limit do not shrink, so try smaller limits in turn.
    limit = most
    while limit > fewest and sum(min(length, limit) for length in lengths) > most_in_all:
        limit = max(fewest, limit * 3 // 4)
    return limit
