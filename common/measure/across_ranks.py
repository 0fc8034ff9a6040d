"""Sums over all ranks of values that ranks may lack, in one collective."""

from collections.abc import Mapping

import torch
from accelerate import Accelerator

from common.errors import UserError
from common.measure.totals import Total, on_host
from common.ranks.agreement import gather_from_ranks, sum_numbers
from common.system import devices

SumKey = tuple[str, str]  # the group of a sum, such as "recorded", and its name


def sum_over_ranks(
    accelerator: Accelerator, local_sums: Mapping[SumKey, Total | float]
) -> dict[SumKey, torch.Tensor]:
    """Return the sums over all ranks, float64 on the host; called on all ranks.

    Args:
        local_sums: this rank's sums, of any shapes. A key that a rank lacks counts as zeros.

    Raises:
        UserError: a sum has different shapes on two ranks.
    """
    if devices.has_float64(accelerator.device):
        device = accelerator.device
        values = {
            key: torch.as_tensor(value, device=device, dtype=torch.float64)
            for key, value in local_sums.items()
        }
    else:  # the sums are exact on the host only
        device = torch.device("cpu")
        values = on_host(local_sums)
    shapes = common_shapes(accelerator, {key: value.shape for key, value in values.items()})
    # All sums go into one tensor, so that one collective is enough.
    flat_values = []
    for key, shape in shapes.items():
        value = values.get(key, torch.zeros(shape, device=device, dtype=torch.float64))
        flat_values.append(value.flatten())
    sizes = [len(flat) for flat in flat_values]
    flat_sums = sum_numbers(accelerator, torch.cat(flat_values)).split(sizes)
    sums = {}
    for (key, shape), flat_sum in zip(shapes.items(), flat_sums, strict=True):
        sums[key] = flat_sum.view(shape)
    return sums


def common_shapes(
    accelerator: Accelerator, local_shapes: Mapping[SumKey, torch.Size]
) -> dict[SumKey, torch.Size]:
    """Return the shape of each value that any rank has; called on all ranks.

    Raises:
        UserError: a value has different shapes on two ranks.
    """
    shapes: dict[SumKey, torch.Size] = {}
    for rank, shapes_of_rank in enumerate(gather_from_ranks(accelerator, local_shapes)):
        for key, shape in shapes_of_rank.items():
            first_shape = shapes.setdefault(key, shape)
            if first_shape != shape:
                raise UserError(
                    (
                        f"sums.add got {key[1]!r} with shape {tuple(shape)} on rank {rank}, but "
                        f"{tuple(first_shape)} on another rank"
                    ),
                    advice="sum over the dimensions whose sizes differ between the ranks",
                )
    return shapes
