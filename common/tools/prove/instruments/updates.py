"""Notes what each update was made of, and saves the weights before the first and after a later one.

It writes `SampleMixing` once, and an `OptimizerStep` before each update of an optimizer.
"""

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from common.checkpoints.shards import is_sharded
from common.run import Run
from common.tools.prove.notes import OptimizerStep, SampleMixing
from common.tools.prove.session import Session
from common.training.drift import networks_of

FIRST_WEIGHTS = "weights-first.safetensors"
LATER_WEIGHTS = "weights-later.safetensors"
# The update after which the later weights are saved. Rounding differences grow from update to
# update: a ResNet's by a factor of 1,000 from update 3 to update 5.
COMPARED_UPDATE = 3


def install(session: Session) -> None:
    updates = UpdateObserver(session)
    session.wrap(Run, "start", updates.started)
    session.wrap(Run, "clip_grad_norm_", updates.clipping)
    session.wrap(Run, "end_update", updates.ended)
    register_optimizer_step_pre_hook(updates.note_update)


class UpdateObserver:
    """Writes notes about the updates of one launch."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.has_started = False
        self.numbers: dict[int, int] = {}  # of the optimizers, by their id, in order of first use
        # By the id of an optimizer: the norm before clipping, until its update.
        self.unclipped: dict[int, float] = {}

    def started(
        self, original: Callable[..., None], run: Run, *positional: object, **named: object
    ) -> None:
        """Note which parts mix samples, and save the first weights."""
        original(run, *positional, **named)
        networks = networks_of(run.context.parts.shared)
        self.session.write(
            SampleMixing(
                step=self.session.step,
                layers=mixing_layers(networks.values()),
                couples_samples=bool(named.get("couples_samples", False)),
            )
        )
        self.save_weights(run, FIRST_WEIGHTS)
        self.has_started = True

    def clipping(
        self, original: Callable[..., None], run: Run, model: nn.Module, optimizer: Optimizer
    ) -> None:
        """Remember the gradients' norm before they are clipped."""
        bare_optimizer = getattr(optimizer, "optimizer", optimizer)
        self.unclipped[id(bare_optimizer)] = gradient_norm(bare_optimizer)
        original(run, model, optimizer)

    def note_update(self, optimizer: Optimizer, positional: object, named: object) -> None:
        """Note an update that an optimizer is about to make."""
        if not self.has_started:
            return
        number = self.numbers.setdefault(id(optimizer), len(self.numbers))
        norm = self.unclipped.pop(id(optimizer), None)
        self.session.write(
            OptimizerStep(
                step=self.session.step,
                optimizer=number,
                gradient_norm=gradient_norm(optimizer) if norm is None else norm,
                learning_rates=[float(group["lr"]) for group in optimizer.param_groups],
            )
        )

    def ended(self, original: Callable[..., None], run: Run) -> None:
        """Save the weights after the update that is compared."""
        original(run)
        if run.progress.global_step == COMPARED_UPDATE:
            self.save_weights(run, LATER_WEIGHTS)

    def save_weights(self, run: Run, name: str) -> None:
        """Save the parameters of all kept networks; called on all ranks."""
        tensors = {}
        for part, network in networks_of(run.context.parts.shared).items():
            for parameter_name, parameter in network.named_parameters():
                tensors[f"{part}.{parameter_name}"] = whole(parameter)
        if self.session.rank == 0:
            save_file(tensors, Path(run.directory.path, name))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor on the host; a sharded one is gathered, on all ranks."""
    values = tensor.detach()
    if is_sharded(values):
        values = values.full_tensor()  # type: ignore[attr-defined]
    return values.cpu().contiguous().clone()


def gradient_norm(optimizer: Optimizer) -> float:
    """Return the L2 norm of all gradients of an optimizer's parameters, in float64."""
    squares = 0.0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                squares += float(whole(parameter.grad).double().square().sum())
    return math.sqrt(squares)


def mixing_layers(networks: Iterable[nn.Module]) -> list[str]:
    """Return the classes of layers whose output for a sample depends on others of its batch."""
    names = set()
    for network in networks:
        for module in network.modules():
            # A batch norm without running statistics also mixes the samples of a batch.
            if isinstance(module, _BatchNorm):
                names.add(type(module).__name__)
    return sorted(names)
