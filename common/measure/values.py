"""Values that a recipe measures: tensors and plain numbers, read without waiting for a device."""

from typing import Any

import numpy as np
import torch

from common.errors import UserError

# A plain number stays a float, so that it is never copied to a device.
Value = torch.Tensor | float


def measured_value(name: str, value: Any, caller: str) -> Value:
    """Return a detached tensor, or a float for a plain number; `caller` is named by the error.

    Raises a `UserError` for anything that has no real value, such as a string or None.
    """
    if isinstance(value, torch.Tensor):
        if value.is_complex():
            raise UserError(f"{caller}: {name!r} is complex: give real numbers", every_rank=True)
        return value.detach()
    if isinstance(value, (bool, int, float, np.number, np.bool_)) and not np.iscomplexobj(value):
        return float(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(value)
    raise UserError(
        f"{caller}: {name!r} is a {type(value).__name__}: give a tensor or a number",
        every_rank=True,
    )


def figure(name: str, value: Any) -> float:
    """Return a figure of an evaluation as a float; a `UserError` if it is not one number."""
    is_array = isinstance(value, (torch.Tensor, np.ndarray))
    size = int(np.prod(tuple(value.shape))) if is_array else 1
    if size == 1:
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    shape = f" of shape {tuple(value.shape)}" if is_array else ""
    raise UserError(
        f"the evaluation's {name!r} is a {type(value).__name__}{shape}: each figure is one number",
        every_rank=True,
    )
