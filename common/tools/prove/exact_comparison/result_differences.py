"""Compares the results of two finished runs: their rows of metrics, weights and best models."""

from functools import cached_property
from pathlib import Path

import torch

from common.checkpoints.tensors import read_tensors
from common.errors import UserError
from common.run_directory.finished_model import WEIGHTS
from common.run_directory.records import (
    CHECKPOINTS_FOLDER,
    METRICS_FILE,
    MODEL_FOLDER,
)
from common.run_directory.stored_run import StoredRun
from common.tools.rows import first_differing_row
from common.tools.tensors import first_differing_tensor


class Results(StoredRun):
    """The files of a finished run, with its tensors.

    A proof compares the tensors themselves, to say by how much they differ. `ComparedRun`, which a
    reproduction uses, has only their digests.
    """

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors of the final model by name."""
        return tensors_of_file(self.directory / MODEL_FOLDER / WEIGHTS)

    @cached_property
    def best(self) -> dict[str, torch.Tensor]:
        """The tensors of the best model, by file and name; empty if the run kept no best model."""
        tensors: dict[str, torch.Tensor] = {}
        for path in sorted((self.directory / CHECKPOINTS_FOLDER).glob("best-*.safetensors")):
            for name, tensor in tensors_of_file(path).items():
                tensors[f"{path.stem}: {name}"] = tensor
        return tensors

    @property
    def counts_text(self) -> str:
        """The number of results in words, such as "14 rows, 6 tensors and the best model"."""
        best = " and the best model" if self.best else ""
        return f"{len(self.rows)} rows, {len(self.weights)} tensors{best}"


def tensors_of_file(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file by name; empty if the file is missing or damaged.

    So a file that only one run lacks is a difference of the runs, and not an error.
    """
    try:
        return read_tensors(path)
    except UserError:
        return {}


def differences_of_results(reference: Results, other: Results) -> list[str]:
    """Return a phrase for each difference of rows, final weights and best models of two runs."""
    differences = [
        (METRICS_FILE, first_differing_row(reference.rows, other.rows)),
        ("final model", first_differing_tensor(reference.weights, other.weights)),
        ("best model", first_differing_tensor(reference.best, other.best)),
    ]
    return [f"{name}: {difference}" for name, difference in differences if difference is not None]
