"""Warns of the first training batch if it has values that are NaN.

Such values make the loss NaN, and the error that follows can't say where they came from.
"""

import torch

from common.console import warn
from common.data.places import values_with_places
from common.data.samples import Batch


def warn_of_nan(batch: Batch) -> None:
    """Print a warning that names the tensors of a batch with NaN; this waits for the device.

    Each rank prints its own, because perhaps the batch of one rank alone has such values.
    """
    places = [place for place, value in values_with_places(batch, "batch") if has_nan(value)]
    if places:
        warn(
            f"the first training batch has NaN in {', '.join(places)}, for example from missing "
            "cells of a table: unless the model replaces them, the loss becomes NaN as well",
            every_rank=True,
        )


def has_nan(value: object) -> bool:
    """Whether a value is a tensor of real numbers with NaN."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    return bool(value.isnan().any())
