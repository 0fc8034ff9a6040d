"""The flags of `scaling.py`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

NUMBER = r"\d+(\.\d+)?"


@dataclass(kw_only=True)
class Options:
    """Measure scaling, fit a model of it, and predict clusters."""

    output: Path = Path("scaling")
    """Folder for scaling.json, scaling.md and scaling.png."""
    recipe: Literal["mnist_mlp", "resnet"] = "mnist_mlp"
    """Recipe to train, on random images."""
    batch: int = 1024
    """Samples per update: of each process in weak scaling, of all processes in strong scaling."""
    processes: tuple[int, ...] = (1, 2)
    """Numbers of processes to measure; on a machine with GPUs, each process has one."""
    updates: int = 4
    """Timed updates of each measurement."""
    rounds: int = 3
    """Rounds; in each round, all runs take turns."""
    fit_links: tuple[str, ...] = ("50:0", "400:0", "200:4", "100:8")
    """Links to fit the model to, as Mbit/s:milliseconds each way."""
    check_links: tuple[str, ...] = ("200:0", "100:2", "400:4")
    """Links to check the model against, which it is not fitted to."""
    devices: tuple[int, ...] = (8, 64, 1024)
    """Sizes of the clusters to predict."""
    links: tuple[str, ...] = ("NVLink 4:450:3", "InfiniBand NDR:50:5", "100 GbE:12.5:30")
    """Links of the clusters, as name:GB/s:microseconds. The rate is a data sheet's, of a device in
    each direction; the latency is assumed."""
    link_efficiency: float = 0.8
    """Share of a data sheet's rate that gradients reach (assumed)."""
    overlap: float = 0.5
    """Share of computing that hides communication, for published speeds (assumed)."""

    def __post_init__(self) -> None:
        """Refuse values that would fail only after measuring."""
        counts = (self.batch, self.updates, self.rounds, *self.processes, *self.devices)
        if not self.processes or min(counts) < 1:
            flags = "--batch, --updates, --rounds, --processes and --devices"
            raise SystemExit(f"error: {flags} take 1 or more")
        if not (0 < self.link_efficiency <= 1 and 0 <= self.overlap <= 1):
            raise SystemExit("error: --link-efficiency and --overlap are shares, of 1 at most")
        for link in self.fit_links + self.check_links:
            refuse_unless(link, f"{NUMBER}:{NUMBER}", "Mbit/s:milliseconds")
        for link in self.links:
            refuse_unless(link, f".+:{NUMBER}:{NUMBER}", "name:GB/s:microseconds")


def refuse_unless(link: str, pattern: str, form: str) -> None:
    """Exit with a sentence unless `link` matches `pattern`; `form` describes it to people."""
    if not re.fullmatch(pattern, link):
        raise SystemExit(f"error: {link} is no link: write {form}")
