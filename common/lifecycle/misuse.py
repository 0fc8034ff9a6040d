"""Errors for calls of `Run` that a recipe has left out or made with a wrong argument."""

from collections.abc import Mapping
from pathlib import Path

from common.data.loader import Loader
from common.data.order import TrainingOrder
from common.errors import UserError
from common.system.platforms import quoted


def training_order_of(loader: Loader, call: str) -> TrainingOrder:
    """Return a loader's order, which must be one for training.

    Args:
        call: the recipe's call that takes this loader.

    Raises:
        UserError: the loader is one for evaluations.
    """
    if not isinstance(loader.order, TrainingOrder):
        raise UserError(
            "the recipe trains on a loader for evaluations",
            advice=f"call {call}, with the first of the loaders that run.loaders(data) returns",
        )
    return loader.order


def require_name(description: Mapping[str, object]) -> None:
    """Raise a `UserError` if the description that `run.start` got has no name of the model.

    `config.json`, checkpoints, the model card and comparisons of runs show this name.
    """
    if "name" not in description:
        raise UserError(
            "the description that run.start(...) got has no 'name' of the model",
            advice="pass a dict such as {'name': 'MLP', 'arguments': {...}}",
        )


def no_update_error() -> UserError:
    """Return the error for a loop that never records a micro-batch, and so would never end."""
    return UserError(
        "a whole epoch made no update, because the loop does not call run.record",
        advice="call run.record(loss, metrics) after each micro-batch",
    )


def unfinished_error(directory: Path) -> UserError:
    """Return the error for a recipe that ends its run without finishing it."""
    return UserError(
        "the recipe did not call run.finish, so there is no final evaluation and no exported model",
        advice="call run.finish(evaluate(run, model, test_loader)) after the loop, then continue "
        f"with --resume {quoted(directory)}",
    )
