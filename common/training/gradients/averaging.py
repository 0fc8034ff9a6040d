"""Averages gradients over ranks: DDP that allows freezing layers during a run, and its options."""

import dataclasses
import re
from collections.abc import Mapping
from operator import attrgetter

import torch
from accelerate import utils
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.errors import TrainingError, UserError

# The options that a recipe may pass as `ddp={...}`, with their defaults. The options of
# communication hooks are missing, because `--gradient-compression` sets the hook.
OPTIONS = {
    field.name: field.default
    for field in dataclasses.fields(utils.DistributedDataParallelKwargs)
    if not field.name.startswith("comm_")
}
# Parts of torch's messages about registered parameters that got no gradient.
UNFINISHED_REDUCTION = "Expected to have finished reduction"
NO_GRADIENT = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
# Each forward pass reads this attribute of all parameters. `map` runs an attrgetter in C, which
# takes less time than a loop in Python.
read_requires_grad = attrgetter("requires_grad")


def ddp_options(
    stated_options: Mapping[str, object], compression: str
) -> utils.DistributedDataParallelKwargs:
    """Return the options of DDP: the options that the recipe states, and defaults for the others.

    Args:
        stated_options: the options that the recipe passes to `Run`.
        compression: the value of `--gradient-compression`.

    Raises:
        UserError: DDP does not have an option, or its value is of another type.
    """
    for name, value in stated_options.items():
        refuse_unfit_option(name, value)
    # A static graph is not the default: it was not faster, and fails under `no_sync` (torch 2.13).
    defaults = utils.DistributedDataParallelKwargs(
        comm_hook=utils.DDPCommunicationHookType(compression),
        gradient_as_bucket_view=True,
        # Buffers (batch norm's statistics) are averaged at evaluation, not sent every step.
        broadcast_buffers=False,
    )
    return dataclasses.replace(defaults, **stated_options)


def refuse_unfit_option(name: str, value: object) -> None:
    """Raise a `UserError` if recipes can't set an option, or if its value has another type."""
    if name not in OPTIONS:
        advice = f"use one of {', '.join(sorted(OPTIONS))}"
        if name.startswith("comm_"):
            advice += ", or pass --gradient-compression, which sets the hook"
        raise UserError(
            f"{name!r:.50} in Run(..., ddp={{...}}) is not an option of DDP", advice=advice
        )
    expected = type(OPTIONS[name])
    if type(value) is not expected:
        advice = f"pass a value of type {expected.__name__}, such as {OPTIONS[name]}"
        raise UserError(
            f"Run(..., ddp={{{name!r}: {value!r:.50}}}) has a value of the wrong type",
            advice=advice,
        )


