"""What `--profile` writes: a trace, tables of operations, the memory over time."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from common.memory import MEBIBYTE

if TYPE_CHECKING:
    from torch.profiler import profile as TorchProfile

TOP = 40
COLUMNS = {
    "name": "key",
    "calls": "count",
    "self_cpu_microseconds": "self_cpu_time_total",
    "cpu_microseconds": "cpu_time_total",
    "self_device_microseconds": "self_device_time_total",
    "device_microseconds": "device_time_total",
    "self_cpu_memory_bytes": "self_cpu_memory_usage",
    "self_device_memory_bytes": "self_device_memory_usage",
}


def write_profile(folder: Path, profile: TorchProfile, device: torch.device, before: int) -> None:
    """Write what was recorded into `folder`.

    Args:
        before: bytes that were in use on the device when recording began.
    """
    folder.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(folder / "trace.json.gz"))
    write_operations(folder, profile, device)
    times, sizes, updates = memory_over_time(profile, device)
    if times:
        draw_memory(folder / "memory.png", times, sizes, updates, device, before)


def write_operations(folder: Path, profile: TorchProfile, device: torch.device) -> None:
    """Write the operations that took longest, as text and as a table."""
    key = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    averages = profile.key_averages()
    table = averages.table(sort_by=key, row_limit=TOP, max_name_column_width=80)
    (folder / "top_operations.txt").write_text(table)
    rows = sorted(averages, key=lambda row: -getattr(row, key))
    with (folder / "top_operations.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows([getattr(row, source) for source in COLUMNS.values()] for row in rows)


def memory_over_time(
    profile: TorchProfile, device: torch.device
) -> tuple[list[float], list[float], list[float]]:
    """Return milliseconds, MiB above the beginning, and when each update ended."""
    results: Any = profile.profiler.kineto_results  # type: ignore[union-attr]
    start = results.trace_start_ns()
    wanted = device.type.upper()
    events = sorted(
        (event.start_ns(), event.nbytes())
        for event in results.events()
        if event.name() == "[memory]" and event.device_type().name == wanted
    )
    times, sizes, total = [], [], 0
    for nanoseconds, size in events:
        total += size
        times.append((nanoseconds - start) / 1e6)
        sizes.append(total / MEBIBYTE)
    updates = [
        event.time_range.end / 1000
        for event in profile.events() or []
        if event.name.startswith("ProfilerStep") and event.device_type.name == "CPU"
    ]
    return times, sizes, updates


def draw_memory(
    path: Path,
    times: list[float],
    sizes: list[float],
    updates: list[float],
    device: torch.device,
    before: int,
) -> None:
    """Draw the memory of tensors over time, with a line at the end of each update."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # On a CPU nobody counts the tensors that were there before: only what was added is known.
    base = before / MEBIBYTE if device.type == "cuda" else -min(0.0, *sizes)
    heights = [base + size for size in sizes]
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for end in updates:
        axes.axvline(end, color="0.75", linewidth=0.8, zorder=0)
    axes.fill_between(times, heights, step="post", alpha=0.35, color="C0", linewidth=0)
    axes.step(times, heights, where="post", color="C0", linewidth=0.9)
    peak = max(heights)
    axes.axhline(peak, color="C3", linewidth=0.8, linestyle="--")
    axes.annotate(
        f"peak {peak:,.1f} MiB",
        (times[0], peak),
        xytext=(2, 3),
        textcoords="offset points",
        color="C3",
    )
    axes.set_ylim(0, peak * 1.12 + 1e-3)
    axes.margins(x=0.01)
    what = "allocated" if device.type == "cuda" else "allocated above the least in these updates"
    axes.set(
        xlabel="milliseconds (grey: an update ends)",
        ylabel="MiB",
        title=f"Memory of tensors on the {device.type.upper()}, {what}",
    )
    figure.savefig(path, dpi=120)
