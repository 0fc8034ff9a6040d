"""Gathers rows of all ranks into one tensor, with gradients: for a loss over the global batch."""

import torch
from accelerate import Accelerator
from torch import distributed
from torch.autograd.function import FunctionCtx

from common.errors import UserError
from common.ranks.agreement import gather_from_ranks


class OwnRows(FunctionCtx):
    """Tells the backward pass which of the gathered rows are this rank's own."""

    rank: int
    row_count: int  # the number of a rank's rows, the same on all ranks


class GatherRows(torch.autograd.Function):
    """Concatenates the rows of all ranks.

    Each rank's loss may depend on all rows. So the gradient of a rank's own rows is the sum of the
    gradients that all ranks have for them.
    """

    @staticmethod
    def forward(ctx: OwnRows, rows: torch.Tensor, world_size: int, rank: int) -> torch.Tensor:
        """Return [world_size × rows, …], in the order of ranks."""
        ctx.rank = rank
        ctx.row_count = len(rows)
        return torch.cat(all_gathered(rows, world_size))

    @staticmethod
    def backward(ctx: OwnRows, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient of this rank's rows, summed over ranks.

        The sum is made in fp32 or a wider type, because gloo can't add bf16, and fp16 overflows.
        """
        (gradient,) = gradients  # there is one, because `forward` returns one tensor
        sum_dtype = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.to(sum_dtype).contiguous()
        if total is gradient:
            total = total.clone()  # autograd does not allow a change of the gradient itself
        distributed.all_reduce(total)
        start = ctx.rank * ctx.row_count
        # The two integers that `forward` takes have no gradients.
        return total[start : start + ctx.row_count].to(gradient.dtype), None, None


def all_gathered(rows: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    """Return the rows of each rank, without gradients.

    The rows travel as bytes, because not every backend supports every dtype.
    """
    own_bytes = rows.detach().contiguous().flatten().view(torch.uint8)
    bytes_of_ranks = [torch.empty_like(own_bytes) for _ in range(world_size)]
    distributed.all_gather(bytes_of_ranks, own_bytes)
    return [part.view(rows.dtype).view(rows.shape) for part in bytes_of_ranks]


class Gatherer:
    """Gathers rows over ranks; see `Run.gather`."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        # The (shape, dtype) pairs that were found to be the same on all ranks.
        self.known_equal: set[tuple[tuple[int, ...], str]] = set()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks, with gradients: [world_size × rows, …].

        Raises:
            UserError: two ranks' rows differ in shape or dtype, or `rows` has no dimensions.
        """
        world_size = self.accelerator.num_processes
        if world_size == 1:
            return rows
        # `training_flops` counts operations on the meta device, where only the shape matters.
        if rows.device.type == "meta":
            return torch.cat([rows] * world_size)
        self.require_equal_shapes(rows)
        gathered: torch.Tensor = GatherRows.apply(rows, world_size, self.accelerator.process_index)
        return gathered

    def require_equal_shapes(self, rows: torch.Tensor) -> None:
        """Raise a `UserError` on all ranks if two ranks' rows differ in shape or dtype.

        The error is also raised for a single number, which has no rows.

        The ranks exchange the shapes as Python objects. On an accelerator, this makes the host wait
        for the device, so each rank compares a shape and dtype only once. If a known shape on one
        rank then meets a new one on another, the run ends at the collective timeout.
        """
        shape_and_dtype = tuple(rows.shape), str(rows.dtype)
        if shape_and_dtype in self.known_equal and rows.device.type != "cpu":
            return
        shapes_of_ranks = gather_from_ranks(self.accelerator, shape_and_dtype)
        are_different = len(set(shapes_of_ranks)) > 1
        is_single_number = rows.ndim == 0
        if are_different or is_single_number:
            shapes_text = ", ".join(f"{shape} of {dtype}" for shape, dtype in shapes_of_ranks)
            advice = (
                "pass tensors with one row per sample and the same shape and dtype on each rank: "
                "pad rows to one length, and in an evaluation, take batches of the same number of "
                "rows from run.equal_batches(loader)"
            )
            problem = "tensors that differ between ranks" if are_different else "single numbers"
            raise UserError(f"run.gather got {problem} ({shapes_text})", advice=advice)
        self.known_equal.add(shape_and_dtype)
