"""The files that `--profile` writes: a trace, tables of operations, a picture of memory."""

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import profile as TorchProfile

from common.console import warn
from common.measure.memory import MEBIBYTE
from common.system.devices import has_own_memory_figures, is_accelerator, profiler_activity

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEventAvg

TRACE = "rank0.pt.trace.json.gz"  # TensorBoard's plugin looks for names like this
# The columns of the table of operations: their headings, and the profiler's attributes.
COLUMNS = {
    "name": "key",
    "input_shapes": "input_shapes",  # empty without `--profile-shapes`
    "calls": "count",
    "self_cpu_microseconds": "self_cpu_time_total",
    "cpu_microseconds": "cpu_time_total",
    "self_device_microseconds": "self_device_time_total",
    "device_microseconds": "device_time_total",
    "self_cpu_memory_bytes": "self_cpu_memory_usage",
    "self_device_memory_bytes": "self_device_memory_usage",
}


def write_profile(
    folder: Path, profile: TorchProfile, device: torch.device, bytes_before: int, by_shape: bool
) -> list[str]:
    """Write the trace, the tables of operations and the picture of memory of a finished profile.

    The reporter writes the verdict. Where torch can record the history of allocations, the profiler
    writes it.

    Args:
        folder: where the files go; it is created.
        profile: the finished profile.
        device: the device of the training.
        bytes_before: the bytes that tensors on the device took before the recorded updates.
        by_shape: whether the tables have a row for each operation and shape of inputs, and not one
            for each operation.

    Returns:
        A text for each of the three slowest operations, with its share of all operations' time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(folder / TRACE))
    has_kernel_times = profiler_activity(device) is not None
    sort_key = "self_device_time_total" if has_kernel_times else "self_cpu_time_total"
    averages = profile.key_averages(group_by_input_shape=by_shape)
    table = averages.table(sort_by=sort_key, row_limit=40, max_name_column_width=80)
    (folder / "top_operations.txt").write_text(table, encoding="utf-8")
    rows = sorted(averages, key=lambda row: -getattr(row, sort_key))
    with (folder / "top_operations.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for row in rows:
            writer.writerow([getattr(row, attribute) for attribute in COLUMNS.values()])
    draw_memory(folder / "memory.png", profile, device, bytes_before)
    return slowest_operations(rows, sort_key, by_shape)


def slowest_operations(rows: "list[FunctionEventAvg]", sort_key: str, by_shape: bool) -> list[str]:
    """Return a text for each of the three slowest operations: name, shapes if known, share of time.

    Kernels are not listed, because their time counts in the operations that launched them.

    Args:
        rows: the rows of the profiler's table, the slowest first.
        sort_key: the name of a row's attribute that has its time.
        by_shape: whether rows have shapes.
    """
    operations = [
        row for row in rows if row.device_type.name == "CPU" and not row.is_user_annotation
    ]
    total = max(sum(getattr(row, sort_key) for row in operations), 1e-9)
    texts = []
    for row in operations[:3]:
        share = f"{getattr(row, sort_key) / total:.0%}"
        known_shapes = (row.input_shapes or []) if by_shape else []
        shapes = [shape for shape in known_shapes if shape]
        texts.append(f"{row.key} {shapes} {share}" if shapes else f"{row.key} {share}")
    return texts


def memory_changes(profile: TorchProfile, device: torch.device) -> list[tuple[float, int]]:
    """Return each change of the memory that tensors on a device take, for a picture of it.

    Returns:
        The time of each change, in milliseconds from the start of the trace, and the bytes that
        were taken. Bytes that were freed are negative.
    """
    on_accelerator = is_accelerator(device)
    # Torch's types do not know `nbytes` of an event.
    results: Any = profile.profiler.kineto_results  # type: ignore[union-attr]
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in results.events()
        if event.name() == "[memory]" and (event.device_type().name != "CPU") == on_accelerator
    )
    start = results.trace_start_ns()
    return [((nanoseconds - start) / 1e6, size) for nanoseconds, size in changes]


def draw_memory(path: Path, profile: TorchProfile, device: torch.device, bytes_before: int) -> None:
    """Draw the memory of tensors over time, with a line at the end of each update.

    Nothing is drawn if matplotlib is not installed, or if no memory changed.

    Args:
        path: the path of the picture.
        profile: the finished profile.
        device: the device whose memory is drawn.
        bytes_before: the bytes that tensors on the device took before the recorded updates.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        problem = f"the profile has no {path.name}, because matplotlib is not installed"
        warn(f"{problem}: pip install matplotlib")
        return

    changes = memory_changes(profile, device)
    if not changes:
        return
    milliseconds = [time for time, _ in changes]
    added_bytes = torch.tensor([size for _, size in changes]).cumsum(0)
    # On a CPU, `bytes_before` is the memory of the whole process, and the memory of its tensors is
    # not known. The curve then shows the bytes above its lowest point, which becomes 0.
    is_total_known = has_own_memory_figures(device)
    base = bytes_before if is_total_known else -min(0, int(added_bytes.min()))
    mebibytes = ((base + added_bytes) / MEBIBYTE).tolist()
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots()
    for event in profile.events() or []:
        if event.name.startswith("ProfilerStep") and event.device_type.name == "CPU":
            axes.axvline(event.time_range.end / 1000, color="0.75", linewidth=0.8, zorder=0)
    axes.fill_between(milliseconds, mebibytes, step="post", alpha=0.5, color="C0")
    peak = max(mebibytes)
    axes.axhline(peak, color="C3", linewidth=0.8, linestyle="--", label=f"peak {peak:,.1f} MiB")
    axes.legend(loc="lower right")
    above = "" if is_total_known else " above the least in these updates"
    axes.set_title(f"Memory of tensors on the {device.type.upper()}, allocated{above}")
    axes.set(xlabel="milliseconds (grey: an update ends)", ylabel="MiB", ylim=(0, None))
    figure.savefig(path, dpi=120)
