"""The parts of `benchmarks/resume.md` and of the overview that come from the file of results."""

from __future__ import annotations

from collections import Counter

from benchmarks.resume.contestants import CONTESTANTS, Contestant
from benchmarks.resume.report import Row, markdown, odd_results, resumed_words, title_of
from benchmarks.resume.results import Result, Results

PEER_HEADINGS = ("peer", "versions", "documentation", "settings")
ODDITY_HEADINGS = ("contestant", "oddity", "command")
COMMIT_LETTERS = 9


def peers_markdown(results: Results) -> str:
    """Return a table of the peers with their versions and the pages that they follow."""
    measured = {result.contestant for result in results.in_order()}
    peers = [
        contestant
        for contestant in CONTESTANTS
        if contestant.name in measured and not contestant.is_ours
    ]
    versions: dict[str, str] = results.machine["versions"]
    rows = [peer_row(peer, versions) for peer in peers]
    return markdown(PEER_HEADINGS, rows, names=len(PEER_HEADINGS))


def peer_row(peer: Contestant, versions: dict[str, str]) -> Row:
    """Return the cells of a peer, in the order of `PEER_HEADINGS`."""
    installed = [
        f"{package} {versions[package]}"
        for package in peer.measured_packages
        if package in versions
    ]
    links = [f"[{page.rpartition('/')[2]}]({page})" for page in peer.pages_of(versions)]
    return peer.name, ", ".join(installed), ", ".join(links), peer.settings


def oddities_markdown(results: Results) -> str:
    """Return a table of all kills that left a trace, each with the command that repeats it."""
    rows = [
        (
            title_of(result.contestant, result.processes),
            oddity(result),
            f"`{result.repeat}`",
        )
        for result in odd_results(results)
    ]
    return markdown(ODDITY_HEADINGS, rows, names=len(ODDITY_HEADINGS))


def oddity(result: Result) -> str:
    """Return in words what a kill did."""
    counts = {
        "samples repeated": result.repeated,
        "samples lost": result.lost,
        "epochs in the order of an earlier one": result.repeated_orders,
        "other batches": result.other_batches,
        "rows lost": result.rows_lost,
        "rows doubled": result.rows_doubled,
    }
    words = [f"{count} {name}" for name, count in counts.items() if count]
    if not result.is_finished or result.removed > 0:
        words.append(f"resumed: {resumed_words(result)}, {first_sentence(result.failures[-1])}")
    if result.is_finished and not result.same_bits:
        words.append("other weights")
    return "; ".join(words)


def first_sentence(message: str) -> str:
    return message.partition(". ")[0]


def provenance(results: Results) -> str:
    """Return how many results come from which commit, and when they were measured."""
    by_commit = Counter(result.commit for result in results.in_order())
    days = [result.measured_at[:10] for result in results.in_order() if result.measured_at]
    parts = []
    for commit, count in by_commit.most_common():
        if commit is None:
            parts.append(f"{count} of earlier code, without a recorded commit")
        else:
            parts.append(f"{count} of commit `{short(commit)}`")
    if not days:
        return f"Results: {'; '.join(parts)}."
    span = min(days) if min(days) == max(days) else f"{min(days)} to {max(days)}"
    return f"Results: {'; '.join(parts)}. Measured {span}."


def short(commit: str) -> str:
    """Return the first letters of a commit, with the note that files were changed."""
    name, dash, note = commit.partition("-")
    return f"{name[:COMMIT_LETTERS]}{dash}{note}"
