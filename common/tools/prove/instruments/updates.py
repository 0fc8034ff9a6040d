"""Records the optimizer steps of each update, and saves the weights and buffers twice.

They are saved before the first update, and after the update `COMPARED_UPDATE`. Checks compare the
later weights of two runs, relative to how far the weights have moved from the first.

It writes `SampleMixing` once, and an `OptimizerStep` before each step of an optimizer.
"""

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import utils
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from common.checkpoints.shards import is_sharded
from common.lifecycle.stages import Context, StartedRun
from common.lifecycle.training_loop import TrainingLoop
from common.run import Run
from common.tools.prove.observation.session import Session
from common.tools.prove.records.instrument_records import OptimizerStep, SampleMixing
from common.training.gradients.skipped_steps import parameters_of
from common.training.unequal_weights import networks_of

FIRST_WEIGHTS = "weights-first.safetensors"
LATER_WEIGHTS = "weights-later.safetensors"
FIRST_BUFFERS = "buffers-first.safetensors"
LATER_BUFFERS = "buffers-later.safetensors"
# The update after which the later weights and buffers are saved. Rounding differences grow from
# update to update: a ResNet's by a factor of 1,000 from update 3 to update 5.
COMPARED_UPDATE = 3


def install(session: Session) -> None:
    """Install the instrument. The probe calls this before the recipe runs."""
    observer = UpdateObserver(session)
    session.wrap(Run, "start", observer.around_start)
    session.wrap(Run, "clip_grad_norm_", observer.around_clip_grad_norm)
    session.wrap(utils, "clip_grad_norm_", observer.around_clip_of_torch)
    session.wrap(TrainingLoop, "end_update", observer.around_end_update)
    register_optimizer_step_pre_hook(observer.before_optimizer_step)


class UpdateObserver:
    """Writes the optimizer steps of one launch, and saves its weights."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.has_started = False
        # The number of each optimizer, in order of first use, by its id.
        self.optimizer_numbers: dict[int, int] = {}
        # Squared norms of gradients before clipping, by the id of the parameter, until the next
        # step of its optimizer.
        self.unclipped_squares: dict[int, float] = {}

    def around_start(
        self, original: Callable[..., None], run: Run, *positional: object, **named: object
    ) -> None:
        """Write the batch norms and whether the loss couples samples; save the first weights."""
        original(run, *positional, **named)
        networks = networks_of(run.context.parts.shared)
        self.session.write(
            SampleMixing(
                step=self.session.step,
                batch_norms=batch_norms_in(networks.values()),
                couples_samples=bool(named.get("couples_samples", False)),
            )
        )
        self.save_weights(run.context, FIRST_WEIGHTS)
        self.save_buffers(run.context, FIRST_BUFFERS)
        self.has_started = True

    def around_clip_grad_norm(
        self, original: Callable[..., None], run: Run, model: nn.Module, optimizer: Optimizer
    ) -> None:
        """Remember the norm of the gradients before they are clipped.

        Clipping makes large norms equal, which would hide gradients of the wrong size.
        """
        # Several optimizers may update the network.
        for parameter in {*model.parameters(), *parameters_of(optimizer)}:
            self.unclipped_squares[id(parameter)] = squared_gradient(parameter)
        original(run, model, optimizer)

    def around_clip_of_torch(
        self,
        original: Callable[..., torch.Tensor],
        parameters: torch.Tensor | Iterable[torch.Tensor],
        *positional: object,
        **named: object,
    ) -> torch.Tensor:
        """Remember the norm of the gradients before torch's own function clips them.

        Gradients that are clipped before the end of an update are left out.
        """
        # `parameters` may be an iterator, which can be read only once.
        all_parameters = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
        run = self.session.run
        if run is not None and run.accelerator.sync_gradients:
            for parameter in all_parameters:
                self.unclipped_squares[id(parameter)] = squared_gradient(parameter)
        return original(all_parameters, *positional, **named)

    def before_optimizer_step(
        self, optimizer: Optimizer, positional: object, named: object
    ) -> None:
        """Write a step that an optimizer is about to make."""
        if not self.has_started:
            return
        number = self.optimizer_numbers.setdefault(id(optimizer), len(self.optimizer_numbers))
        squares = 0.0
        for parameter in parameters_of(optimizer):
            unclipped = self.unclipped_squares.pop(id(parameter), None)
            squares += squared_gradient(parameter) if unclipped is None else unclipped
        self.session.write(
            OptimizerStep(
                step=self.session.step,
                optimizer_number=number,
                gradient_norm=math.sqrt(squares),
                learning_rates=[float(group["lr"]) for group in optimizer.param_groups],
            )
        )

    def around_end_update(
        self,
        original: Callable[[TrainingLoop, StartedRun], None],
        loop: TrainingLoop,
        started: StartedRun,
    ) -> None:
        """Save the weights after the update that is compared."""
        original(loop, started)
        if self.session.step == COMPARED_UPDATE:
            self.save_weights(started.context, LATER_WEIGHTS)
            self.save_buffers(started.context, LATER_BUFFERS)

    def save_weights(self, context: Context, name: str) -> None:
        """Save the parameters of all kept networks. All ranks have to call this."""
        tensors = {}
        for part, network in networks_of(context.parts.shared).items():
            for parameter_name, parameter in network.named_parameters():
                tensors[f"{part}.{parameter_name}"] = copy_on_host(parameter)
        self.save(tensors, context, name)

    def save_buffers(self, context: Context, name: str) -> None:
        """Save the buffers of all kept networks, except for batch norms. All ranks have to call it.

        A batch norm has the statistics of micro-batches, so its buffers depend on their size.
        """
        tensors = {}
        for part, network in networks_of(context.parts.shared).items():
            for module_name, module in network.named_modules(prefix=part):
                if isinstance(module, _BatchNorm):
                    continue
                for buffer_name, buffer in module.named_buffers(recurse=False):
                    if buffer.layout is torch.strided and not buffer.is_complex():
                        tensors[f"{module_name}.{buffer_name}"] = copy_on_host(buffer)
        self.save(tensors, context, name)

    def save(self, tensors: dict[str, torch.Tensor], context: Context, name: str) -> None:
        """Write the tensors of rank 0 to a file in the run's directory."""
        if self.session.rank == 0:
            save_file(tensors, Path(context.directory.path, name))


def copy_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor on the host. All ranks have to call this for a sharded tensor.

    The copy of a sharded tensor has the rows of all ranks.
    """
    values = tensor.detach()
    if is_sharded(values):
        values = values.full_tensor()  # type: ignore[attr-defined]
    return values.cpu().contiguous().clone()


def squared_gradient(parameter: torch.Tensor) -> float:
    """Return the squared L2 norm of a parameter's gradient, in float64; 0 without a gradient."""
    if parameter.grad is None:
        return 0.0
    return float(copy_on_host(parameter.grad).double().square().sum())


def batch_norms_in(networks: Iterable[nn.Module]) -> list[str]:
    """Return the class names of the batch norms; `mixing.py` finds other modules that mix samples.

    The output of a batch norm for a sample depends on the other samples of the batch.
    """
    names = set()
    for network in networks:
        for module in network.modules():
            # A batch norm without running statistics also mixes the samples of a batch.
            if isinstance(module, _BatchNorm):
                names.add(type(module).__name__)
    return sorted(names)
