"""Shows what `scaling.py` has found: tables, and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.scaling_study.runs import Run
from benchmarks.scaling_study.step_time import ASSUMPTIONS, STRATEGIES


def markdown(rows: list[tuple[str, ...]]) -> str:
    """Return a table whose first row is its head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|---{'|--:' * (len(rows[0]) - 1)}|", *lines[1:], ""])


def report(content: dict[str, Any], found: dict[Run, Any]) -> str:
    """Return all that is known, for people, in Markdown."""
    speed = {run[:4]: one["samples_per_second"] for run, one in found.items()}
    local = [run for run in found if run.link is None]
    batch = max(run.batch for run in local)
    first = [("processes", "weak: samples/s", "efficiency", "strong: samples/s", "efficiency")]
    head = ("collectives, share of time", "nothing else meanwhile")
    rows: list[tuple[str, ...]] = [(*first[0], *head)]
    for count in sorted({run.processes for run in local}):
        weak, strong = (speed[count, size, None, "DDP"] for size in (batch, batch // count))
        alone = count * speed[1, batch, None, "DDP"]
        shares = found[Run(count, batch)]
        known = [f"{shares[key]:.0%}" if key in shares else "" for key in ("under_way", "alone")]
        figures = (f"{weak:,.0f}", f"{weak / alone:.0%}", f"{strong:,.0f}", f"{strong / alone:.0%}")
        rows.append((str(count), *figures, *known))
    text = [f"{content['workload']}\n", markdown(rows)]
    rows = [("run", "samples/s (least–most)", "model", "error", "")]
    for run, one in found.items():
        figure = f"{one['samples_per_second']:,.0f} ({min(one['rounds']):,.0f}–"
        figure += f"{max(one['rounds']):,.0f})"
        use = "fitted" if run.is_fitted else "held against"
        rows.append((run.name, figure, f"{one['predicted']:,.0f}", f"{one['error']:+.1%}", use))
    text += [markdown(rows), f"Link between namespaces: {content['link']}.\n"]
    if content["largest_unseen_error"] is not None:
        mean, largest = content["mean_unseen_error"], content["largest_unseen_error"]
        text.append(f"Unseen runs: {mean:.1%} off in the mean, {largest:.1%} at most.\n")
    fitted = [f"{name} {value:.3g}" for name, value in content["model"].items()]
    text.append(f"Fitted: {', '.join(fitted)} (seconds, bytes per second, shares).\n")
    text += [f"- {assumption}" for assumption in ASSUMPTIONS]
    text += [f"- Links: {', '.join(content['links'])}, as name:GB/s:µs.", ""]
    for name, told in content["clusters"].items():
        rows = [(name, *STRATEGIES)]
        rows += [
            (where, *(f"{share:.0%}" for share in one.values())) for where, one in told.items()
        ]
        text.append(markdown(rows))
    return "\n".join(text)


def draw(path: Path, found: dict[Run, Any], told: dict[str, Any]) -> None:
    """Draw what was predicted against what was measured, and a published training on clusters."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes, right = figure.subplots(1, 2)
    for is_fitted, marker in ((True, "o"), (False, "x")):
        chosen = [one for run, one in found.items() if run.is_fitted == is_fitted]
        both = [[one[key] for one in chosen] for key in ("samples_per_second", "predicted")]
        axes.scatter(*both, marker=marker, label="fitted" if is_fitted else "held against")
    limits = [min(one["samples_per_second"] for one in found.values()) * 0.8, axes.get_xlim()[1]]
    axes.plot(limits, limits, color="0.7", zorder=0)
    axes.set(xlabel="measured samples/s", ylabel="model", xscale="log", yscale="log")
    axes.legend()
    name, rows = [*told.items()][-1]
    for number, strategy in enumerate(STRATEGIES):
        places = [place + 0.2 * number for place in range(len(rows))]
        right.barh(places, [one[strategy] for one in rows.values()], 0.2, label=strategy)
    right.set_yticks([place + 0.3 for place in range(len(rows))], [*rows], fontsize="small")
    right.set(xlabel="efficiency, weak scaling", title=name, xlim=(0, 1))
    right.title.set_fontsize("medium")
    right.invert_yaxis()
    right.legend(fontsize="small")
    figure.savefig(path, dpi=110)
