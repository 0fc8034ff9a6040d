"""How the ranks of a run agree.

All ranks call these functions in the same order, except `announce`, `is_announced`, `claim` and
`claiming_rank`, which a rank may call alone.

Each way to agree has one function. Code elsewhere decides what the ranks agree on:

- `ask_rank_zero`: rank 0 decides, and the others get its answer.
- `do_on_each_rank`: each rank does the same work, and a mistake on one of them ends all.
- `gather_from_ranks`, `gather_lists`: every rank gets the Python objects of all ranks.
- `gather_numbers`: the same for float64 numbers, bit by bit, on any device.
- `sum_numbers`: every rank gets the sum over ranks of float64 numbers, on any device.
- `sum_in_fp32`: the sum of a few numbers for which fp32 is enough, such as flags.
- `differing_positions`: where integers that should be the same on all ranks differ.
- `wait_for_ranks`: no rank goes on before all have come here.
- `announce`, `is_announced`: one rank tells the others something, and nobody waits.
- `claim`, `claiming_rank`: the first rank that claims a task does it, and nobody waits.

Other exchanges are elsewhere, because they are part of other work: gradients and rows of a batch
(`averaging` and `gathering` in `common.training.gradients`), buffers
(`common.training.evaluation.mode`), the weights that a sharded model starts from
(`common.training.sharding.networks`) and their bits in a checkpoint
(`common.checkpoints.adapters`). A profile begins on all ranks together (`common.profile.profiler`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

from common.errors import UserError
from common.ranks.rank_exits import let_gloo_release
from common.system.launch_variables import is_main_rank, rank

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

# torch and Accelerate are imported inside the functions, because a tool that only reads run
# directories imports this module too.

Answer = TypeVar("Answer")
Value = TypeVar("Value")


def ask_rank_zero(choose: Callable[[], Answer]) -> Answer:
    """Return on all ranks what `choose` returns on rank 0.

    Raises:
        UserError: on all ranks, if `choose` raises it.
    """
    from accelerate.utils import broadcast_object_list

    answer: list[Answer | UserError | None] = [None]
    if is_main_rank():
        try:
            answer = [choose()]
        except UserError as error:
            answer = [error]
    broadcast_object_list(answer)
    decision = answer[0]
    if isinstance(decision, UserError):
        raise decision
    return cast("Answer", decision)


def do_on_each_rank(accelerator: "Accelerator", work: Callable[[], Value]) -> Value:
    """Return what `work` returns on this rank, after all ranks have done their work.

    Raises:
        UserError: on all ranks, if `work` raises it on any of them. Otherwise, the others would
            wait for that rank in a later collective. If several ranks raise it, all raise the error
            of the lowest rank.
    """
    if accelerator.num_processes == 1:
        return work()
    results: list[Value] = []
    mistake: UserError | None = None
    try:
        results.append(work())
    except UserError as error:
        mistake = error
    # The ranks exchange the words of the error, not the error itself: to unpickle an error, pickle
    # calls its class with the exit status alone, so the words would be lost.
    own_words = None if mistake is None else (mistake.problem, mistake.advice, mistake.resumable)
    for words in gather_from_ranks(accelerator, own_words):
        if words is not None:
            problem, advice, resumable = words
            raise UserError(problem, advice=advice, resumable=resumable)
    return results[0]


def gather_from_ranks(accelerator: "Accelerator", value: Value) -> list[Value]:
    """Return the `value` of each rank, in the order of ranks."""
    return gather_lists([value]) if accelerator.num_processes > 1 else [value]


def gather_lists(items: list[Value]) -> list[Value]:
    """Return the items of all ranks in one list, in the order of ranks."""
    from accelerate.utils import gather_object

    all_items: list[Value] = gather_object(items)
    return all_items


def gather_numbers(accelerator: "Accelerator", values: "torch.Tensor") -> "torch.Tensor":
    """Return the float64 `values` of all ranks, [world_size, *shape], on the host.

    `values` is on the host, and of the same shape on all ranks. For a device without float64, the
    ranks exchange the bits as int64, so that no value is rounded.
    """
    import torch

    from common.system.devices import has_float64

    if accelerator.num_processes == 1:
        return values[None]
    if has_float64(accelerator.device):
        rows: torch.Tensor = accelerator.gather(values[None].to(accelerator.device))
        return rows.cpu()
    bits = values[None].contiguous().view(torch.int64)
    rows = accelerator.gather(bits.to(accelerator.device))
    return rows.cpu().view(torch.float64)


def sum_numbers(accelerator: "Accelerator", values: "torch.Tensor") -> "torch.Tensor":
    """Return the sum over ranks of the float64 `values`, on the host.

    `values` is on the host, and of the same shape on all ranks.
    """
    from common.system.devices import has_float64

    if has_float64(accelerator.device):
        total: torch.Tensor = accelerator.reduce(values.to(accelerator.device), "sum")
        return total.cpu()
    return gather_numbers(accelerator, values).sum(0)


def sum_in_fp32(accelerator: "Accelerator", numbers: list[float]) -> list[float]:
    """Return the sum over ranks of each number, in one reduction.

    Every device has fp32, which is exact enough for flags and small counts.
    """
    import torch

    if accelerator.num_processes == 1:
        return numbers
    row = torch.tensor(numbers, dtype=torch.float32, device=accelerator.device)
    sums: torch.Tensor = accelerator.reduce(row, "sum")
    totals: list[float] = sums.tolist()
    return totals


def differing_positions(accelerator: "Accelerator", numbers: list[int]) -> list[int]:
    """Return, on all ranks, the positions at which not all ranks have the same integer.

    Args:
        numbers: the integers of this rank, as many as on the other ranks.
    """
    import torch

    if accelerator.num_processes == 1 or not numbers:
        return []
    row = torch.tensor(numbers, device=accelerator.device)
    # One reduction gives the maximum over ranks, and also the minimum: the maximum of -x, negated.
    bounds = torch.cat([row, -row])
    torch.distributed.all_reduce(bounds, torch.distributed.ReduceOp.MAX)
    largest = bounds[: len(numbers)]
    smallest = -bounds[len(numbers) :]
    positions: list[int] = (largest != smallest).nonzero().flatten().tolist()
    return positions


def wait_for_ranks(accelerator: "Accelerator") -> None:
    """Wait until all ranks have come here, and until no collective holds a tensor.

    A process can then exit: see `let_gloo_release`. The barrier itself holds no tensor, and it ends
    after all reductions.
    """
    if accelerator.num_processes > 1:
        accelerator.wait_for_everyone()
        if accelerator.device.type == "cpu":  # then the ranks talk through gloo
            let_gloo_release()


def announce(event: str) -> None:
    """Tell the other ranks that an event has happened. They see it if they call `is_announced`.

    Raises:
        RuntimeError: the process that keeps the announcements has ended. It is the launcher, or
            rank 0.
    """
    announcements().set(event, "")


def is_announced(event: str) -> bool:
    """Whether a rank has announced an event by `announce`.

    Raises:
        RuntimeError: the process that keeps the announcements has ended. It is the launcher, or
            rank 0.
    """
    return announcements().check([event])


def claim(task: str) -> int:
    """Claim a task that one rank is to do, and return the rank that has it.

    It is this rank, unless another rank has claimed the task before.

    Raises:
        RuntimeError: the process that keeps the claims has ended. It is the launcher, or rank 0.
    """
    return int(announcements().compare_set(task, "", str(rank())))


def claiming_rank(task: str) -> int | None:
    """Return the rank that has claimed a task; None if none has.

    Raises:
        RuntimeError: the process that keeps the claims has ended. It is the launcher, or rank 0.
    """
    store = announcements()
    return int(store.get(task)) if store.check([task]) else None


def announcements() -> "torch.distributed.Store":
    """Return the store through which the ranks have found each other; torch has no public way."""
    import torch

    return torch.distributed.distributed_c10d._get_default_store()
