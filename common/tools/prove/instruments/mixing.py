"""Records the modules whose output for one sample depends on other samples of the micro-batch.

In the first micro-batch, it computes the gradient of each module's first output row with respect
to the module's inputs. If the gradient of another row is not zero, the module mixes samples. Batch
norm is left out: `updates.py` records it by its class.

Such a module's outputs depend on how an update is divided into micro-batches. So a difference
between two divisions may be no mistake.

It writes a `MixingModule` for each class. Modules are skipped if their inputs have no gradient or
no row for each sample. It does not look into compiled, sharded or recomputed models, where such a
gradient would run more than the module itself.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as tree

from common.checkpoints.shards import is_sharded
from common.run import Run
from common.tools.prove.observation.session import Session
from common.tools.prove.records.instrument_records import MixingModule
from common.training.unequal_weights import networks_of


def install(session: Session) -> None:
    """Install the instrument. The probe calls this before the recipe runs."""
    observer = MixingObserver(session)
    session.wrap(Run, "start", observer.around_start)
    session.wrap(Run, "record", observer.around_record)


class MixingObserver:
    """Watches the modules of all kept networks until the first micro-batch is recorded."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.is_watching = False
        self.mixing_modules: set[nn.Module] = set()  # those that were found so far

    def __deepcopy__(self, memo: object) -> "MixingObserver":
        """Return the same object. A recipe may copy its model, which has this object's hooks."""
        return self

    def around_start(
        self, original: Callable[..., None], run: Run, *positional: object, **named: object
    ) -> None:
        """Start the run, then add a hook to each module that can be watched.

        Modules that are compiled, recomputed in the backward pass or sharded are left out.
        """
        original(run, *positional, **named)
        if run.config.compile or run.config.gradient_checkpointing:
            return
        for network in networks_of(run.context.parts.shared).values():
            if any(is_sharded(parameter) for parameter in network.parameters()):
                continue
            for module in network.modules():
                module.register_forward_hook(self.after_forward)
        self.is_watching = True

    def after_forward(self, module: nn.Module, inputs: object, output: object) -> None:
        """Write a `MixingModule` if a module mixes samples and none of the modules in it does."""
        if not self.is_watching or not torch.is_grad_enabled() or module in self.mixing_modules:
            return
        inner_modules = set(module.modules()) - {module}
        if inner_modules & self.mixing_modules:
            return
        if isinstance(module, _BatchNorm):  # `updates.py` records it
            self.mixing_modules.add(module)
            return
        if getattr(module, "batch_first", True) is False:  # the rows are time steps
            return
        count = len(self.session.sample_indices)
        if mixes_rows(rows_with_gradient(inputs, count), rows_with_gradient(output, count)):
            self.mixing_modules.add(module)
            self.session.write(
                MixingModule(step=self.session.step, module_class=type(module).__name__)
            )

    def around_record(
        self, original: Callable[..., None], run: Run, *positional: object, **named: object
    ) -> None:
        """Stop watching after the first micro-batch."""
        self.is_watching = False
        original(run, *positional, **named)


def rows_with_gradient(values: object, count: int) -> list[torch.Tensor]:
    """Return the tensors in nested values that require a gradient and have a row for each sample.

    Args:
        count: the number of samples.
    """
    return [
        tensor
        for tensor in tree.tree_leaves(values)
        if isinstance(tensor, torch.Tensor)
        and tensor.requires_grad
        and tensor.ndim
        and len(tensor) == count
    ]


def mixes_rows(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    """Whether the first row of an output depends on other rows of an input.

    It does not see statistics over samples that are detached from the graph.

    Args:
        inputs: each [samples, ...].
        outputs: each [samples, ...], computed from the inputs.
    """
    if not inputs:
        return False
    for output in outputs:
        first_row = output[0].flatten()
        # A plain sum would miss modules whose outputs always have the same sum, such as a softmax.
        weights = torch.linspace(0.5, 1.5, len(first_row), device=output.device)
        gradients = torch.autograd.grad(
            (first_row * weights).sum(), inputs, retain_graph=True, allow_unused=True
        )
        for gradient in gradients:
            if gradient is not None and bool((gradient[1:] != 0).any()):
                return True
    return False
