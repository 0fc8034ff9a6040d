"""What `--profile` writes: a trace, tables of operations, the memory over time."""

import csv
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile as TorchProfile

from common.measure.memory import MEBIBYTE

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
    """Write what was recorded; `before` it, so many bytes were in use on the device."""
    folder.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(folder / "trace.json.gz"))
    key = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    averages = profile.key_averages()
    table = averages.table(sort_by=key, row_limit=40, max_name_column_width=80)
    (folder / "top_operations.txt").write_text(table)
    rows = sorted(averages, key=lambda row: -getattr(row, key))
    with (folder / "top_operations.csv").open("w", newline="", encoding="utf-8") as file:
        values = ([getattr(row, source) for source in COLUMNS.values()] for row in rows)
        csv.writer(file).writerows([COLUMNS, *values])
    draw_memory(folder / "memory.png", profile, device, before)


def draw_memory(path: Path, profile: TorchProfile, device: torch.device, before: int) -> None:
    """Draw the memory of tensors over time, with a line at the end of each update."""
    from matplotlib.figure import Figure

    kind = device.type.upper()
    results: Any = profile.profiler.kineto_results  # type: ignore[union-attr]
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in results.events()
        if event.name() == "[memory]" and event.device_type().name == kind
    )
    if not changes:
        return
    times = [(at - results.trace_start_ns()) / 1e6 for at, _ in changes]
    added = torch.tensor([size for _, size in changes]).cumsum(0)
    # On a CPU nobody counts the tensors that were there before: only what was added is known.
    base = before if device.type == "cuda" else -min(0, int(added.min()))
    heights = ((base + added) / MEBIBYTE).tolist()
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots()
    for event in profile.events() or []:
        if event.name.startswith("ProfilerStep") and event.device_type.name == "CPU":
            axes.axvline(event.time_range.end / 1000, color="0.75", linewidth=0.8, zorder=0)
    axes.fill_between(times, heights, step="post", alpha=0.5, color="C0")
    peak = max(heights)
    axes.axhline(peak, color="C3", linewidth=0.8, linestyle="--", label=f"peak {peak:,.1f} MiB")
    axes.legend(loc="lower right")
    above = "" if device.type == "cuda" else " above the least in these updates"
    axes.set_title(f"Memory of tensors on the {kind}, allocated{above}")
    axes.set(xlabel="milliseconds (grey: an update ends)", ylabel="MiB", ylim=(0, None))
    figure.savefig(path, dpi=120)
