"""What `--profile` writes: a trace, tables of operations, the memory over time."""

import csv
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile as TorchProfile

from common.console import warn
from common.devices import has_own_memory_figures, is_accelerator, profiler_activity
from common.measure.memory import MEBIBYTE

TRACE = "rank0.pt.trace.json.gz"  # a name that TensorBoard's plugin looks for
COLUMNS = {
    "name": "key",
    "input_shapes": "input_shapes",  # empty but for `--profile-shapes`
    "calls": "count",
    "self_cpu_microseconds": "self_cpu_time_total",
    "cpu_microseconds": "cpu_time_total",
    "self_device_microseconds": "self_device_time_total",
    "device_microseconds": "device_time_total",
    "self_cpu_memory_bytes": "self_cpu_memory_usage",
    "self_device_memory_bytes": "self_device_memory_usage",
}


def write_profile(
    folder: Path, profile: TorchProfile, device: torch.device, before: int, by_shape: bool
) -> list[str]:
    """Write what was recorded; `before` it, so many bytes were in use on the device.

    Returns:
        The three slowest operations, each with its own share of the time of all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(folder / TRACE))
    is_timed = profiler_activity(device) is not None
    key = "self_device_time_total" if is_timed else "self_cpu_time_total"
    averages = profile.key_averages(group_by_input_shape=by_shape)
    table = averages.table(sort_by=key, row_limit=40, max_name_column_width=80)
    (folder / "top_operations.txt").write_text(table)
    rows = sorted(averages, key=lambda row: -getattr(row, key))
    with (folder / "top_operations.csv").open("w", newline="", encoding="utf-8") as file:
        values = ([getattr(row, source) for source in COLUMNS.values()] for row in rows)
        csv.writer(file).writerows([COLUMNS, *values])
    draw_memory(folder / "memory.png", profile, device, before)
    called = [row for row in rows if row.device_type.name == "CPU" and not row.is_user_annotation]
    total = max(sum(getattr(row, key) for row in called), 1e-9)
    shapes = [[s for s in row.input_shapes if s] if by_shape else [] for row in called[:3]]
    shares = [f"{getattr(row, key) / total:.0%}" for row in called[:3]]
    parts = zip((row.key for row in called[:3]), shapes, shares, strict=True)
    return [
        f"{name} {shape} {share}" if shape else f"{name} {share}" for name, shape, share in parts
    ]


def draw_memory(path: Path, profile: TorchProfile, device: torch.device, before: int) -> None:
    """Draw the memory of tensors over time, with a line at the end of each update.

    Without matplotlib, the profile has no picture.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        warn(f"no {path.name} in the profile, because matplotlib is not installed")
        return

    on_accelerator = is_accelerator(device)
    results: Any = profile.profiler.kineto_results  # type: ignore[union-attr]
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in results.events()
        if event.name() == "[memory]" and (event.device_type().name != "CPU") == on_accelerator
    )
    if not changes:
        return
    times = [(at - results.trace_start_ns()) / 1e6 for at, _ in changes]
    added = torch.tensor([size for _, size in changes]).cumsum(0)
    # On a CPU nobody counts the tensors that were there before: only what was added is known.
    is_counted = has_own_memory_figures(device)
    base = before if is_counted else -min(0, int(added.min()))
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
    above = "" if is_counted else " above the least in these updates"
    axes.set_title(f"Memory of tensors on the {device.type.upper()}, allocated{above}")
    axes.set(xlabel="milliseconds (grey: an update ends)", ylabel="MiB", ylim=(0, None))
    figure.savefig(path, dpi=120)
