"""Measure how fast tensors travel between host and GPU; on a CPU, from memory to memory.

python benchmarks/transfer.py --output transfer.json --plot transfer.png

From pageable and from pinned memory, blocking or not, in sizes from 1 MB to 1 GB. Besides the rate
it is measured when the call returns: a copy that does not block lets Python go on meanwhile, from
pinned memory alone. Pageable memory is first copied into a pinned buffer of the driver's.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):  # started as a file: let the package be found
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.harness.isolation import default_device, synchronize
from common.system.devices import device_name

MEGABYTE = 10**6
MOST_MEGABYTES = 10**5


@dataclass(kw_only=True)
class Options:
    """Measure copies between the host and the GPU, or within a CPU's memory."""

    largest: int = 1000
    """Megabytes of the largest copy; from 1 on, each is four times as large."""
    repeats: int = 5
    """Copies of each kind and size, after one that is not counted; their median is shown."""
    output: Path | None = None
    """JSON file to write."""
    plot: Path | None = None
    """Picture to draw, as .png or .svg."""

    def __post_init__(self) -> None:
        """Refuse what would end it after measuring."""
        if not 1 <= self.largest <= MOST_MEGABYTES or self.repeats < 1:
            most = f"1 to {MOST_MEGABYTES:,}"
            raise SystemExit(f"error: --largest takes {most} megabytes, and --repeats 1 or more")
        if self.plot is not None and self.plot.suffix not in (".png", ".svg"):
            raise SystemExit(f"error: --plot {self.plot}: its name must end in .png or .svg")
        for path in (self.output, self.plot):
            if path is not None and not path.parent.is_dir():
                raise SystemExit(f"error: there is no folder {path.parent} for {path.name}")


def kinds(device: torch.device) -> list[tuple[str, bool, bool]]:
    """Return what is measured: the direction, whether the host's memory is pinned, and blocks."""
    if device.type == "cpu":
        return [("memory to memory", False, True)]
    both = (False, True)
    ways = ("host to device", "device to host")
    return [(way, pinned, blocks) for way in ways for pinned in both for blocks in (True, False)]


def measure(
    way: str, pinned: bool, blocks: bool, size: int, repeats: int, device: torch.device
) -> dict[str, Any]:
    """Return the rate of a copy of `size` bytes, and when the call returned, in milliseconds."""
    host = torch.ones(size, dtype=torch.uint8, pin_memory=pinned)
    there = torch.ones(size, dtype=torch.uint8, device=device)
    source, target = (there, host) if way == "device to host" else (host, there)
    returned, finished = [], []
    for _ in range(repeats + 1):
        synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=not blocks)
        returned.append(time.perf_counter() - began)
        synchronize()
        finished.append(time.perf_counter() - began)
    return {
        "megabytes": size / MEGABYTE,
        "gigabytes_per_second": size / median(finished[1:]) / 1e9,
        "returns_after_milliseconds": median(returned[1:]) * 1e3,
    }


def measure_all(largest: int, repeats: int) -> dict[str, list[dict[str, Any]]]:
    """Return the figures of each size up to `largest` megabytes, by kind of copy."""
    device, sizes = default_device(), [1]
    while sizes[-1] < largest:
        sizes.append(min(4 * sizes[-1], largest))
    return {
        f"{way}, {'pinned' if pinned else 'pageable'}{'' if blocks else ', non-blocking'}": [
            measure(way, pinned, blocks, size * MEGABYTE, repeats, device) for size in sizes
        ]
        for way, pinned, blocks in kinds(device)
    }


def draw(path: Path, measured: dict[str, list[dict[str, Any]]]) -> None:
    """Draw the rates over the size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, rows in measured.items():
        sizes, rates = ([row[key] for row in rows] for key in ("megabytes", "gigabytes_per_second"))
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
    """Measure, print a table, and write what is asked for."""
    measured = measure_all(options.largest, options.repeats)
    if options.output is not None:
        options.output.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    sizes = [f"{row['megabytes']:g} MB" for row in next(iter(measured.values()))]
    table = Table("GB/s (the call returns after, ms)", *sizes)
    for name, rows in measured.items():
        pairs = [(row["gigabytes_per_second"], row["returns_after_milliseconds"]) for row in rows]
        table.add_row(name, *(f"{rate:.1f} ({after:.2g})" for rate, after in pairs))
    Console().print(table)
    if options.plot is not None:
        draw(options.plot, measured)


if __name__ == "__main__":
    main(tyro.cli(Options))
