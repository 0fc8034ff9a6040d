"""The state of one part of a checkpoint: what it may hold, and how it is restored."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from common.checkpoints.adapters import MODEL_ADVICE, RandomState
from common.checkpoints.pack import pack
from common.checkpoints.shards import is_sharded
from common.errors import MisfitError, UserError
from common.failures.sentences import as_user_error

# If the state of a class in these packages does not fit, the user gets a sentence instead of a
# traceback. Errors in a recipe's own classes keep their traceback.
LIBRARY_PACKAGES = ("common.", "torch.", "accelerate.")
ADVICE_ON_STATES = (
    "a state may have tensors, NumPy arrays, numbers, texts and None, in dicts, lists and tuples"
)


class Stateful(Protocol):
    """A part of a run that a checkpoint can save, such as an optimizer or a counter.

    Each class of parts has a type of its own for its state.
    """

    def state_dict(self) -> object: ...

    def load_state_dict(self, state: Any, /) -> object: ...  # takes what `state_dict` returned


@runtime_checkable
class LoadsFromRanks(Protocol):
    """A part that decides itself how to go on with another number of ranks: see `Parts.add`."""

    def state_dict(self) -> object: ...

    def load_from_ranks(self, states: list[Any], /) -> object: ...  # one state for each rank


def require_savable_state(name: str, part: object) -> None:
    """Raise a `UserError` unless a part has a state that a checkpoint can hold."""
    methods = ("state_dict", "load_state_dict")
    missing = [method for method in methods if not callable(getattr(part, method, None))]
    description = f"of type {type(part).__name__}"
    if isinstance(part, type):
        missing = [*methods]
        description = f"that is the class {part.__name__} and no object of it"
    if missing:
        raise UserError(
            f"run.keep(...) got a part {name!r} {description}, which lacks {' and '.join(missing)}",
            advice=f"pass an object with these two methods: {ADVICE_ON_STATES}",
        )
    state = part.state_dict()  # type: ignore[attr-defined]
    try:
        pack({name: state})
    except TypeError as error:
        raise UserError(
            f"run.keep(...) got a part {name!r} whose state does not fit into a checkpoint "
            f"({error})",
            advice=f"let state_dict convert the value: {ADVICE_ON_STATES}",
        ) from None


def restoring(path: Path, name: str) -> AbstractContextManager[None]:
    """Return a context that turns any error while a state is restored into a `UserError`.

    torch or another library may raise any class of error for a state that was edited, or is of
    another model or optimizer. (`reading` in `common.failures.sentences` is for files that can't be
    read, and has another message.)

    Args:
        path: the checkpoint, for the message.
        name: the part's name, or other words for the state that is restored.
    """
    problem = (
        f"{path} was written by another model, recipe or version of this library, because its "
        f"{name} does not fit"
    )
    return as_user_error(Exception, problem, MODEL_ADVICE, most_characters=150)


def load(part: Stateful, state: object, path: Path, name: str) -> None:
    """Restore a part from its state in the checkpoint at `path`.

    Errors that a recipe's own class raises keep their traceback, because it shows the user where
    their code fails. Other errors become a `UserError`.
    """
    if is_of_recipe(part):
        part.load_state_dict(state)
        return
    with restoring(path, name):
        check_state(part, state)
        part.load_state_dict(state)


def load_from_ranks(part: LoadsFromRanks, states: list[object], path: Path, name: str) -> None:
    """Restore a part from its states on all ranks of the checkpoint; see `load`.

    The checkpoint has another number of ranks than this run.
    """
    if is_of_recipe(part):
        part.load_from_ranks(states)
        return
    with restoring(path, name):
        for state in states:
            check_state(part, state)
        part.load_from_ranks(states)


def is_of_recipe(part: object) -> bool:
    """Whether a part's class is a recipe's own, and is not a module."""
    is_from_library = type(part).__module__.startswith(LIBRARY_PACKAGES)
    return not isinstance(part, nn.Module) and not is_from_library


def check_state(part: Stateful | LoadsFromRanks, state: object) -> None:
    """Raise a `MisfitError` if a value in `state` has another type than in the part's own state.

    Many `load_state_dict` methods accept any value. Without this check, the error would only appear
    during training.
    """
    if not isinstance(part, RandomState):  # torch, NumPy and Python check the states of generators
        check_types(state, part.state_dict())


def check_types(saved: object, current: object) -> None:
    """Raise a `MisfitError` if a saved value has another type than the value that it replaces.

    Containers are compared item by item; items that only one side has are not compared. A number
    may be replaced by another type of number or by a tensor, and a sharded tensor by any tensor.
    None and bools may be replaced by anything.
    """
    if isinstance(current, dict) and isinstance(saved, dict):
        for key in current.keys() & saved.keys():
            check_types(saved[key], current[key])
    elif isinstance(current, (list, tuple)) and isinstance(saved, (list, tuple)):
        for saved_item, current_item in zip(saved, current, strict=False):
            check_types(saved_item, current_item)
    elif current is not None and not isinstance(current, bool):
        expected: type | tuple[type, ...] = type(current)
        if isinstance(current, (int, float)):
            expected = (int, float, torch.Tensor)
        elif is_sharded(current):
            expected = torch.Tensor
        if not isinstance(saved, expected):
            raise MisfitError(f"{saved!r:.50} instead of {current!r:.50}")
