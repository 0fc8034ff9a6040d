"""DDP whose layers may be frozen and unfrozen while a run goes on, and the options it takes."""

import dataclasses
import re
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from accelerate import utils
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.errors import TrainingError, UserError

# What a recipe may state as `ddp={...}`; the type of gradients is a flag.
OPTIONS = {
    field.name: field.default
    for field in dataclasses.fields(utils.DistributedDataParallelKwargs)
    if not field.name.startswith("comm_")
}
UNFINISHED_REDUCTION = "Expected to have finished reduction"
NO_GRADIENT = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
read_requires_grad = attrgetter("requires_grad")


def ddp_options(stated: Mapping[str, Any], compression: str) -> utils.DistributedDataParallelKwargs:
    """Return the options of DDP: those that a recipe has stated over the defaults of recipes.

    Raises:
        UserError: for an option that DDP does not have, or a value of another type.
    """
    for name, value in stated.items():
        if name not in OPTIONS:
            advice = f"state one of {', '.join(sorted(OPTIONS))}"
            also = "; --gradient-compression sets the hook" if name.startswith("comm_") else ""
            raise UserError(f"Run(..., ddp={{{name!r:.50}: ...}}) is no option: {advice}{also}")
        expected = type(OPTIONS[name])
        if type(value) is not expected:
            example = f"give {expected.__name__}, such as {OPTIONS[name]}"
            raise UserError(f"Run(..., ddp={{{name!r}: {value!r:.50}}}) can't work: {example}")
    options = {
        "gradient_as_bucket_view": True,
        # Buffers (batch norm's statistics) are averaged at evaluation, not sent every step.
        "broadcast_buffers": False,
        **stated,
    }
    # No static graph by default: it gained nothing, and fails under `no_sync` (torch 2.13).
    hook = utils.DDPCommunicationHookType(compression)
    return utils.DistributedDataParallelKwargs(comm_hook=hook, **options)


class FreezableDDP(DistributedDataParallel):
    """DDP that averages the gradients of exactly the parameters that require them.

    Torch registers these once, when it wraps a network. A layer that was frozen then is never
    averaged later, and one that is frozen later is waited for in vain. Here each forward pass
    compares the parameters with those registered, and registers anew where they differ, which all
    ranks do alike. The wrapper object, which a recipe holds, stays the same.
    """

    handler: Any

    @classmethod
    def adopt(cls, wrapped: Any, handler: Any) -> None:
        """Turn what Accelerate has wrapped into this class, in place.

        Args:
            handler: Accelerate's, which registers the communication hook.
        """
        wrapped.__class__ = cls
        wrapped.handler = handler
        wrapped.remember_parameters()

    def remember_parameters(self) -> None:
        named = dict(self.module.named_parameters())
        self.names = [*named]
        self.all_parameters = [*named.values()]
        self.registered = [*map(read_requires_grad, self.all_parameters)]
        self.has_accumulated = False  # gradients of this rank alone, in the present update

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        if torch.is_grad_enabled():
            trainable = self.registered
            if self.require_backward_grad_sync:
                trainable = self.follow()
            else:
                self.has_accumulated = True
            if True not in trainable:  # nothing to average, as in a step of another network
                return self.module(*inputs, **named_inputs)
        try:
            return super().forward(*inputs, **named_inputs)
        except RuntimeError as problem:
            if UNFINISHED_REDUCTION not in str(problem):
                raise
            raise TrainingError(self.unused_sentence(str(problem))) from None

    def follow(self) -> list[bool]:
        """Return which parameters require gradients, and have DDP average those of exactly these.

        Where none does, DDP keeps what it has: a recipe may freeze a network for a moment.
        """
        trainable = [*map(read_requires_grad, self.all_parameters)]
        if self.has_accumulated:
            # What layers had gathered in this update before they were frozen.
            states = zip(self.all_parameters, trainable, strict=True)
            average_gradients([parameter for parameter, trains in states if not trains])
            self.has_accumulated = False
        if trainable != self.registered and True in trainable:
            self.register_anew()
            self.registered = trainable
        return trainable

    def register_anew(self) -> None:
        """Build DDP's reducer for the parameters that require gradients now."""
        self.reducer._remove_autograd_hooks()
        # As torch does when it restores a pickled wrapper.
        parameters, expect_sparse = self._build_params_for_reducer()
        names = self._build_debug_param_to_name_mapping(parameters)
        self._ddp_init_helper(parameters, expect_sparse, names, self.static_graph)
        if self.static_graph:
            self.reducer._set_static_graph()
        self._comm_hooks = []
        self.handler.register_comm_hook(self)

    def unused_sentence(self, problem: str) -> str:
        """Return what to do where a parameter had no part in the loss, naming the first."""
        states = zip(self.names, self.registered, strict=True)
        registered = [name for name, is_registered in states if is_registered]
        found = NO_GRADIENT.search(problem)
        name = registered[int(found[1].split()[0])] if found else "a parameter"
        return (
            f"{name} got no gradient in the last update, because the loss does not depend on it, "
            "and DDP waits for it: freeze it with requires_grad_(False) while it is not used, or "
            'state Run(config, __file__, OBJECTIVE, ddp={"find_unused_parameters": True})'
        )


def average_gradients(parameters: list[nn.Parameter]) -> None:
    """Average over all ranks the gradients that are there, in one collective for each dtype."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for gradients in by_dtype.values():
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        torch.distributed.all_reduce(flat)
        flat /= torch.distributed.get_world_size()
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, values in zip(gradients, flat.split(sizes), strict=True):
            gradient.copy_(values.view_as(gradient))
