"""How far a run has come, and how long it took: the part `progress` of a checkpoint.

The progress bar is in `common.console.display`.
"""

import time
from dataclasses import dataclass, field
from typing import TypedDict

from common.errors import MisfitError


class ProgressState(TypedDict):
    """The progress in a checkpoint."""

    global_step: int
    seconds: float  # time of all attempts so far


@dataclass
class Progress:
    """The number of updates that a run has made, and the seconds that it has taken."""

    global_step: int = 0  # number of updates made
    began: float = field(default_factory=time.perf_counter)  # the beginning of this attempt
    earlier_seconds: float = 0.0  # the time of the attempts before this one

    @property
    def seconds(self) -> float:
        """The seconds that all attempts of the run have taken so far.

        The time between attempts does not count; in `RunClock`, which goodput uses, it does.
        """
        return self.earlier_seconds + time.perf_counter() - self.began

    def advance(self) -> int:
        """Count an update, and return the number of updates made."""
        self.global_step += 1
        return self.global_step

    def state_dict(self) -> ProgressState:
        return {"global_step": self.global_step, "seconds": self.seconds}

    def load_state_dict(self, state: ProgressState) -> None:
        """Restore the result of `state_dict`; a `MisfitError` if it has no number of updates."""
        if type(state["global_step"]) is not int or state["global_step"] < 0:
            raise MisfitError(f"{state['global_step']!r:.50} is not a number of updates")
        self.global_step = state["global_step"]
        self.earlier_seconds = state["seconds"]
