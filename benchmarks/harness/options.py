"""The flags of `peers.py`, and this machine's facts that the suites depend on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from common.track.names import precision_name
from common.training.precision import choose_precision

SuiteName = Literal["mnist", "resnet", "bert", "loop", "start", "ddp", "memory", "flags", "quality"]

# In these updates, libraries are initialised, kernels are chosen and graphs are recorded.
UNTIMED_ON_GPU = 20


@dataclass(kw_only=True)
class Options:
    """Compare the recipes with their peers on this machine, and write the results."""

    suites: tuple[SuiteName, ...] = ("mnist", "resnet", "bert", "loop", "start", "ddp", "memory")
    """Suites to run; flags compares flags of the recipes, quality compares accuracies."""
    rounds: int = 5
    """Number of rounds. In each, all contestants take turns; a ratio is the median over rounds."""
    scale: float = 1.0
    """Factor of the updates per round: 0.1 to try the script, more than 1 for less noise."""
    data: Path | None = None
    """Folder with mnist/, cifar10/ and sst2/ as the Hub lays them out (default: built-in data)."""
    bert_checkpoint: Path | None = None
    """Folder of a BERT checkpoint (default: random weights, which only show the speed)."""
    tracker: Literal["none", "wandb"] = "none"
    """Tracker of the recipe, besides its metrics.jsonl; wandb runs offline."""
    output: Path | None = None
    """JSON file to write (default: in benchmarks/results, named by the device)."""

    @property
    def on_gpu(self) -> bool:
        """Whether the contestants train on an accelerator."""
        return torch.accelerator.is_available()

    @property
    def precision(self) -> str:
        """The precision that the recipes choose on this machine: fp16, bf16 or fp32."""
        return precision_name(choose_precision("auto", not self.on_gpu))

    @property
    def has_goals(self) -> bool:
        """Whether the goals are meant for this machine: a GPU, or a CPU with bf16 arithmetic."""
        return self.precision != "fp32"

    @property
    def untimed(self) -> int:
        """Number of updates of each training before its clock starts.

        It is 0 on a CPU, where nothing is tuned or recorded and updates take long.
        """
        return self.scaled(UNTIMED_ON_GPU) if self.on_gpu else 0

    def scaled(self, updates: int) -> int:
        """Return a number of updates times `scale`, at least 2."""
        return max(2, round(self.scale * updates))
