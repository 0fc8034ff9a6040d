"""Records gradients that change between two micro-batches of an update.

Gradients add up over the micro-batches of an update, and only a backward pass may change them until
the last one. A loop that clips or clears them earlier makes other updates.

It compares the gradients after the last backward pass of a micro-batch with those before the first
one of the next micro-batch, and writes a `GradientChange` if they differ. It does not look at
sharded models.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import utils

from common.checkpoints.shards import is_sharded
from common.run import Run
from common.tools.prove.instruments.wait_frames import users_frame
from common.tools.prove.observation.session import Session
from common.tools.prove.records.instrument_records import GradientChange
from common.training.unequal_weights import networks_of

CLIPPING = ("clip_grad_norm_", "clip_grad_value_")


def install(session: Session) -> None:
    """Install the instrument. The probe calls this before the recipe runs."""
    observer = GradientObserver(session)
    session.wrap(Run, "start", observer.around_start)
    session.wrap(torch.Tensor, "backward", observer.around_backward)
    session.wrap(Run, "clip_grad_norm_", observer.around_clipping)
    for name in CLIPPING:
        session.wrap(utils, name, observer.around_clipping)


class GradientObserver:
    """Watches the gradients of all kept networks between backward passes."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.parameters: list[nn.Parameter] = []  # empty until `run.start`
        # After the last backward pass: its update and micro-batch, and the norm of each gradient.
        self.position = (0, 0)
        self.norms: list[float] = []
        # The file and line of the user's code that last clipped gradients since then.
        self.clipping_line = ("", 0)

    def around_start(
        self, original: Callable[..., None], run: Run, *positional: object, **named: object
    ) -> None:
        """Start the run, then list the parameters, unless they are sharded."""
        original(run, *positional, **named)
        parameters: list[nn.Parameter] = []
        for network in networks_of(run.context.parts.shared).values():
            parameters += network.parameters()
        if not any(is_sharded(parameter) for parameter in parameters):
            self.parameters = parameters

    def around_clipping(
        self, original: Callable[..., object], *positional: object, **named: object
    ) -> object:
        """Remember which line of the user's code clips gradients."""
        run = self.session.run
        if run is not None:
            recipe = Path(run.context.recipe_file).resolve()
            frame = users_frame(sys._getframe(1), recipe)
            if frame is not None:
                self.clipping_line = (frame.f_code.co_filename, frame.f_lineno)
        return original(*positional, **named)

    def around_backward(
        self,
        original: Callable[..., None],
        loss: torch.Tensor,
        *positional: object,
        **named: object,
    ) -> None:
        """Compare the gradients with those after the backward pass of the micro-batch before."""
        session = self.session
        update, micro_batch = self.position
        if self.norms and (session.step, session.micro_batch) == (update, micro_batch + 1):
            norms = self.gradient_norms()
            if norms != self.norms:
                self.write_change(norms)
        original(loss, *positional, **named)
        self.position = (session.step, session.micro_batch)
        self.norms = self.gradient_norms()
        self.clipping_line = ("", 0)

    def gradient_norms(self) -> list[float]:
        """Return the L2 norm of the gradient of each parameter; 0 without a gradient."""
        norms = []
        for parameter in self.parameters:
            gradient = parameter.grad
            norms.append(0.0 if gradient is None else float(gradient.detach().double().norm()))
        return norms

    def write_change(self, norms: list[float]) -> None:
        """Write that the gradients now have these norms instead of `self.norms`."""
        file, line = self.clipping_line
        update, micro_batch = self.position
        self.session.write(
            GradientChange(
                step=update,
                micro_batch=micro_batch,
                norm_before=math.hypot(*self.norms),
                norm_after=math.hypot(*norms),
                clipping_file=file,
                clipping_line=line,
            )
        )
