"""The plan of a launch, which the bench passes to the probe in an environment variable."""

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from common.tools.prove.records.base import Manner

PLAN_VARIABLE = "ACCELERATE_RECIPES_PROBE"


class PlannedInterruption(BaseModel):
    """The point at which a launch is interrupted: the first opportunity after update `step`.

    A save is interrupted in the first save after this update, an evaluation in the first evaluation
    after it.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    manner: Manner
    step: int
    # From 0 to 1: the share of an evaluation's batches, or of a save's operations, that come before
    # the interruption. The manners "update" and "stop" ignore it.
    share: float = 0.5


class ProbePlan(BaseModel):
    """How the probe observes one launch. The variable `PLAN_VARIABLE` holds it as JSON."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    folder: str  # the folder for the records
    launch: int  # the number of the launch, from 0
    training_samples: int  # the most samples of the training split
    evaluation_samples: int  # the most samples of each other split
    evaluation_batch_size: int | None = None  # samples of their batches; None: as in training
    reads_tensors: bool = True  # whether to write the records that read tensors
    instruments: tuple[str, ...] = ()  # modules with a function `install(session)`
    interruption: PlannedInterruption | None = None

    def as_environment(self) -> dict[str, str]:
        """Return the environment variable that holds the plan."""
        return {PLAN_VARIABLE: self.model_dump_json()}

    @property
    def path(self) -> Path:
        return Path(self.folder)


def plan_of_this_process() -> ProbePlan:
    """Return the plan that the bench has passed to this process."""
    return ProbePlan.model_validate_json(os.environ[PLAN_VARIABLE])
