"""Tables of the results, for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.harness.text_tables import aligned_table, markdown_table
from benchmarks.resume.kills import UNINTERRUPTED
from benchmarks.resume.results import Result, Results
from benchmarks.resume.schedule import UPDATES

PACKAGES_TO_NAME = ("torch", "accelerate", "transformers", "lightning", "torchdata")
SUMMARY_HEADINGS = (
    "",
    "kills",
    "repeated samples",
    "lost samples",
    "other batches",
    "same weights",
    "rows lost",
    "rows doubled",
    "resumed by itself",
)
HEADINGS = (
    "contestant, processes",
    "kill",
    "moment",
    "repeated",
    "lost",
    "other batches",
    "weights differ by",
    "rows lost",
    "rows doubled",
    "resumed by itself",
)
Row = tuple[str, ...]


def summary_rows(results: Results) -> list[Row]:
    """Return a row for each contestant and number of processes, over all its kills."""
    groups: dict[tuple[str, int], list[Result]] = {}
    for result in results.in_order():
        if result.moment != UNINTERRUPTED:
            groups.setdefault((result.contestant, result.processes), []).append(result)
    return [summary_row(title_of(*key), group) for key, group in groups.items()]


def summary_row(title: str, group: Sequence[Result]) -> Row:
    """Return the row of some results with their largest counts.

    A kill that missed its share of a checkpoint is only mentioned: it came at another moment.
    """
    kills = [result for result in group if not result.missed]
    missed = len(group) - len(kills)
    same = sum(result.same_bits for result in kills)
    by_itself = sum(resumed_by_itself(result) for result in kills)
    return (
        title,
        f"{len(kills)}, {missed} missed" if missed else str(len(kills)),
        largest(kills, lambda result: result.repeated),
        largest(kills, lambda result: result.lost),
        largest(kills, lambda result: result.other_batches),
        f"{same} of {len(kills)}",
        largest(kills, lambda result: result.rows_lost),
        largest(kills, lambda result: result.rows_doubled),
        f"{by_itself} of {len(kills)}",
    )


def largest(group: Sequence[Result], count: Callable[[Result], int]) -> str:
    """Return the largest count, and in how many results it is not zero."""
    counts = [count(result) for result in group]
    affected = sum(value > 0 for value in counts)
    return f"≤ {max(counts)} (in {affected})" if affected else "0"


def title_of(contestant: str, processes: int) -> str:
    """Return the name of a contestant, with its processes if they are several."""
    return contestant if processes == 1 else f"{contestant}, {processes} processes"


def resumed_by_itself(result: Result) -> bool:
    """Whether the training was resumed without help."""
    return result.is_finished and result.removed == 0


def detail_rows(results: Results) -> list[Row]:
    """Return a row for each result."""
    return [detail_row(result) for result in results.in_order()]


def detail_row(result: Result) -> Row:
    """Return the cells of a result, in the order of `HEADINGS`."""
    difference = "0" if result.same_bits else "–"
    if not result.same_bits and result.largest_difference is not None:
        difference = f"{result.largest_difference:.1e}"
    return (
        title_of(result.contestant, result.processes),
        f"{result.kill}, missed: {written(result)}" if result.missed else result.kill,
        result.moment,
        str(result.repeated),
        str(result.lost),
        str(result.other_batches),
        difference,
        str(result.rows_lost),
        str(result.rows_doubled),
        resumed_words(result),
    )


def written(result: Result) -> str:
    """Return the share of its checkpoint that a training had written when it was killed."""
    return f"{result.written_shares[-1]:.2f} written" if result.written_shares else "none written"


def resumed_words(result: Result) -> str:
    """Return how a training was resumed."""
    if result.moment == UNINTERRUPTED:
        return ""
    if not result.is_finished:
        return "no"
    if result.removed > 0:
        return f"no, {result.removed} removed by hand"
    words = "yes" if result.retried == 0 else "yes, at the second try"
    return words if result.updates == UPDATES else f"{words}, made {result.updates} updates"


def markdown(headings: Row, rows: Sequence[Row], names: int) -> str:
    """Return a table in Markdown; all columns but the first `names` are aligned to the right."""
    alignment = "l" * names + "r" * (len(headings) - names)
    return "\n".join(markdown_table([headings, *rows], alignment))


def summary_markdown(results: Results) -> str:
    """Return the table of the overview in `benchmarks/README.md`; our rows are in bold."""
    rows = [
        tuple(f"**{cell}**" for cell in row) if row[0].startswith("recipe") else row
        for row in summary_rows(results)
    ]
    return markdown(SUMMARY_HEADINGS, rows, names=1)


def detail_markdown(results: Results) -> str:
    """Return a table of all results in Markdown."""
    return markdown(HEADINGS, detail_rows(results), names=3)


def as_text(headings: Row, rows: Sequence[Row]) -> str:
    """Return a table as aligned text."""
    return aligned_table([headings, *rows], names=1)


def caption(results: Results) -> str:
    """Return the processor, the versions and the commit, for people."""
    machine = results.machine
    versions = [
        f"{name} {machine['versions'][name]}"
        for name in PACKAGES_TO_NAME
        if name in machine["versions"]
    ]
    return "; ".join([machine["hardware"]["processor"], *versions])


def commands_of_odd_kills(results: Results) -> list[str]:
    """Return the command of each kill that left a trace."""
    return [result.repeat for result in odd_results(results)]


def odd_results(results: Results) -> list[Result]:
    """Return the results of kills that left a trace, without kills that missed their share."""
    return [result for result in results.in_order() if not (result.is_exact or result.missed)]
