"""What a finished run has left in its directory: rows of metrics, weights, and the best model."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from pydantic import JsonValue

from common.checkpoints.tensors import read_tensors
from common.errors import UserError
from common.run_directory.records import RunConfig, read_record

# The figures that depend on the clock or on the state of the machine.
OF_THE_CLOCK = ("perf/", "memory/", "gpu/", "time/")
STEP = "progress/global_step"
Row = dict[str, JsonValue]


@dataclass(frozen=True)
class Results:
    """The files of a finished run, read when they are needed."""

    directory: Path

    @cached_property
    def config(self) -> RunConfig:
        """The contents of `config.json`."""
        return read_record(self.directory / "config.json", RunConfig)

    @cached_property
    def rows(self) -> list[Row]:
        """The rows of `metrics.jsonl`, with all figures."""
        text = (self.directory / "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors of the final model by name."""
        return tensors_in(self.directory / "model" / "model.safetensors")

    @cached_property
    def best(self) -> dict[str, torch.Tensor]:
        """The tensors of the best model by name; empty if the run kept none."""
        tensors: dict[str, torch.Tensor] = {}
        for path in sorted((self.directory / "checkpoints").glob("best-*.safetensors")):
            for name, tensor in tensors_in(path).items():
                tensors[f"{path.stem}: {name}"] = tensor
        return tensors

    @property
    def summary(self) -> str:
        """What can be compared, such as "14 rows, 6 tensors and the best model"."""
        best = " and the best model" if self.best else ""
        return f"{len(self.rows)} rows, {len(self.weights)} tensors{best}"


def tensors_in(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file; none if the run wrote no such file."""
    try:
        return read_tensors(path)
    except UserError:
        return {}


def without_clock(row: Row) -> Row:
    """Return a row without the figures that depend on the clock."""
    return {name: value for name, value in row.items() if not name.startswith(OF_THE_CLOCK)}


def first_differing_row(first: Sequence[Row], second: Sequence[Row]) -> str | None:
    """Return in words where two runs' rows differ first; None if all figures are equal.

    Figures of the clock are not compared.
    """
    for before, now in zip(first, second, strict=False):
        names = [*without_clock(before)]
        names += [name for name in without_clock(now) if name not in names]
        for name in names:
            if not is_same(before.get(name), now.get(name)):
                return (
                    f"the row of update {before.get(STEP)} has {name} "
                    f"{before.get(name)} and {now.get(name)}"
                )
    if len(first) != len(second):
        return f"there are {len(first)} and {len(second)} rows"
    return None


def is_same(first: JsonValue, second: JsonValue) -> bool:
    """Whether two figures are equal; NaN equals NaN."""
    if isinstance(first, float) and isinstance(second, float) and math.isnan(first):
        return math.isnan(second)
    return first == second


def first_differing_tensor(
    first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]
) -> str | None:
    """Return in words which tensors differ, and by how much; None if all have the same bits."""
    if first.keys() != second.keys():
        names = sorted(first.keys() ^ second.keys())
        return f"only one of the runs has {names[0]}"
    differing = [name for name, tensor in first.items() if not same_bits(tensor, second[name])]
    if not differing:
        return None
    name = differing[0]
    if first[name].shape != second[name].shape:
        return f"{name} has the shapes {tuple(first[name].shape)} and {tuple(second[name].shape)}"
    apart = (first[name].double() - second[name].double()).abs().max().item()
    return f"{len(differing)} of {len(first)} tensors differ, {name} by up to {apart:.2g}"


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; NaN may equal NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(bytes_of(first), bytes_of(second))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def differences_of_results(reference: Results, other: Results) -> list[str]:
    """Return in words how two runs' rows, final weights and best models differ; empty if equal."""
    differences = [
        ("metrics.jsonl", first_differing_row(reference.rows, other.rows)),
        ("final model", first_differing_tensor(reference.weights, other.weights)),
        ("best model", first_differing_tensor(reference.best, other.best)),
    ]
    return [f"{name}: {difference}" for name, difference in differences if difference is not None]
