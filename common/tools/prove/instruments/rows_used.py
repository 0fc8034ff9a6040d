"""Records which samples of a micro-batch the model gets, and which samples its loss depends on.

If the loss depends on a sample, the model's output for the sample has a gradient. A gradient may be
zero by chance, because a loss can be flat there. But a position of the batch whose gradient is
always zero is not used.

It writes `UnusedRows` for each recorded micro-batch, and `MissingRows` if the model gets fewer
samples than the batch has.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.utils import _pytree as tree

from common.data.loader import Loader
from common.data.samples import BatchesWithWork
from common.run import Run
from common.tools.prove.records.instrument_records import MissingRows, UnusedRows
from common.tools.prove.session import Session


def install(session: Session) -> None:
    observer = RowObserver(session)
    session.wrap(Loader, "epoch", observer.around_epoch)
    session.wrap(Run, "start", observer.around_start)
    session.wrap(Run, "record", observer.around_record)


class RowObserver:
    """Watches the rows of the model's inputs and outputs."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.leaves: list[torch.Tensor] = []  # the tensors of the current batch
        self.count = 0  # the number of samples in the current batch
        # Whether each row of the output has a gradient that is not zero: bool [count], on the host.
        # None: no gradient was seen yet.
        self.has_gradient: torch.Tensor | None = None

    def __deepcopy__(self, memo: object) -> "RowObserver":
        """Return the same object. A recipe may copy its model, which has this object's hooks."""
        return self

    def around_start(
        self, original: Callable[..., None], run: Run, *positional: object, **named: object
    ) -> None:
        """Add hooks to the model that the recipe trains."""
        original(run, *positional, **named)
        model = run.kept.bare_model
        model.register_forward_pre_hook(self.before_forward, with_kwargs=True)
        model.register_forward_hook(self.after_forward)

    def around_epoch(
        self,
        original: Callable[[Loader, int, int], BatchesWithWork],
        loader: Loader,
        epoch: int,
        first_update: int = 0,
    ) -> BatchesWithWork:
        """Yield the batches of an epoch, and remember the tensors of the current batch."""
        for batch, work in original(loader, epoch, first_update):
            self.leaves = [
                leaf
                for leaf in tree.tree_leaves(batch)
                if isinstance(leaf, torch.Tensor) and leaf.ndim
            ]
            self.count = work.samples
            self.has_gradient = None
            yield batch, work
        self.leaves = []

    @property
    def is_training(self) -> bool:
        return bool(self.leaves) and torch.is_grad_enabled()

    def before_forward(self, module: nn.Module, inputs: object, named: object) -> None:
        """Write a note if an input has only some rows of a tensor of the batch."""
        if not self.is_training:
            return
        for tensor in tree.tree_leaves((inputs, named)):
            if not isinstance(tensor, torch.Tensor) or not tensor.ndim:
                continue
            rows = len(tensor)
            if 0 < rows < self.count and self.is_part_of_batch(tensor):
                self.session.write(
                    MissingRows(step=self.session.step, rows=rows, samples=self.count)
                )
                return

    def is_part_of_batch(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's rows are as large as the rows of a tensor of the batch.

        Rows of a single value do not count, because many other tensors have such rows.
        """
        row_size = tensor.numel() // len(tensor)
        return any(
            len(leaf) == self.count and leaf.numel() // self.count == row_size > 1
            for leaf in self.leaves
        )

    def after_forward(self, module: nn.Module, inputs: object, output: object) -> None:
        """Watch the gradient of the model's output, if it has a row for each sample.

        Of several outputs, only the first one that requires a gradient is watched.
        """
        if not self.is_training:
            return
        for tensor in tree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.ndim:
                if len(tensor) == self.count:
                    tensor.register_hook(self.add_gradient)
                return

    def add_gradient(self, gradient: torch.Tensor) -> None:
        """Remember which rows of a gradient are not zero."""
        is_used = (gradient.reshape(len(gradient), -1) != 0).any(1).cpu()
        if self.has_gradient is not None:
            is_used |= self.has_gradient
        self.has_gradient = is_used

    def around_record(
        self, original: Callable[..., None], run: Run, *positional: object, **named: object
    ) -> None:
        """Write the positions of the micro-batch that have no gradient."""
        if self.has_gradient is not None:
            unused = (~self.has_gradient).nonzero().flatten().tolist()
            self.session.write(
                UnusedRows(step=self.session.step, samples=self.count, unused=unused)
            )
        original(run, *positional, **named)
