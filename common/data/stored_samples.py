"""Samples that are stored in arrays, and are placed on the device if they fit."""

import warnings

import numpy as np
import torch

from common.data.samples import Batch, Samples
from common.data.versions.fingerprint import fingerprint_of_arrays
from common.errors import UserError
from common.failures.sentences import cause_text
from common.system.devices import to_device


class StoredSamples(Samples):
    """Samples whose values are all stored in arrays.

    The arrays are placed on the device if they fit, and batches are then made there. A subclass
    must define `__len__` and `take`.
    """

    def __init__(self, **arrays: torch.Tensor | np.ndarray) -> None:
        """Store arrays as tensors, and memory maps as they are.

        A memory map stays one, so that a worker gets its path instead of a copy of its contents.
        """
        self.arrays = {
            name: values if isinstance(values, np.memmap) else as_tensor(values)
            for name, values in arrays.items()
        }
        self.num_bytes = sum(values.nbytes for values in self.arrays.values())
        self.placed: dict[str, torch.Tensor] = {}  # on the device; empty before `place`
        # How often torch has written to each tensor, as of the first call of `refuse_changes`.
        self.writes: dict[str, int] | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The arrays by name, as tensors on the host, without a copy."""
        return {name: as_tensor(values) for name, values in self.arrays.items()}

    def take(self, tensors: dict[str, torch.Tensor], indices: torch.Tensor) -> Batch:
        """Make a batch from `tensors`, which must all be on one device.

        Both `fetch` (on the host) and `gather` (on the device) make their batches with it.

        Args:
            tensors: the arrays by name, with the values of all samples.
            indices: those of the samples of the batch, int64 [batch], on the host.
        """
        raise NotImplementedError

    def fetch(self, indices: torch.Tensor, epoch: int | None) -> Batch:
        return self.take(self.tensors, indices)

    def place(self, device: torch.device) -> None:
        """Copy all arrays to `device` for `gather`; on a CPU, they stay where they are."""
        self.placed = {name: values.to(device) for name, values in self.tensors.items()}

    def gather(self, indices: torch.Tensor, epoch: int | None) -> Batch:
        """Make a finished batch on the device, from the arrays that `place` copied there."""
        return self.finish(self.take(self.placed, indices), indices, epoch)

    def refuse_changes(self) -> None:
        """Raise a `UserError` if torch has written to a tensor since the first call.

        Writes by NumPy are not noticed.
        """
        writes = {
            name: values._version
            for name, values in self.arrays.items()
            if isinstance(values, torch.Tensor) and not values.is_inference()
        }
        if self.writes is None:
            self.writes = writes
        for name in writes.keys() & self.writes.keys():
            if writes[name] != self.writes[name]:
                raise UserError(
                    f'the tensor "{name}" of a split has changed during training, so batches may '
                    "have old or new rows, and a resumed run would begin with the old ones",
                    advice="keep data that change in a buffer of your own in run.keep, as "
                    "examples/dqn.py does, or start another run with --init-from for the new data",
                    every_rank=True,
                )

    def fingerprint(self) -> str | None:
        """Return a digest of the arrays, by which a resumed run notices that its data have changed.

        The default covers only a few samples. This digest covers all of them if the arrays are
        small.
        """
        return fingerprint_of_arrays(self.arrays)


class TensorSamples(StoredSamples):
    """Tensors or arrays by name, each of shape [samples, ...]; a batch has rows of them.

    Raises:
        UserError: a value can't become a tensor of samples, or the tensors have different numbers
            of samples.
    """

    def __init__(self, **tensors: torch.Tensor | np.ndarray) -> None:
        for name, values in tensors.items():
            require_rows(name, values)
        sizes = {name: len(values) for name, values in tensors.items()}
        if len(set(sizes.values())) != 1:
            raise UserError(
                f"the tensors of one split have different numbers of samples ({sizes})",
                advice="pass tensors with one row per sample, all of the same length",
            )
        super().__init__(**tensors)

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def take(self, tensors: dict[str, torch.Tensor], indices: torch.Tensor) -> Batch:
        (device,) = {values.device for values in tensors.values()}
        indices = to_device(indices, device)
        return {name: values.index_select(0, indices) for name, values in tensors.items()}


def as_tensor(values: torch.Tensor | np.ndarray) -> torch.Tensor:
    """Wrap an array as a tensor without a copy."""
    with warnings.catch_warnings():
        # A memory map may be read-only. That does no harm, because nothing writes to data.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.as_tensor(values)


def require_rows(name: str, values: object) -> None:
    """Raise a `UserError` unless a value is a tensor or can become one, with a row per sample."""
    description = f"{name!r} as a value of type {type(values).__name__}"
    if isinstance(values, np.ndarray):
        description += f" of dtype {values.dtype}"
    try:
        has_rows = as_tensor(values).ndim > 0  # type: ignore[arg-type]
        problem = (
            f"TensorSamples got {description} with a single number instead of a row per sample"
        )
    except (TypeError, ValueError, RuntimeError) as error:
        has_rows = False
        cause = cause_text(error, first_line=True)
        problem = f"TensorSamples got {description}, which can't become a tensor ({cause})"
    if not has_rows:
        raise UserError(
            problem,
            advice=(
                "pass a tensor or an array of numbers, such as np.stack(rows) or "
                'np.ascontiguousarray(values, "float32"), and number texts and classes first'
            ),
        )
