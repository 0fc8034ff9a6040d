"""Records which samples of a micro-batch the model gets, and which samples its loss depends on.

If the loss depends on a sample, the model's output for the sample has a gradient. A gradient may be
zero by chance, because a loss can be flat there. So the check takes a position of the batch as
unused only if its gradient is zero in all batches.

For each recorded micro-batch, it writes `UnusedSamples`, and also `SampleGradients`, which tell how
much each sample counts in the loss. It writes `MissingSamples` if all calls of the model together
get fewer samples than the batch has.

A row of a tensor is an entry of its first dimension. Usually it belongs to one sample.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.utils import _pytree as tree

from common.data.loader import Loader
from common.data.samples import BatchesWithWork
from common.run import Run
from common.tools.prove.observation.session import Session
from common.tools.prove.records.instrument_records import (
    MissingSamples,
    SampleGradients,
    UnusedSamples,
)


def install(session: Session) -> None:
    """Install the instrument. The probe calls this before the recipe runs."""
    observer = SampleObserver(session)
    session.wrap(Loader, "epoch", observer.around_epoch)
    session.wrap(Run, "start", observer.around_start)
    session.wrap(Run, "record", observer.around_record)


class SampleObserver:
    """Watches the samples in the model's inputs and outputs."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.batch_tensors: list[torch.Tensor] = []  # the tensors of the current batch
        self.sample_count = 0  # the number of samples in the current batch
        # How many of them the model got so far. None: no input had rows like those of the batch.
        self.received_count: int | None = None
        # The squared L2 norm of the gradient of each sample's output: float64 [sample_count], on
        # the host. None: no gradient was seen yet.
        self.squared_norms: torch.Tensor | None = None
        # Whether each of these gradients is not zero: bool [sample_count], on the host. The squared
        # norm does not tell this, because the square of a tiny value is zero.
        self.is_used: torch.Tensor | None = None

    def __deepcopy__(self, memo: object) -> "SampleObserver":
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
            self.batch_tensors = [
                leaf
                for leaf in tree.tree_leaves(batch)
                if isinstance(leaf, torch.Tensor) and leaf.ndim
            ]
            self.sample_count = work.samples
            self.received_count = None
            self.squared_norms = None
            self.is_used = None
            yield batch, work
        self.batch_tensors = []

    @property
    def is_training(self) -> bool:
        return bool(self.batch_tensors) and torch.is_grad_enabled()

    def before_forward(self, module: nn.Module, inputs: object, named: object) -> None:
        """Count the samples that the model gets, in the first input with rows like the batch's.

        A recipe may call the model on one part of a batch after another.
        """
        if not self.is_training:
            return
        for tensor in tree.tree_leaves((inputs, named)):
            if not isinstance(tensor, torch.Tensor) or not tensor.ndim or not len(tensor):
                continue
            if self.has_rows_like_batch(tensor):
                self.received_count = (self.received_count or 0) + len(tensor)
                return

    def has_rows_like_batch(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's rows are as large as the rows of a tensor of the batch.

        Rows of a single value do not count, because many other tensors have such rows.
        """
        row_size = tensor.numel() // len(tensor)
        batch_row_sizes = [
            leaf.numel() // self.sample_count
            for leaf in self.batch_tensors
            if len(leaf) == self.sample_count
        ]
        return row_size > 1 and row_size in batch_row_sizes

    def after_forward(self, module: nn.Module, inputs: object, output: object) -> None:
        """Watch the gradient of the model's output, if it has a row for each sample.

        Of several outputs, only the first one that requires a gradient is watched, usually the
        logits.
        """
        if not self.is_training:
            return
        for tensor in tree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.ndim:
                if len(tensor) == self.sample_count:
                    tensor.register_hook(self.note_gradient)
                return

    def note_gradient(self, gradient: torch.Tensor) -> None:
        """Add up each sample's squared norm, and note the samples whose gradient is not zero.

        Torch calls this once for each forward pass of the model, which may be several for a batch.

        Args:
            gradient: the gradient of the output, [sample_count, ...].
        """
        rows = gradient.reshape(len(gradient), -1)
        is_used = (rows != 0).any(1).cpu()
        squared_norms = rows.cpu().double().square().sum(1)
        if self.is_used is not None and self.squared_norms is not None:
            is_used |= self.is_used
            squared_norms += self.squared_norms
        self.is_used = is_used
        self.squared_norms = squared_norms

    def around_record(
        self, original: Callable[..., None], run: Run, *positional: object, **named: object
    ) -> None:
        """Write which samples of the micro-batch the model did not get, or the loss did not use.

        A recipe calls `run.record` after the backward pass, so all gradients are known.
        """
        step = self.session.step
        count = self.sample_count
        if self.received_count is not None and self.received_count < count:
            self.session.write(
                MissingSamples(step=step, received_count=self.received_count, sample_count=count)
            )
        if self.is_used is not None:
            unused = (~self.is_used).nonzero().flatten().tolist()
            self.session.write(
                UnusedSamples(step=step, sample_count=count, unused_positions=unused)
            )
        if self.squared_norms is not None:
            self.session.write(
                SampleGradients(
                    step=step,
                    micro_batch=self.session.micro_batch,
                    gradient_norms=self.squared_norms.sqrt().tolist(),
                )
            )
        original(run, *positional, **named)