class FreezableDDP(DistributedDataParallel):
    """DDP that averages the gradients of exactly the parameters that require them.

    Torch's DDP registers these parameters once, when it wraps a network. If a layer is unfrozen
    later, its gradients are never averaged. If a layer is frozen later, DDP waits for it forever.
    Here each forward pass compares the trainable parameters with the registered ones, and registers
    the trainable ones again if they differ. All ranks do the same. The recipe keeps the same
    wrapper object.
    """

    handler: utils.DistributedDataParallelKwargs
    names: list[str]  # names of all parameters, in the order of `all_parameters`
    all_parameters: list[nn.Parameter]
    registered: list[bool]  # for each parameter, whether DDP averages its gradient
    # Whether this update has gradients of earlier micro-batches that are not averaged yet.
    has_accumulated: bool

    @classmethod
    def adopt(
        cls, wrapped: DistributedDataParallel, handler: utils.DistributedDataParallelKwargs
    ) -> None:
        """Change the class of a DDP wrapper that Accelerate made to this class, in place.

        Args:
            wrapped: the wrapper to change.
            handler: Accelerate's handler of DDP's options, which registers the communication hook.
        """
        wrapped.__class__ = cls
        assert isinstance(wrapped, cls)
        wrapped.handler = handler
        wrapped.remember_parameters()

    def remember_parameters(self) -> None:
        """Note all parameters, and which of them DDP has registered: the ones that train now."""
        parameters = dict(self.module.named_parameters())
        self.names = [*parameters]
        self.all_parameters = [*parameters.values()]
        self.registered = [*map(read_requires_grad, self.all_parameters)]
        self.has_accumulated = False

    def forward(self, *inputs: object, **named_inputs: object) -> object:
        """Register layers that were frozen or unfrozen since the last call, and run the network.

        Under accumulation, layers are registered only before the last micro-batch of an update,
        because DDP averages gradients only in that micro-batch.

        Raises:
            TrainingError: the last update's loss did not depend on a registered parameter.
        """
        if torch.is_grad_enabled():
            if self.require_backward_grad_sync:  # the last micro-batch of an update
                trainable = self.register_trainable()
            else:
                trainable = self.registered
                self.has_accumulated = True
            if True not in trainable:  # another network is being trained: nothing to average
                return self.module(*inputs, **named_inputs)
        try:
            return super().forward(*inputs, **named_inputs)
        except RuntimeError as problem:
            if UNFINISHED_REDUCTION not in str(problem):
                raise
            raise self.missing_gradient_error(str(problem)) from None

    def register_trainable(self) -> list[bool]:
        """Register the parameters that require gradients, if they differ from the registered ones.

        Gradients that a layer got in this update before it was frozen are averaged first. If no
        parameter requires gradients, the registered ones stay: a recipe may freeze a network for a
        moment.

        Returns:
            For each parameter, whether it requires gradients.
        """
        trainable = [*map(read_requires_grad, self.all_parameters)]
        if self.has_accumulated:
            # A layer may have got gradients in this update before it was frozen. DDP will not
            # average them, so they are averaged here.
            states = zip(self.all_parameters, trainable, strict=True)
            average_gradients([parameter for parameter, is_trainable in states if not is_trainable])
            self.has_accumulated = False
        if trainable != self.registered and True in trainable:
            self.rebuild_reducer()
            self.registered = trainable
        return trainable

    def rebuild_reducer(self) -> None:
        """Build DDP's reducer for the parameters that require gradients now."""
        self.reducer._remove_autograd_hooks()
        # Torch makes the same calls when it restores a pickled wrapper.
        parameters, expect_sparse = self._build_params_for_reducer()
        names = self._build_debug_param_to_name_mapping(parameters)
        self._ddp_init_helper(parameters, expect_sparse, names, self.static_graph)
        if self.static_graph:
            self.reducer._set_static_graph()
        # The new reducer has no communication hook yet, and this list has those of the old one. So
        # the list is emptied, and the hook is registered again.
        self._comm_hooks = []
        self.handler.register_comm_hook(self)

    def missing_gradient_error(self, problem: str) -> TrainingError:
        """Return the error for a loss that does not depend on all registered parameters.

        The message names the first parameter without a gradient.

        Args:
            problem: torch's own message, with the indices of the parameters without gradients.
        """
        states = zip(self.names, self.registered, strict=True)
        registered_names = [name for name, is_registered in states if is_registered]
        name = "a parameter"
        match = NO_GRADIENT.search(problem)
        if match:
            first_index = int(match[1].split()[0])
            name = registered_names[first_index]
        return TrainingError(
            f"{name} got no gradient in the last update, because the loss does not depend on it, "
            "but DDP waits for its gradient",
            advice="freeze it with requires_grad_(False) while it is not used, or write "
            'Run(config, __file__, OBJECTIVE, ddp={"find_unused_parameters": True})',
        )


def average_gradients(parameters: list[nn.Parameter]) -> None:
    """Average the parameters' gradients over all ranks, in one collective for each dtype.

    Use this for parameters that DDP has not registered, because DDP does not average their
    gradients.
    """
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
