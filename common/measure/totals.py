"""Exact totals on any device, including devices without float64.

On a device with float64, a total is a float64 tensor. On other devices it is a `PairTotal`: two
fp32 tensors, of which the second has the rounding error of the first. A pair has 48 bits instead of
53. The error of a sum is below 1e-13 of the sum of absolute values, and counts are exact up to
2**48. The range is that of fp32.

Only functions whose docstring says so wait for the device.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import torch
from torch.nn import functional as F

from common.system import devices

Key = TypeVar("Key", bound=Hashable)


class PairTotal:
    """A total of any shape, as the sum of two fp32 tensors of that shape."""

    def __init__(self, high: torch.Tensor, low: torch.Tensor) -> None:
        self.high = high  # the total, rounded to fp32
        self.low = low  # the rounding error of `high`, so `high + low` is the total

    @classmethod
    def of(cls, values: torch.Tensor) -> "PairTotal":
        """Return `values` as totals, one for each element.

        Args:
            values: a tensor of any shape and any real dtype. A float64 or int64 value is split in
                two, and narrower floats fit into the first part.
        """
        high = values.float()
        if values.is_floating_point():
            low = (values - high).float() if values.dtype == torch.float64 else high.new_zeros(())
        else:
            low = (values.long() - high.long()).float()
        return cls(high, low.expand_as(high))

    @property
    def shape(self) -> torch.Size:
        return self.high.shape

    def __add__(self, other: "PairTotal | torch.Tensor | float") -> "PairTotal":
        """Return the sum, with the rounding error of the addition in its second part."""
        if not isinstance(other, PairTotal):  # a plain number, or a tensor on the host
            wide = torch.as_tensor(other, dtype=torch.float64)
            other = PairTotal.of(wide).to(self.high.device)
        total, error = two_sum(self.high, other.high)
        return normalised(total, error + (self.low + other.low))

    __radd__ = __add__

    def to(self, device: torch.device) -> "PairTotal":
        return PairTotal(self.high.to(device), self.low.to(device))

    def elements_total(self) -> "PairTotal":
        """Return the sum of all elements, a total without dimensions.

        Each pass adds the second half of the elements to the first, until one element remains.
        """
        high = self.high.flatten()
        low = self.low.flatten()
        if not len(high):
            return PairTotal(high.new_zeros(()), high.new_zeros(()))
        while len(high) > 1:
            if len(high) % 2:
                high = F.pad(high, (0, 1))
                low = F.pad(low, (0, 1))
            half = len(high) // 2
            low = low[:half] + low[half:]
            high, error = two_sum(high[:half], high[half:])
            low = low + error
        return normalised(high[0], low[0])


# The first is for devices with float64, the second for devices without.
Total = torch.Tensor | PairTotal
AnyTotal = TypeVar("AnyTotal", bound=Total | float)


def two_sum(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rounded sum of two fp32 tensors, and its exact rounding error.

    This is Knuth's algorithm. The rounding error of an infinite sum counts as 0.
    """
    total = left + right
    right_part = total - left
    error = (left - (total - right_part)) + (right - right_part)
    return total, error.nan_to_num(0.0, 0.0, 0.0)


def normalised(high: torch.Tensor, low: torch.Tensor) -> PairTotal:
    """Return the sum of two tensors as a total, whose first part is the rounded sum.

    After an addition, `low` may have become larger than a rounding error of `high`.
    """
    return PairTotal(*two_sum(high, low))


def total_with(total: AnyTotal, earlier_total: AnyTotal | None) -> AnyTotal:
    """Return the sum of a total and an earlier total, or `total` if there is no earlier one."""
    return total if earlier_total is None else earlier_total + total  # type: ignore[operator, return-value]


def as_total(values: torch.Tensor) -> Total:
    """Return a tensor's elements as totals on its device."""
    return values.double() if devices.has_float64(values.device) else PairTotal.of(values)


def elements_total(values: torch.Tensor) -> Total:
    """Return the sum of all elements, a total without dimensions on the tensor's device."""
    if devices.has_float64(values.device):
        return values.sum(dtype=torch.float64)
    if values.is_floating_point():
        return PairTotal.of(values).elements_total()
    return PairTotal.of(values.sum(dtype=torch.int64))


def mean_of(values: torch.Tensor) -> torch.Tensor:
    """Return the mean of all elements in the widest float of the tensor's device."""
    return values.double().mean() if devices.has_float64(values.device) else values.float().mean()


def parts_on_host(totals: Sequence[Total]) -> list[list[float]]:
    """Return the parts of each total; this waits for the device, once.

    The totals have no dimensions, and are of one type and on one device.

    A float64 total has one part: the total itself. A `PairTotal` has two: `high` and `low`. In both
    cases the parts add up to the total exactly. A checkpoint saves the parts, and `from_parts`
    makes a total of them again.
    """
    rows = []
    for total in totals:
        rows.append([total.high, total.low] if isinstance(total, PairTotal) else [total])
    if not rows:
        return []
    return torch.stack([torch.stack(row) for row in rows]).tolist()


def from_parts(parts: Sequence[float], device: torch.device) -> Total:
    """Return the sum of these parts as a total on a device.

    The parts come from `parts_on_host`. A checkpoint of another type of device may have more or
    fewer parts than a total on this device.
    """
    if devices.has_float64(device):
        return torch.tensor(sum(parts), dtype=torch.float64, device=device)
    total = PairTotal.of(torch.tensor(0.0))
    for part in parts:
        total = total + part
    return total.to(device)


def on_host(totals: Mapping[Key, Total | float]) -> dict[Key, torch.Tensor]:
    """Return totals of any shapes as float64 tensors on the host; waits for the device once."""
    values: dict[Key, torch.Tensor] = {}
    pairs: dict[Key, PairTotal] = {}
    for key, total in totals.items():
        # On a device without float64, a plain tensor becomes a pair, too. All pairs travel to the
        # host together, so that there is only one wait.
        if isinstance(total, torch.Tensor) and not devices.has_float64(total.device):
            total = PairTotal.of(total)
        if isinstance(total, PairTotal):
            pairs[key] = total
        else:
            values[key] = torch.as_tensor(total, dtype=torch.float64).cpu()
    if pairs:
        sizes = [pair.high.numel() for pair in pairs.values()]
        flat = [torch.stack([pair.high.flatten(), pair.low.flatten()]) for pair in pairs.values()]
        high, low = torch.cat(flat, dim=1).cpu()
        wide = high.double() + low.double()
        # If a total is infinite or NaN, its `low` may be NaN and means nothing.
        wide = torch.where(high.isfinite(), wide, high.double())
        for (key, pair), value in zip(pairs.items(), wide.split(sizes), strict=True):
            values[key] = value.view(pair.shape)
    return {key: values[key] for key in totals}
