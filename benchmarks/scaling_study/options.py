"""What `scaling.py` can be asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(kw_only=True)
class Options:
    """Measure scaling, fit a model of it, and predict clusters."""

    output: Path = Path("scaling")
    """Folder for scaling.json, scaling.md and scaling.png."""
    recipe: Literal["mnist_mlp", "resnet"] = "mnist_mlp"
    """The recipe that is trained, on random images."""
    batch: int = 1024
    """Samples per process and update; for strong scaling of all processes."""
    processes: tuple[int, ...] = (1, 2)
    """Numbers of processes to measure, on a GPU each where there are GPUs."""
    updates: int = 4
    """Updates that count, of each measurement."""
    rounds: int = 3
    """Rounds; in each all measurements take turns."""
    fit_links: tuple[str, ...] = ("50:0", "400:0", "200:4", "100:8")
    """Links to fit the model to, as Mbit/s:milliseconds each way."""
    check_links: tuple[str, ...] = ("200:0", "100:2", "400:4")
    """Links to hold the model against."""
    devices: tuple[int, ...] = (8, 64, 1024)
    """Sizes of clusters to tell about."""
    links: tuple[str, ...] = ("NVLink 4:450:3", "InfiniBand NDR:50:5", "100 GbE:12.5:30")
    """Their links: name:GB/s of a device in each direction (data sheets):microseconds (assumed)."""
    link_efficiency: float = 0.8
    """Share of a data sheet's rate that gradients get (assumed)."""
    overlap: float = 0.5
    """Share of computing that communication hides behind, of published speeds (assumed)."""

    def __post_init__(self) -> None:
        """Refuse what would end it after measuring."""
        counts = (self.batch, self.updates, self.rounds, *self.processes, *self.devices)
        if not self.processes or min(counts) < 1:
            flags = "--batch, --updates, --rounds, --processes and --devices"
            raise SystemExit(f"error: {flags} take 1 or more")
        if not (0 < self.link_efficiency <= 1 and 0 <= self.overlap <= 1):
            raise SystemExit("error: --link-efficiency and --overlap are shares, of 1 at most")
        number = r"\d+(\.\d+)?"
        for given, form, meant in (
            (self.fit_links + self.check_links, f"{number}:{number}", "Mbit/s:milliseconds"),
            (self.links, f".+:{number}:{number}", "name:GB/s:microseconds"),
        ):
            for link in given:
                if not re.fullmatch(form, link):
                    raise SystemExit(f"error: {link} is no link: write {meant}")
