"""The messages between `runs.py` and the processes of `rank.py`, one line of JSON each."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class TrainingRequest:
    """A training that all processes of a group are to run."""

    recipe: str
    updates: int  # that count; those before them are not timed
    profile: bool  # whether to measure the shares of communication
    threads: int | None  # of torch in each process; None: torch's default
    settings: dict[str, object]  # further fields of the recipe's `Config`

    def to_line(self) -> str:
        """Return the message as a line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> TrainingRequest:
        """Parse the message from a line of JSON."""
        return cls(**json.loads(line))


@dataclass(frozen=True)
class TrainingAnswer:
    """What one process measured."""

    seconds: float  # of an update
    parameters: list[int]  # elements of each parameter, in the order of the model
    shares: dict[str, float]  # see `shares_of_communication`; empty unless profiled

    def to_line(self) -> str:
        """Return the message as a line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> TrainingAnswer:
        """Parse the message from a line of JSON."""
        return cls(**json.loads(line))
