"""Refuses to train on while a parameter that was unfrozen is in no optimizer."""

from weakref import WeakKeyDictionary

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from common.errors import UserError
from common.training.gradients.skipped_steps import parameters_of


class UnfreezingWatch:
    """Refuses parameters that were unfrozen while no optimizer updates them."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        # The ids of each network's parameters that had gradients in the last update.
        self.trained_ids: WeakKeyDictionary[nn.Module, list[int]] = WeakKeyDictionary()
        # The ids of each network's parameters that were frozen at the first update.
        self.ids_frozen_at_first: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()

    def check(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        parameters: list[nn.Parameter],
        trained: list[nn.Parameter],
    ) -> None:
        """Raise a `UserError` if a parameter was unfrozen that no optimizer updates.

        Each update calls this method. It looks at the optimizers only if the parameters with
        gradients differ from those of the last update.

        Args:
            parameters: all parameters of `model`.
            trained: those of them that have gradients now.
        """
        trained_ids = [*map(id, trained)]
        if model not in self.trained_ids:
            self.ids_frozen_at_first[model] = {
                id(parameter) for parameter in parameters if not parameter.requires_grad
            }
        elif trained_ids != self.trained_ids[model]:
            unfrozen_ids = self.ids_frozen_at_first[model].intersection(trained_ids)
            self.require_optimizer(model, optimizer, unfrozen_ids)
        self.trained_ids[model] = trained_ids

    def require_optimizer(
        self, model: nn.Module, optimizer: Optimizer, unfrozen_ids: set[int]
    ) -> None:
        """Raise a `UserError` if an unfrozen parameter is in no optimizer.

        Args:
            optimizer: the one whose gradients are clipped now. The Accelerator may not have
                prepared it.
            unfrozen_ids: the ids of those parameters of `model` that have been unfrozen.
        """
        updated_ids: set[int] = set()
        for known_optimizer in [*self.accelerator._optimizers, optimizer]:
            updated_ids.update(map(id, parameters_of(known_optimizer)))
        not_updated_ids = unfrozen_ids - updated_ids
        for name, parameter in model.named_parameters():
            if id(parameter) in not_updated_ids:
                raise UserError(
                    (
                        f"{name.removeprefix('module.')} was unfrozen, but no prepared optimizer "
                        "has it, so it would not be trained"
                    ),
                    advice=(
                        "create the optimizer before you freeze layers, or add the parameters that "
                        "you unfreeze later with optimizer.add_param_group({'params': ...}) before "
                        "accelerator.prepare"
                    ),
                )
