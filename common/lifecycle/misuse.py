"""Errors and notes on calls of `Run` that a recipe left out or made with a wrong argument."""

from collections.abc import Mapping
from pathlib import Path

from torch.optim.lr_scheduler import ReduceLROnPlateau

from common.console import say
from common.data.dataset import Data
from common.data.loader import Loader
from common.data.order import TrainingOrder
from common.errors import UserError
from common.system.platforms.commands import quoted


def require_data(data: object) -> None:
    """Raise a `UserError` unless a recipe passes its splits to `run.loaders` as a `Data`."""
    if not isinstance(data, Data):
        raise UserError(
            f"run.loaders got a value of type {type(data).__name__} instead of a Data",
            advice='call run.loaders(Data("NAME", {"train": ..., "validation": ...}))',
        )


def training_order_of(loader: object, call: str) -> TrainingOrder:
    """Return a loader's order, which must be one for training.

    Args:
        call: the recipe's call that takes this loader.

    Raises:
        UserError: the loader is one for evaluations, or none of the run's.
    """
    if not isinstance(loader, Loader):
        raise UserError(
            f"{call.partition('(')[0]} got a value of type {type(loader).__name__} instead of a "
            "loader of the run",
            advice=(
                f"call {call}, with the first of the loaders that run.loaders(data) returns; to "
                "draw samples unevenly, let __getitem__ of the data set choose the row"
            ),
        )
    if not isinstance(loader.order, TrainingOrder):
        raise UserError(
            "the recipe trains on a loader for evaluations",
            advice=f"call {call}, with the first of the loaders that run.loaders(data) returns",
        )
    return loader.order


def refuse_rehearsed_steps(steps_before: Mapping[ReduceLROnPlateau, int]) -> None:
    """Raise a `UserError` if a scheduler has made a step with the figures of a rehearsal.

    Each start of a run rehearses, so a resumed run would make more steps than one that was not
    interrupted.

    Args:
        steps_before: the steps that each scheduler had made before the rehearsal.
    """
    if any(scheduler.last_epoch != steps for scheduler, steps in steps_before.items()):
        raise UserError(
            "a ReduceLROnPlateau made a step with the figures of the rehearsal, which come from a "
            "few samples, and again at each resume",
            advice=(
                "turn the rehearsal off by Run(config, __file__, OBJECTIVE, rehearse=False) (see "
                "docs/make-your-own.md)"
            ),
        )


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


def say_which_is_saved_as_best(count: int) -> None:
    """Tell the user which of several networks is saved as the best; called in the rehearsal.

    The recipe evaluates an average of the weights beside the weights themselves, for example.

    Args:
        count: how many networks were evaluated for one call of `run.log`.
    """
    if count > 1:
        say(
            f"{count} networks are evaluated before run.log(...), and the last one is saved as the "
            "best: evaluate last the network that you pass to run.load_best(...)"
        )


def other_best_model_error() -> UserError:
    """Return the error for `run.load_best(...)` with a network that was not saved as the best."""
    return UserError(
        "run.load_best(...) got another network than the one that was saved as the best",
        advice=(
            "pass run.load_best(...) the network that you evaluate last before run.log(...), or "
            "change the order of the evaluations"
        ),
    )


def other_exported_model_error() -> UserError:
    """Return the error for a final evaluation that ends with another network than the best."""
    return UserError(
        "the network that was evaluated last, which the run exports, is not the one that "
        "run.load_best(...) got",
        advice=(
            "after run.load_best(...), evaluate the network that it got last, and then call "
            "run.finish(...)"
        ),
    )


def nan_warning(metric: str) -> str:
    """Return the warning about an evaluation whose objective is NaN."""
    return (
        f"{metric}, the objective, is NaN, so this evaluation can't be the best: check how the "
        "recipe computes it, for example whether it divides by zero"
    )
