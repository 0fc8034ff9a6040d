"""Checks the values that a recipe measures.

Only `figure`, for the results of an evaluation, waits for the device that a value is on.

Perhaps one rank alone has an unsuitable value. Only that rank raises the error then, so it also
prints the message itself (`every_rank`).
"""

import math
from collections.abc import Mapping

import numpy as np
import torch

from common.errors import UserError

# A plain number stays a float, so that it is never copied to a device.
Value = torch.Tensor | float
# What a recipe may give as a loss, a metric or a total; a bool is an int.
Measured = torch.Tensor | np.ndarray | np.number | np.bool_ | float
Metrics = Mapping[str, Measured]  # values of any shape, by name
ARRAYS = (torch.Tensor, np.ndarray)


def measured_value(name: str, value: Measured, caller: str) -> Value:
    """Return a recipe's value as a detached tensor, or as a float if it is a plain number.

    Args:
        name: the name of the loss, metric or total, for a message.
        value: a tensor, a NumPy array or a plain number.
        caller: the function that the recipe called, for a message.

    Raises:
        UserError: the value does not consist of real numbers: for example a string, or None.
    """
    if is_complex(value):
        raise UserError(
            f"{caller} got a complex number as the value of {name!r}",
            advice="pass a real number, such as its absolute value",
            every_rank=True,
        )
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, (bool, int, float, np.number, np.bool_)):
        return float(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(value.copy())  # the recipe may fill the same array again
    raise UserError(
        f"{caller} got {name!r} as a value of type {type(value).__name__}",
        advice="pass a tensor or a number",
        every_rank=True,
    )


def require_loss_and_metrics(loss: object, metrics: object, call: str) -> None:
    """Refuse a loss that is a dictionary, and metrics that are neither a dictionary nor None.

    Args:
        call: the recipe's call with its arguments, for a message.

    Raises:
        UserError: the loss or the metrics are refused.
    """
    caller = call.partition("(")[0]
    if isinstance(loss, Mapping):
        problem = f"{caller} got a dictionary as the loss"
    elif not isinstance(metrics, Mapping | None):
        problem = (
            f"{caller} got a value of type {type(metrics).__name__} instead of a dictionary of "
            "metrics"
        )
    else:
        return
    raise UserError(problem, advice=f"call it as {call}", every_rank=True)


def refuse_another_loss(loss: Measured, metric: Measured, caller: str) -> None:
    """Raise a `UserError` if the metric named "loss" is another value than the loss.

    Both would be logged under one name. To pass the loss itself once more as this metric is
    allowed. Tensors are compared by their address, which does not wait for the device. So an equal
    copy is refused, as it is for arrays.
    """
    if isinstance(loss, torch.Tensor) and isinstance(metric, torch.Tensor):
        is_same = loss.data_ptr() == metric.data_ptr() and loss.shape == metric.shape
    elif isinstance(loss, ARRAYS) or isinstance(metric, ARRAYS):
        is_same = loss is metric
    else:
        is_same = bool(loss == metric) or (math.isnan(loss) and math.isnan(metric))
    if not is_same:
        raise UserError(
            f"{caller} got two values for 'loss', as the loss and as a metric",
            advice="give the metric another name",
            every_rank=True,
        )


def figure(name: str, value: Measured) -> float:
    """Return a figure of an evaluation, which must be a single real number, as a float.

    Raises:
        UserError: the value is not such a number.
    """
    shape = tuple(value.shape) if isinstance(value, ARRAYS) else None
    if is_complex(value):
        raise UserError(
            f"the evaluation returned a complex number as {name!r}",
            advice="return a real number, such as its absolute value",
            every_rank=True,
        )
    if shape is None or math.prod(shape) == 1:
        try:
            return float(value.item() if isinstance(value, ARRAYS) else value)
        except (TypeError, ValueError):
            pass  # the error below names the type, such as str
    shape_text = ""
    advice = "return one number for each name"
    if shape is not None:
        shape_text = f" of shape {shape}"
        advice += ", such as value.mean()"
    raise UserError(
        f"the evaluation returned a value of type {type(value).__name__}{shape_text} as {name!r} "
        "instead of one number",
        advice=advice,
        every_rank=True,
    )


def is_complex(value: Measured) -> bool:
    """Whether a value is a complex number, or a tensor or an array of such numbers."""
    return value.is_complex() if isinstance(value, torch.Tensor) else bool(np.iscomplexobj(value))
