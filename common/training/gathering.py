"""Rows of all processes in one tensor, with gradients: for a loss over the global batch."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import distributed

from common.agreement import gather_from_ranks
from common.errors import UserError


class GatherRows(torch.autograd.Function):
    """Rows of all ranks; each rank gets the sum of what all ranks' losses say of its own rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, world_size: int, rank: int) -> torch.Tensor:
        """Return [world_size × rows, …], in the order of ranks."""
        ctx.rank, ctx.count = rank, len(rows)
        return torch.cat(all_gathered(rows, world_size))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Sum over ranks, in fp32 at least: gloo adds no bf16, and fp16 has little room."""
        (gradient,) = gradients
        exact = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.to(exact).contiguous()
        if total is gradient:
            total = total.clone()
        distributed.all_reduce(total)
        start = ctx.rank * ctx.count
        return total[start : start + ctx.count].to(gradient.dtype), None, None


def all_gathered(rows: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    """Return the rows of each rank; they travel as bytes, which any backend takes."""
    payload = rows.detach().contiguous().flatten().view(torch.uint8)
    received = [torch.empty_like(payload) for _ in range(world_size)]
    distributed.all_gather(received, payload)
    return [part.view(rows.dtype).view(rows.shape) for part in received]


class Gatherer:
    """Gathers rows over ranks; see `Run.gather`."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.known: set[Any] = set()  # shapes and types that were alike on all ranks

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        world_size = self.accelerator.num_processes
        if world_size == 1:
            return rows
        if rows.device.type == "meta":  # where operations are counted
            return torch.cat([rows] * world_size)
        self.insist_on_equal_shapes(rows)
        gathered: Any = GatherRows.apply(rows, world_size, self.accelerator.process_index)
        return gathered

    def insist_on_equal_shapes(self, rows: torch.Tensor) -> None:
        """Raise a `UserError` on all ranks if two ranks' rows differ in shape or dtype.

        The comparison exchanges Python objects, and on an accelerator that waits for the device. So
        each shape is compared only once there.
        """
        shape_and_dtype = tuple(rows.shape), str(rows.dtype)
        if shape_and_dtype in self.known and rows.device.type != "cpu":
            return
        of_ranks = gather_from_ranks(self.accelerator, shape_and_dtype)
        if len(set(of_ranks)) > 1 or not rows.ndim:
            shown = ", ".join(f"{shape} of {dtype}" for shape, dtype in of_ranks)
            advice = (
                "gather tensors with one row per sample and as many rows on each rank; "
                "run.equal_batches(loader) makes the batches of an evaluation equal"
            )
            raise UserError(f"run.gather: the ranks have {shown}", advice=advice)
        self.known.add(shape_and_dtype)
