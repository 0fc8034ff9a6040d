"""Shows the results of `scaling.py`: tables, and a picture."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from benchmarks.harness.text_tables import markdown_table
from benchmarks.scaling_study.runs import ScalingRun
from benchmarks.scaling_study.step_time import ASSUMPTIONS, STRATEGIES
from benchmarks.scaling_study.study import CheckedRun, Study

Row = tuple[str, ...]
BAR_WIDTH = 0.2


def markdown(rows: list[Row]) -> str:
    """Return a table whose first row is its head."""
    alignment = "l" + "r" * (len(rows[0]) - 1)
    return "\n".join([*markdown_table(rows, alignment), ""])


def report(study: Study) -> str:
    """Return all results as Markdown."""
    text = [f"{study.workload}\n", markdown(scaling_rows(study)), markdown(run_rows(study))]
    text.append(f"Link between namespaces: {study.link}.\n")
    if study.mean_unseen_error is not None:
        mean = f"{study.mean_unseen_error:.1%}"
        largest = f"{study.largest_unseen_error:.1%}"
        text.append(f"Unseen runs: {mean} off on average, {largest} at most.\n")
    fitted = [f"{name} {value:.3g}" for name, value in asdict(study.model).items()]
    text.append(f"Fitted: {', '.join(fitted)} (seconds, bytes per second, shares).\n")
    text += [f"- {assumption}" for assumption in ASSUMPTIONS]
    text += [f"- Links: {', '.join(study.links)}, as name:GB/s:µs.", ""]
    for title, cluster in study.clusters.items():
        rows: list[Row] = [(title, *STRATEGIES)]
        for name, efficiencies in cluster.items():
            rows.append((name, *(f"{share:.0%}" for share in efficiencies.values())))
        text.append(markdown(rows))
    return "\n".join(text)


def scaling_rows(study: Study) -> list[Row]:
    """Return the table of weak and strong scaling over memory."""
    results = {checked.run: checked.result for checked in study.runs if checked.run.link is None}
    speeds = {
        (run.processes, run.batch): result.samples_per_second for run, result in results.items()
    }
    batch = max(run.batch for run in results)
    rows: list[Row] = [
        (
            "processes",
            "weak: samples/s",
            "efficiency",
            "strong: samples/s",
            "efficiency",
            "collectives, share of time",
            "nothing else meanwhile",
        )
    ]
    for count in sorted({run.processes for run in results}):
        weak = speeds[count, batch]
        strong = speeds[count, batch // count]
        ideal = count * speeds[1, batch]
        shares = results[ScalingRun(count, batch)].shares
        rows.append(
            (
                str(count),
                f"{weak:,.0f}",
                f"{weak / ideal:.0%}",
                f"{strong:,.0f}",
                f"{strong / ideal:.0%}",
                percentage(shares.get("under_way")),
                percentage(shares.get("alone")),
            )
        )
    return rows


def percentage(share: float | None) -> str:
    """Return a share in percent; empty if it is unknown."""
    return "" if share is None else f"{share:.0%}"


def run_rows(study: Study) -> list[Row]:
    """Return the table of each run's measured and predicted speed."""
    rows: list[Row] = [("run", "samples/s (least–most)", "model", "error", "")]
    for checked in study.runs:
        result = checked.result
        spread = f"({min(result.rounds):,.0f}–{max(result.rounds):,.0f})"
        rows.append(
            (
                checked.run.name,
                f"{result.samples_per_second:,.0f} {spread}",
                f"{checked.predicted:,.0f}",
                f"{checked.error:+.1%}",
                "fitted" if checked.run.is_fitted else "unseen",
            )
        )
    return rows


def draw(path: Path, study: Study) -> None:
    """Draw predicted over measured speeds, and a published training on clusters."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    speeds, efficiencies = figure.subplots(1, 2)
    fitted = [checked for checked in study.runs if checked.run.is_fitted]
    unseen = [checked for checked in study.runs if not checked.run.is_fitted]
    speeds.scatter(*measured_and_predicted(fitted), marker="o", label="fitted")
    speeds.scatter(*measured_and_predicted(unseen), marker="x", label="unseen")
    lowest = min(checked.result.samples_per_second for checked in study.runs)
    limits = [lowest * 0.8, speeds.get_xlim()[1]]
    speeds.plot(limits, limits, color="0.7", zorder=0)
    speeds.set(xlabel="measured samples/s", ylabel="model", xscale="log", yscale="log")
    speeds.legend()
    title, cluster = [*study.clusters.items()][-1]
    for number, strategy in enumerate(STRATEGIES):
        positions = [row + BAR_WIDTH * number for row in range(len(cluster))]
        shares = [by_strategy[strategy] for by_strategy in cluster.values()]
        efficiencies.barh(positions, shares, BAR_WIDTH, label=strategy)
    middles = [row + 0.3 for row in range(len(cluster))]
    efficiencies.set_yticks(middles, [*cluster], fontsize="small")
    efficiencies.set(xlabel="efficiency, weak scaling", title=title, xlim=(0, 1))
    efficiencies.title.set_fontsize("medium")
    efficiencies.invert_yaxis()
    efficiencies.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def measured_and_predicted(runs: list[CheckedRun]) -> tuple[list[float], list[float]]:
    """Return the measured and the predicted samples/s of some runs."""
    measured = [checked.result.samples_per_second for checked in runs]
    predicted = [checked.predicted for checked in runs]
    return measured, predicted
