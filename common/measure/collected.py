"""Rows that an evaluation collects, for metrics that need all samples at once.

The area under the ROC curve (AUROC) and the average precision are such metrics. Neither is a mean
or a function of totals, so each process needs the rows of all processes.
"""

from collections.abc import Mapping

import numpy as np
import torch
from accelerate import Accelerator

from common.errors import UserError
from common.ranks.agreement import gather_from_ranks

Rows = torch.Tensor | np.ndarray

ADVICE = "pass tensors with one row for each sample, as in sums.collect(scores=scores, labels=y)"


class CollectedRows:
    """The rows of an evaluation's batches, by name. They stay on their device until the end."""

    def __init__(self) -> None:
        self.batches: dict[str, list[torch.Tensor]] = {}

    def add(self, rows: Mapping[str, Rows]) -> None:
        """Keep the rows of a batch.

        Args:
            rows: tensors or arrays of shape [samples, …], by name.

        Raises:
            UserError: a value has no rows, or the numbers of rows differ.
        """
        tensors = {name: tensor_of_rows(name, value) for name, value in rows.items()}
        sizes = {name: len(values) for name, values in tensors.items()}
        if len({*sizes.values()}) > 1:
            raise UserError(
                f"sums.collect got different numbers of rows ({sizes})",
                advice=ADVICE,
                every_rank=True,
            )
        for name, values in tensors.items():
            self.batches.setdefault(name, []).append(values)

    def of_all_ranks(self, accelerator: Accelerator) -> dict[str, torch.Tensor]:
        """Return the rows of all ranks by name, on the host; called on all ranks.

        The rows of rank 0 come first, then those of rank 1, and so on. Each rank's rows have the
        order in which they were added. Floats narrower than float32 become float32, which NumPy
        and scikit-learn can read. A rank may have had no batch at all.

        Raises:
            UserError: the rows of a name have different shapes.
        """
        local_rows = {name: joined_rows(name, batches) for name, batches in self.batches.items()}
        rows_by_name: dict[str, list[torch.Tensor]] = {}
        for rows_of_rank in gather_from_ranks(accelerator, local_rows):
            for name, rows in rows_of_rank.items():
                rows_by_name.setdefault(name, []).append(rows)
        return {name: joined_rows(name, rows) for name, rows in rows_by_name.items()}


def tensor_of_rows(name: str, value: Rows) -> torch.Tensor:
    """Return rows as a detached tensor.

    Raises:
        UserError: `value` is not a tensor or an array, or has no dimension of samples.
    """
    tensor = value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        tensor = torch.from_numpy(value)
    if isinstance(tensor, torch.Tensor) and tensor.ndim > 0:
        # A copy, because the recipe may change the tensor, and a view would keep all its memory.
        return tensor.detach().clone()
    problem = f"sums.collect got {name!r} as a value of type {type(value).__name__}"
    if isinstance(tensor, torch.Tensor):
        problem = f"sums.collect got one number as {name!r}"
    raise UserError(problem, advice=ADVICE, every_rank=True)


def joined_rows(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the rows of several tensors, one after another, on the host.

    Raises:
        UserError: the rows have different shapes.
    """
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        raise UserError(
            f"sums.collect got rows of {name!r} with the shapes "
            f"{', '.join(map(str, sorted(shapes)))}",
            advice="pad them to one shape, or flatten them and leave out the padding",
            every_rank=True,
        )
    rows = torch.cat(parts).cpu()
    return rows.float() if rows.is_floating_point() and rows.element_size() < 4 else rows
