"""Measures the time that a run spends compiling models, including its earlier attempts."""

import sys


class CompileTime:
    """The seconds that this rank has spent compiling, over all attempts of the run."""

    def __init__(self) -> None:
        self.earlier_seconds = 0.0  # of the attempts before this one

    @property
    def seconds(self) -> float:
        return self.earlier_seconds + compile_seconds_of_process()

    def state_dict(self) -> dict[str, float]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.earlier_seconds = state["seconds"]


def compile_seconds_of_process() -> float:
    """Return the seconds that this process has spent compiling models so far."""
    # If torch has not imported this module, it has compiled nothing.
    utils = sys.modules.get("torch._dynamo.utils")
    return utils.calculate_time_spent()["total_wall_time"] if utils else 0.0
