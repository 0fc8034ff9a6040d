"""The sentences around the tables of a comparison: reasons not to trust it, and notes."""

from collections.abc import Sequence
from typing import NamedTuple

from common.metric_names import MFU, OTHER_CPU
from common.system.wording import listed
from common.tools.compare.comparison import Comparison
from common.tools.compare.figures import RunFigures
from common.tools.compare.missing_values import MISSING_VALUES, missing_value_warnings
from common.tools.compare.readers.run_record import RunRecord
from common.tools.compare.run_table import target_text
from common.tools.compare.setting_text import value_text
from common.tools.compare.verdict_lines import correction_note
from common.tools.compare.verdicts import verdicts_of
from common.track.names import metric_named

# If other programs use at least this share of the machine's CPU time, they may slow a run down.
BUSY = 0.1
UNFAIR = "not a fair comparison"


class LabelledWarning(NamedTuple):
    """A reason not to trust a comparison."""

    label: str  # such as "busy machine"
    text: str


def labelled_warnings(comparison: Comparison, unfair_texts: Sequence[str]) -> list[LabelledWarning]:
    """Return all reasons not to trust a comparison, in the order of their weight.

    Args:
        unfair_texts: sentences on runs that can't fairly be compared, from `unfair_warnings`.
            `recipes vary` adds sentences on the runs within a group.
    """
    return [
        *(LabelledWarning(UNFAIR, text) for text in unfair_texts),
        *(LabelledWarning(MISSING_VALUES, text) for text in missing_value_warnings(comparison)),
        *(LabelledWarning("busy machine", text) for text in load_warnings(comparison)),
    ]


def unfair_warnings(comparison: Comparison) -> list[str]:
    """Return sentences on the runs that can't fairly be compared with the baseline.

    Runs for which the sentence would be the same share one.
    """
    texts_by_run: dict[str, list[str]] = {}
    for difference in comparison.unfair_differences:
        baseline_text = value_text(difference.baseline_value)
        text = f"{difference.label} {baseline_text} and {value_text(difference.value)}"
        texts_by_run.setdefault(difference.run, []).append(text)
    runs_by_reason: dict[str, list[str]] = {}
    for run, texts in texts_by_run.items():
        runs_by_reason.setdefault("; ".join(texts), []).append(run)
    baseline = comparison.runs[0].name
    sentences = []
    for reason, runs in runs_by_reason.items():
        others = runs[0] if len(runs) == 1 else f"each of {listed(runs)}"
        sentences.append(f"{baseline} and {others}: {reason}")
    return sentences


def load_warnings(comparison: Comparison) -> list[str]:
    """Return one sentence if other programs may have slowed some runs down; otherwise nothing.

    A single run has no speeds to compare, so it gets no sentence.
    """
    if len(comparison.runs) < 2:
        return []
    loads: dict[str, float] = {}
    for run, figures in zip(comparison.runs, comparison.figures, strict=True):
        load = figures.metrics[OTHER_CPU]
        if load is not None:
            loads[run.name] = load
    busy_loads = {name: load for name, load in loads.items() if load >= BUSY}
    if not busy_loads:
        return []
    metric = metric_named(OTHER_CPU)
    shares = [f"{metric.text(load)} during {name}" for name, load in busy_loads.items()]
    quiet_loads = [load for load in loads.values() if load < BUSY]
    others = f", and at most {metric.text(max(quiet_loads))} during others" if quiet_loads else ""
    return [
        f"other programs used CPU time, so the throughputs are {UNFAIR}: {listed(shares)}{others}"
    ]


def notes(comparison: Comparison) -> list[str]:
    """Return sentences about intervals, unfinished runs, MFUs, copies of runs, and the target."""
    lines = []
    correction = correction_note(verdicts_of(comparison))
    if correction is not None:
        lines.append(correction)
    for run, figures in zip(comparison.runs, comparison.figures, strict=True):
        lines += notes_on_run(run, figures)
    lines += notes_on_copies(comparison.runs)
    # The default target is the best value of the worst run, so that every run has reached it.
    if comparison.target is not None and not comparison.target_is_given:
        lines.append(
            f"the target, {target_text(comparison)}, is the worst of the runs' best values; "
            "recipes compare takes another with --target"
        )
    return lines


def notes_on_copies(runs: Sequence[RunRecord]) -> list[str]:
    """Return a sentence on each run that is a copy of a run before it."""
    names: dict[str, str] = {}  # of the first run with an identity
    lines = []
    for run in runs:
        original = names.setdefault(run.identity, run.name)
        if original != run.name:
            lines.append(f"{run.name} and {original} are one run: groups count it once")
    return lines


def notes_on_run(run: RunRecord, figures: RunFigures) -> list[str]:
    """Return sentences on a run that is unfinished, or whose MFU is above 100 %."""
    lines = []
    if run.status != "finished":
        reason = f" ({run.reason})" if run.reason else ""
        lines.append(f"{run.name}: {figures.status}{reason}")
    if not run.summary:
        lines.append(f"{run.name}: throughput is the median of its log intervals so far")
    mfu = figures.metrics[MFU]
    if mfu is not None and mfu > 1 and run.saved_config.peak.source == "measured":
        lines.append(
            f"{run.name}: an MFU above 100% means that the device's peak was measured too low, "
            "for example because other programs used the cores at that time"
        )
    return lines
