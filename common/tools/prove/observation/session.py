"""The state that the observer and the instruments share in an observed process."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

from common.data.loader import Loader
from common.run import Run
from common.tools.prove.records.base import ObservedRecord, Phase, line_of


@dataclass
class Session:
    """The observation of one launch on one rank.

    `RunObserver` calls `in_evaluation` and the methods that begin with `begin`, `end` and `note`.
    The instruments read the attributes.

    An instrument is a module with a function `install(session)`, which the probe calls before the
    recipe runs. It wraps functions with `wrap`, and writes an `InstrumentRecord` with `write`.
    """

    folder: Path  # the folder of the observed run
    launch: int  # the number of the launch, from 0
    rank: int
    run: Run | None = None  # the recipe's run, once it exists
    phase: Phase | None = None  # the phase of the current evaluation; None outside of one
    micro_batch: int = 0  # the number of the current micro-batch within its update
    sample_indices: list[int] = field(default_factory=list)  # those of that micro-batch
    file: BinaryIO | None = None  # the file of records, once it is open

    def begin_run(self, run: Run) -> None:
        """Note the run that the recipe has created."""
        self.run = run

    def begin_batches(self) -> None:
        """Note that the loop is about to take the first micro-batch of an update."""
        self.micro_batch = 0

    def end_micro_batch(self, *, is_update: bool) -> None:
        """Note that the loop has recorded the current micro-batch.

        Args:
            is_update: whether an update was made, so that the next micro-batch begins another one.
        """
        self.micro_batch = 0 if is_update else self.micro_batch + 1

    def note_samples(self, sample_indices: list[int]) -> None:
        """Note the sample indices of the micro-batch that the loop is about to get."""
        self.sample_indices = sample_indices

    @contextmanager
    def in_evaluation(self, phase: Phase) -> Iterator[None]:
        """Note the phase of an evaluation during the block; evaluations may be nested."""
        outer_phase = self.phase
        self.phase = phase
        try:
            yield
        finally:
            self.phase = outer_phase

    @property
    def step(self) -> int:
        """The number of updates so far; 0 before the recipe has created its run."""
        return 0 if self.run is None else self.run.progress.global_step

    @property
    def has_started(self) -> bool:
        """Whether the recipe has called `run.start`."""
        return self.run is not None and self.run.stages.started is not None

    @property
    def evaluation_phase(self) -> Phase:
        """The phase of the current evaluation.

        It is "validation" outside of `run.evaluating`, where a recipe may evaluate as well.
        """
        return self.phase or "validation"

    def split_of(self, loader: Loader) -> str:
        """Return the split of one of the run's loaders; empty for the recipe's own loaders."""
        assert self.run is not None
        for split, loader_of_split in self.run.all_loaders.items():
            if loader_of_split is loader:
                return split
        return ""

    def write(self, record: ObservedRecord) -> None:
        """Write a record at once, so that a kill does not lose it."""
        if self.file is None:
            path = self.folder / f"launch-{self.launch}-rank-{self.rank}.jsonl"
            self.file = path.open("ab", buffering=0)
        self.file.write(line_of(record))

    def wrap(self, owner: type | ModuleType, name: str, wrapper: Callable[..., object]) -> None:
        """Replace the function `name` of a class or module.

        Args:
            wrapper: the new function. It gets the original function and then its arguments.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*positional: object, **named: object) -> object:
            return wrapper(original, *positional, **named)

        setattr(owner, name, wrapped)
