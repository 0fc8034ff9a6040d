"""The results of a finished run: its rows of metrics, its weights, and its best model."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from pydantic import JsonValue

from common.checkpoints.tensors import read_tensors
from common.errors import UserError
from common.run_directory.finished_model import WEIGHTS
from common.run_directory.records import (
    CONFIG,
    METRICS_FILE,
    SUMMARY,
    RunConfig,
    Summary,
    read_record,
)
from common.tools.rows import MetricsRow, first_differing_row, read_rows


@dataclass(frozen=True)
class Results:
    """The files of a finished run. Each is read when it is needed.

    A proof compares the tensors themselves, which take long to read; `PastRun`, the record of a
    reproduction, has their digests alone.
    """

    directory: Path

    @cached_property
    def saved_config(self) -> RunConfig:
        """The contents of `config.json`."""
        return read_record(self.directory / CONFIG, RunConfig)

    @cached_property
    def rows(self) -> list[MetricsRow]:
        """The rows of `metrics.jsonl`."""
        return read_rows(self.directory)

    @cached_property
    def final_figures(self) -> dict[str, JsonValue]:
        """The entries of `summary.json`; null stands for NaN and infinities."""
        return read_record(self.directory / SUMMARY, Summary).to_json()

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors of the final model by name."""
        return tensors_of_file(self.directory / "model" / WEIGHTS)

    @cached_property
    def best(self) -> dict[str, torch.Tensor]:
        """The tensors of the best model by name; empty if the run kept no best model."""
        tensors: dict[str, torch.Tensor] = {}
        for path in sorted((self.directory / "checkpoints").glob("best-*.safetensors")):
            for name, tensor in tensors_of_file(path).items():
                tensors[f"{path.stem}: {name}"] = tensor
        return tensors

    @property
    def summary(self) -> str:
        """The number of results in words, such as "14 rows, 6 tensors and the best model"."""
        best = " and the best model" if self.best else ""
        return f"{len(self.rows)} rows, {len(self.weights)} tensors{best}"


def tensors_of_file(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file; empty if the run has not written the file."""
    try:
        return read_tensors(path)
    except UserError:
        return {}


def first_differing_tensor(
    first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]
) -> str | None:
    """Return a phrase that says how many tensors differ, and by how much; None for equal bits."""
    if first.keys() != second.keys():
        names = sorted(first.keys() ^ second.keys())
        return f"only one of the runs has {names[0]}"
    differing = [name for name, tensor in first.items() if not have_same_bits(tensor, second[name])]
    if not differing:
        return None
    name = differing[0]
    if first[name].shape != second[name].shape:
        return f"{name} has the shapes {tuple(first[name].shape)} and {tuple(second[name].shape)}"
    differences = first[name].double() - second[name].double()
    largest = differences.abs().max().item()
    return f"{len(differing)} of {len(first)} tensors differ, {name} by up to {largest:.2g}"


def have_same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits. So a NaN equals the same NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(raw_bytes(first), raw_bytes(second))


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def differences_of_results(reference: Results, other: Results) -> list[str]:
    """Return a phrase for each difference of rows, final weights and best models of two runs."""
    differences = [
        (METRICS_FILE, first_differing_row(reference.rows, other.rows)),
        ("final model", first_differing_tensor(reference.weights, other.weights)),
        ("best model", first_differing_tensor(reference.best, other.best)),
    ]
    return [f"{name}: {difference}" for name, difference in differences if difference is not None]
