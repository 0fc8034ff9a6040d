"""Checks whether `--auto-batch-size` can try sizes without changing the updates."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from common.data.loader import Loader
from common.errors import UserError
from common.measure.flops import ComputeLoss
from common.models.compile import as_written
from common.training.evaluation.mode import keep_buffers


def refuse_unsuitable_loss(
    model: nn.Module,
    loader: Loader,
    compute_loss: ComputeLoss,
    processes: int,
    couples_samples: bool,
) -> None:
    """Raise a `UserError` if sizes can't be tried, or if another size would change the updates.

    Each rank tries sizes without the others, so the loss must not communicate.

    Args:
        model: the bare model, without DDP.
        loader: the training loader.
        compute_loss: the recipe's function; it is called once on each rank, on two samples.
        processes: how many ranks there are.
        couples_samples: whether a sample's loss depends on the other samples of its micro-batch.
    """
    if couples_samples:
        raise UserError(
            "--auto-batch-size would change the updates, because this recipe's loss depends on the "
            "other samples of a micro-batch (couples_samples=True)",
            advice="pass --no-auto-batch-size, and --batch-size N",
        )
    if processes == 1:
        return
    collective = collective_in_loss(model, loader, compute_loss)
    if collective is not None:
        raise UserError(
            (
                "--auto-batch-size can't be used, because compute_loss communicates with other "
                f"processes ({collective}), while each process tries sizes on its own"
            ),
            advice=(
                "pass --no-auto-batch-size, and --batch-size N; a run that was started with "
                "--auto-batch-size keeps this flag, so resume it in one process"
            ),
        )


def collective_in_loss(model: nn.Module, loader: Loader, compute_loss: ComputeLoss) -> str | None:
    """Return the first operation of the loss that communicates with other processes, if any.

    The loss is computed on two samples. The model keeps its buffers, and has no gradients.
    """
    # The call below changes buffers, such as batch norm's statistics.
    restore_buffers = keep_buffers(model)
    batch = loader.batch_of(torch.arange(min(2, len(loader.samples))))
    model.train()
    with as_written(model), CollectiveFinder() as finder:
        loss, _ = compute_loss(model, batch)
        loss.backward()
    model.zero_grad()
    restore_buffers()
    return finder.first_collective


class CollectiveFinder(TorchDispatchMode):
    """Records the name of the first operation that communicates with other processes."""

    # Without this, torch refuses to run operations that call functions, such as `flex_attention`.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.first_collective: str | None = None

    def __torch_dispatch__(
        self,
        operation: torch._ops.OpOverload | torch._ops.HigherOrderOperator,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run an operation, and note its name if it is the first that communicates.

        Torch calls this method for each torch operation within the `with` block.
        """
        namespace = operation.namespace
        if self.first_collective is None and namespace in ("c10d", "_c10d_functional"):
            self.first_collective = str(operation).removesuffix(".default")
        return operation(*args, **(kwargs or {}))


def batch_norm_sentence(model: nn.Module, before: int, now: int) -> str | None:
    """Return the sentence to print if a changed micro-batch changes batch norm, else None.

    Args:
        model: the model, of which only layers in training mode count.
        before: the requested samples per micro-batch.
        now: the chosen samples per micro-batch.
    """
    layers = (module for module in model.modules() if isinstance(module, _BatchNorm))
    if before == now or not any(layer.training for layer in layers):
        return None
    return (
        f"batch norm: its statistics are now those of {now} samples instead of {before}, so "
        f"updates change slightly; to keep them, start a new run with --batch-size {before} and "
        "without --auto-batch-size"
    )
