"""What the bench tells the probe of a launch, through one environment variable."""

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from common.tools.prove.observed import Manner

VARIABLE = "ACCELERATE_RECIPES_PROBE"


class PlannedInterruption(BaseModel):
    """Where this launch is interrupted; see `Interruption` of the bench."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    manner: Manner
    step: int
    share: float


class ProbePlan(BaseModel):
    """How one launch is observed, as JSON in the variable `VARIABLE`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    folder: str  # receives the records
    launch: int
    training_samples: int  # of the training split, at most
    evaluation_samples: int  # of each other split, at most
    is_observed: bool = True  # whether the usual observers run
    instruments: tuple[str, ...] = ()  # modules with a function `install(session)`
    interruption: PlannedInterruption | None = None

    def variable(self) -> dict[str, str]:
        """Return the environment variable that passes the plan on."""
        return {VARIABLE: self.model_dump_json()}

    @property
    def path(self) -> Path:
        return Path(self.folder)


def plan_of_this_process() -> ProbePlan:
    """Return the plan that the bench has passed on."""
    return ProbePlan.model_validate_json(os.environ[VARIABLE])
