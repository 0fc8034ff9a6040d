"""Measure copies between host and GPU; on a machine without a GPU, from memory to memory.

python benchmarks/transfer.py --output transfer.json --plot transfer.png

The host's memory is pageable or pinned, the copy blocks or not, and sizes go from 1 MB to 1 GB. The
script measures the rate, and the time after which the call returns. A non-blocking copy lets Python
continue meanwhile, but only if the host's memory is pinned: the driver first copies pageable memory
into a pinned buffer of its own.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

if __package__ in (None, ""):  # started as a file: make the package importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import tyro

from benchmarks.harness.isolation import default_device, synchronize
from benchmarks.harness.result_file import write_results
from common.output.tables import print_table
from common.system.devices import device_name

MEGABYTE = 10**6
MAX_MEGABYTES = 10**5


@dataclass(frozen=True)
class CopyKind:
    """How a tensor is copied."""

    direction: str  # "host to device", "device to host" or "memory to memory"
    is_pinned: bool  # the host's memory
    blocks: bool  # whether the call returns only when the copy is done

    @property
    def name(self) -> str:
        """The kind in words, for tables."""
        memory = "pinned" if self.is_pinned else "pageable"
        return f"{self.direction}, {memory}{'' if self.blocks else ', non-blocking'}"


Row = dict[str, float]  # figures of one size: megabytes, rate and time until the call returns


@dataclass(kw_only=True)
class Options:
    """Measure copies between the host and the GPU, or within a CPU's memory."""

    largest: int = 1000
    """Megabytes of the largest copy; the first has 1, and each next one four times as many."""
    repeats: int = 5
    """Timed copies of each kind and size, after one untimed copy; the table shows their median."""
    output: Path | None = None
    """JSON file to write."""
    plot: Path | None = None
    """Picture to draw, as .png or .svg."""

    def __post_init__(self) -> None:
        """Refuse values that would fail only after measuring."""
        if not 1 <= self.largest <= MAX_MEGABYTES or self.repeats < 1:
            sizes = f"1 to {MAX_MEGABYTES:,}"
            raise SystemExit(f"error: --largest takes {sizes} megabytes, and --repeats 1 or more")
        if self.plot is not None and self.plot.suffix not in (".png", ".svg"):
            raise SystemExit(f"error: --plot {self.plot}: the name must end in .png or .svg")
        for path in (self.output, self.plot):
            if path is not None and not path.parent.is_dir():
                raise SystemExit(
                    f"error: there is no folder {path.parent} for {path.name}: make it"
                )


def copy_kinds(device: torch.device) -> list[CopyKind]:
    """Return the kinds of copies to measure on a device."""
    if device.type == "cpu":
        return [CopyKind("memory to memory", is_pinned=False, blocks=True)]
    directions = ("host to device", "device to host")
    return [
        CopyKind(direction, is_pinned, blocks)
        for direction in directions
        for is_pinned in (False, True)
        for blocks in (True, False)
    ]


def measure(copy: CopyKind, size: int, repeats: int, device: torch.device) -> Row:
    """Return the rate of a copy of `size` bytes, and the time after which the call returns."""
    on_host = torch.ones(size, dtype=torch.uint8, pin_memory=copy.is_pinned)
    on_device = torch.ones(size, dtype=torch.uint8, device=device)
    source = on_device if copy.direction == "device to host" else on_host
    target = on_host if copy.direction == "device to host" else on_device
    returned: list[float] = []
    finished: list[float] = []
    for _ in range(repeats + 1):
        synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=not copy.blocks)
        returned.append(time.perf_counter() - began)
        synchronize()
        finished.append(time.perf_counter() - began)
    return {
        "megabytes": size / MEGABYTE,
        "gigabytes_per_second": size / median(finished[1:]) / 1e9,
        "returns_after_milliseconds": median(returned[1:]) * 1e3,
    }


def measure_all(largest: int, repeats: int) -> dict[str, list[Row]]:
    """Return the figures of each size up to `largest` megabytes, by kind of copy."""
    device = default_device()
    sizes = [1]  # in megabytes
    while sizes[-1] < largest:
        sizes.append(min(4 * sizes[-1], largest))
    return {
        copy.name: [measure(copy, size * MEGABYTE, repeats, device) for size in sizes]
        for copy in copy_kinds(device)
    }


def draw(path: Path, measured: dict[str, list[Row]]) -> None:
    """Draw the rate of each kind of copy over the size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, rows in measured.items():
        sizes = [row["megabytes"] for row in rows]
        rates = [row["gigabytes_per_second"] for row in rows]
        style = "--" if "non-blocking" in name else "-"
        color = f"C{('device to' in name) * 2 + ('pinned' in name)}"
        axes.plot(sizes, rates, label=name, linestyle=style, color=color, marker=".")
    axes.set(xscale="log", xlabel="MB", ylabel="GB/s", ylim=(0, None))
    axes.set_title(f"Copies: {device_name(default_device())}")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main(options: Options) -> None:
    """Measure, print a table, and write the files that the flags name."""
    measured = measure_all(options.largest, options.repeats)
    if options.output is not None:
        write_results(options.output, measured)
    sizes = [f"{row['megabytes']:g} MB" for row in next(iter(measured.values()))]
    table = [["GB/s (the call returns after, ms)", *sizes]]
    for name, rows in measured.items():
        cells = []
        for row in rows:
            rate = f"{row['gigabytes_per_second']:.1f}"
            cells.append(f"{rate} ({row['returns_after_milliseconds']:.2g})")
        table.append([name, *cells])
    print_table(table)
    if options.plot is not None:
        draw(options.plot, measured)


if __name__ == "__main__":
    main(tyro.cli(Options))
