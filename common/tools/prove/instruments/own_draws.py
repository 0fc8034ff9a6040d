"""Records that the loop draws random numbers from a generator that it passes to torch.

The observer of a run compares the states of the generators of torch, NumPy and Python. It does not
know a `torch.Generator` that the loop makes itself, such as one that each update seeds. An
operation that draws from such a generator gets it as an argument, which a `TorchDispatchMode` sees.

It writes an `OwnDraw` for each such operation, once for each update. A compiled recipe would run
uncompiled under the mode, so it is not observed.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from common.data.loader import Loader
from common.data.samples import Batch
from common.run import Run
from common.tools.prove.observation.session import Session
from common.tools.prove.records.instrument_records import OwnDraw


def install(session: Session) -> None:
    """Install the instrument. The probe calls this before the recipe runs."""
    observer = DrawObserver(session)
    session.wrap(Run, "batches", observer.around_batches)
    session.wrap(Run, "record", observer.around_record)


class DrawObserver:
    """Observes the loop's body, up to `run.record`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.is_in_micro_batch = False  # whether the loop is using a batch
        self.written: set[tuple[int, str]] = set()  # updates and operations

    def around_batches(
        self, original: Callable[[Run, Loader], Iterator[Batch]], run: Run, loader: Loader
    ) -> Iterator[Batch]:
        """Yield batches; between two of them, the loop's body runs under the mode."""
        if run.config.compile:
            yield from original(run, loader)
            return
        for batch in original(run, loader):
            self.is_in_micro_batch = True
            try:
                with Draws(self):
                    yield batch
            finally:
                self.is_in_micro_batch = False

    def around_record(
        self, original: Callable[..., None], run: Run, *positional: object, **named: object
    ) -> None:
        """Record a micro-batch. The code after it does not use the batch."""
        self.is_in_micro_batch = False
        original(run, *positional, **named)

    def note_draw(self, operation: str) -> None:
        """Write an operation that draws, unless an evaluation draws."""
        draw = (self.session.step, operation)
        if not self.is_in_micro_batch or self.session.phase is not None or draw in self.written:
            return
        self.written.add(draw)
        self.session.write(OwnDraw(step=self.session.step, operation=operation))


class Draws(TorchDispatchMode):
    """Observes the operations that get a random generator.

    It does not look into operations that call functions, such as `flex_attention` and `torch.cond`.
    """

    # Without this, torch refuses to run operations that call functions.
    supports_higher_order_operators = True

    def __init__(self, observer: DrawObserver) -> None:
        super().__init__()
        self.observer = observer

    def __torch_dispatch__(
        self,
        operation: OpOverload | HigherOrderOperator,
        types: object,
        arguments: tuple[Any, ...] = (),
        named: dict[str, Any] | None = None,
    ) -> object:
        """Note an operation that draws from a generator of the loop, and run it."""
        named = named or {}
        # Operations without a generator draw from those whose states are compared, or not at all:
        # attention without dropout has the tag, too.
        if (
            isinstance(operation, OpOverload)
            and torch.Tag.nondeterministic_seeded in operation.tags
            and has_generator(arguments, named)
        ):
            self.observer.note_draw(operation.overloadpacket.__name__)
        return operation(*arguments, **named)


def has_generator(arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether an operation's arguments have a random generator."""
    return any(isinstance(value, torch.Generator) for value in (*arguments, *named.values()))
