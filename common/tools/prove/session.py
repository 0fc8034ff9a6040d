"""What observers and instruments share inside of an observed process."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from common.data.loader import Loader
from common.run import Run
from common.tools.prove.observation import line_of
from common.tools.prove.observed import Observed, Phase


@dataclass
class Session:
    """The observation of one launch on one rank.

    An instrument is a module with a function `install(session)`, which is called before the recipe
    runs. It wraps functions of `common` by `wrap`, and writes the records of `notes` by `write`.
    """

    folder: Path  # of the observed run
    launch: int
    rank: int
    run: Run | None = None  # the recipe's run, once it exists
    phase: Phase | None = None  # of the evaluation that goes on now
    micro_batch: int = 0  # the number, within its update, of the micro-batch that is in use
    samples: list[int] = field(default_factory=list)  # sample indices of that micro-batch
    file: BinaryIO | None = None

    @property
    def step(self) -> int:
        """The updates made so far; 0 before the recipe has made its run."""
        return 0 if self.run is None else self.run.progress.global_step

    @property
    def has_started(self) -> bool:
        """Whether the recipe has called `run.start`."""
        return self.run is not None and self.run.stages.started is not None

    @property
    def evaluation_phase(self) -> Phase:
        """The phase of the present evaluation; outside of `run.evaluating`, it is a validation."""
        return self.phase or "validation"

    def split_of(self, loader: Loader) -> str:
        """Return the split of one of the run's loaders; empty for a loader of the recipe's own."""
        assert self.run is not None
        for split, other in self.run.all_loaders.items():
            if other is loader:
                return split
        return ""

    def write(self, record: Observed) -> None:
        """Write a record at once, so that a kill does not lose it."""
        if self.file is None:
            path = self.folder / f"launch-{self.launch}-rank-{self.rank}.jsonl"
            self.file = path.open("ab", buffering=0)
        self.file.write(line_of(record))

    def wrap(self, owner: type | ModuleType, name: str, wrapper: Callable[..., Any]) -> None:
        """Put a function in place of the attribute `name` of a class or module.

        Args:
            wrapper: is called with the original function, and then with the original's arguments.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*positional: Any, **named: Any) -> Any:
            return wrapper(original, *positional, **named)

        setattr(owner, name, wrapped)
