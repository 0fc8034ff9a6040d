"""The parts of a recipe that each checkpoint saves."""

from collections.abc import Iterable, Mapping
from typing import cast

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from common.checkpoints.adapters import bare_optimizer
from common.checkpoints.part_states import Stateful
from common.errors import UserError
from common.lifecycle.stages import Context, KeptParts
from common.training.optim import start_momentum, turn_off_unfit_fused_kernel


def keep(
    context: Context,
    model: nn.Module | None,
    optimizer: Optimizer | None,
    parts: Mapping[str, Stateful],
) -> KeptParts:
    """Add the recipe's parts to those that checkpoints save.

    The optimizers among them are also prepared to skip updates with non-finite gradients.

    Args:
        parts: all parts by name, among them the model and the optimizer. An optimizer may be of any
            class that has `param_groups`.

    Raises:
        UserError: the model or the optimizer is missing or not prepared, or the Accelerator
            prepared a part that is not in `parts`.
    """
    if model is None:
        raise missing_part_error("model")
    if optimizer is None:
        raise missing_part_error("optimizer")
    for name, part in parts.items():
        refuse_compiled_wrapper(name, part)
        bare_part = bare_optimizer(part)
        # These two functions change nothing about a part that is not an optimizer.
        turn_off_unfit_fused_kernel(bare_part, context.accelerator.device)
        start_momentum(bare_part)
        context.parts.add(name, part, may_differ=True)
    refuse_unkept_part(context.accelerator, parts.values())
    refuse_unprepared_model(context.accelerator, model)
    refuse_unprepared_optimizer(context.accelerator, optimizer)
    optimizers = {
        name: cast("Optimizer", part)
        for name, part in parts.items()
        if hasattr(part, "param_groups")
    }
    return KeptParts(
        model=model,
        optimizer=optimizer,
        bare_model=context.accelerator.unwrap_model(model),
        optimizers=optimizers,
    )


def refuse_compiled_wrapper(name: str, part: object) -> None:
    """Raise a `UserError` if `torch.compile(...)` has wrapped a network or a layer of it.

    The wrapper puts `_orig_mod` into the names of weights, in checkpoints and in the exported
    model, which then fit only a model that is wrapped in the same way. `compile()` has no wrapper.
    """
    if not isinstance(part, nn.Module):
        return
    if any("_orig_mod" in module._modules for module in part.modules()):
        raise UserError(
            f"the {name} that run.keep(...) got is wrapped by torch.compile(...), so its weights "
            "would have other names in checkpoints and in the exported model",
            advice=(
                "call compile_model(model, config), as the recipes do, or model.compile(): both "
                "compile it in place"
            ),
        )


def missing_part_error(name: str) -> UserError:
    """Return the error for a call of `run.keep` without a part that each run has."""
    return UserError(
        f"run.keep(...) got no {name}, which each checkpoint needs",
        advice=f"pass the {name} that accelerator.prepare returned, as {name}=...",
    )


def refuse_unkept_part(accelerator: Accelerator, kept_parts: Iterable[object]) -> None:
    """Raise a `UserError` if the Accelerator prepared an object that `kept_parts` lacks."""
    missing_class = class_of_unkept_part(accelerator, kept_parts)
    if missing_class:
        raise UserError(
            (
                f"accelerator.prepare returned an object of class {missing_class} that was not "
                "passed to run.keep(), so a resume could lose its state"
            ),
            advice=(
                "pass the object that accelerator.prepare returned, and not the one that it was "
                "given; a further object may have any name, as in "
                "run.keep(..., second_optimizer=second_optimizer)"
            ),
        )


def refuse_unprepared_model(accelerator: Accelerator, model: nn.Module) -> None:
    """Raise a `UserError` if the Accelerator has prepared no part of the model.

    The parameters are compared, because both may be wrapped, in DDP for example.
    """
    prepared_ids = {id(value) for network in accelerator._models for value in network.parameters()}
    own_ids = {id(value) for value in model.parameters()}
    if own_ids and own_ids.isdisjoint(prepared_ids):
        raise unprepared_part_error(
            "model", "without --mixed-precision, and without the gradients of other processes"
        )


def refuse_unprepared_optimizer(accelerator: Accelerator, optimizer: Optimizer) -> None:
    """Raise a `UserError` for an optimizer of torch that the Accelerator has not prepared.

    The Accelerator prepares only optimizers of torch. It may have prepared the one in a wrapper.
    """
    prepared_ids = {id(prepared_optimizer) for prepared_optimizer in accelerator._optimizers}
    own_ids = {id(optimizer), id(bare_optimizer(optimizer))}
    if isinstance(optimizer, Optimizer) and own_ids.isdisjoint(prepared_ids):
        raise unprepared_part_error(
            "optimizer", "with a step in each micro-batch, and without the loss scale of fp16"
        )


def unprepared_part_error(name: str, consequence: str) -> UserError:
    """Return the error for a model or an optimizer that was not prepared.

    Args:
        consequence: how the run would train.
    """
    return UserError(
        f"the {name} that run.keep(...) got is not prepared, so the run would train {consequence}",
        advice=(
            "call model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler) "
            "before run.keep(...)"
        ),
    )


def class_of_unkept_part(accelerator: Accelerator, kept_parts: Iterable[object]) -> str | None:
    """Return the class name of a prepared object that is not in `kept_parts`; None if all are.

    Checkpoints save only the parts of `run.keep`, so a resume would lose the state of such an
    object.
    """
    # Accelerate may wrap a network in DDP, which has the network as `module`. A recipe may keep the
    # network or the wrapper, so both are compared by the network. Optimizers and schedulers have no
    # `module`, and are compared as they are.
    kept_ids = {id(getattr(part, "module", part)) for part in kept_parts}
    for part in (*accelerator._models, *accelerator._optimizers, *accelerator._schedulers):
        if id(getattr(part, "module", part)) in kept_ids:
            continue
        # Name the class of a network or an optimizer, and not that of its wrapper.
        if hasattr(part, "module"):
            return type(part.module).__name__
        return type(bare_optimizer(part)).__name__
    return None
