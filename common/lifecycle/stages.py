"""What a run has at each of its stages, so that types say what exists by then.

1. `Context`: from `Run(...)` on.
2. `LoadedData`: from `run.loaders(data)` on.
3. `Plan` of `common.training.plan`: from `run.make_plan(...)` on.
4. `KeptParts`: from `run.keep(...)` on.
5. `PlannedRun`: within `run.start(...)`, before a checkpoint is restored, with all of the above.
6. `StartedRun`: from `run.start(...)` on, with all of the above and `config.json`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import nn
from torch.optim import Optimizer

from common.checkpoints.adapters import RandomState
from common.checkpoints.state import Parts
from common.checkpoints.store import Checkpoints
from common.config import TrainingConfig
from common.data.dataset import Data
from common.data.loader import Loader
from common.errors import UserError
from common.lifecycle.resolution import ConfigResolution
from common.measure.memory_plan import MemoryPlan
from common.measure.meters import Meters
from common.objective import Objective, Split
from common.profile.profiler import Profiler
from common.run_directory.directory import RunDirectory
from common.run_directory.provenance import ProvenanceWriter
from common.run_directory.recipe_source import RecipeSource
from common.run_directory.records import DataFacts, Environment, RunConfig
from common.track.log import Log
from common.training.evaluation.best import Best
from common.training.evaluation.early_stopping import EarlyStopping
from common.training.gradients.guard import GradientGuard
from common.training.plan import Plan
from common.training.progress import Progress
from common.training.rank_decisions import RankDecisions
from common.training.sharding.accelerator import ShardingAccelerator

Stage = TypeVar("Stage")


@dataclass(frozen=True)
class Context:
    """What a run has from its first moment on."""

    flag_resolution: ConfigResolution
    recipe_file: Path
    source: RecipeSource
    objective: Objective
    accelerator: ShardingAccelerator
    directory: RunDirectory
    provenance: ProvenanceWriter
    checkpoints: Checkpoints
    decisions: RankDecisions
    parts: Parts
    random: RandomState
    guard: GradientGuard
    meters: Meters
    logs: Log
    progress: Progress
    best: Best

    @property
    def config(self) -> TrainingConfig:
        return self.flag_resolution.config

    @property
    def recipe(self) -> str:
        return self.recipe_file.stem


@dataclass(frozen=True)
class LoadedData:
    """The data of a run, and a loader for each split."""

    data: Data
    loaders: Mapping[str, Loader]  # by split
    validation_split: Split  # "test" if there is no validation split
    test_split: Split  # "validation" if there is no test split
    early_stopping: EarlyStopping  # decides by evaluations of the validation split


@dataclass(frozen=True)
class KeptParts:
    """What the recipe keeps in checkpoints."""

    model: nn.Module  # as Accelerate prepared it
    optimizer: Optimizer  # as Accelerate prepared it
    bare_model: nn.Module
    optimizers: Mapping[str, Optimizer]  # by the names that `run.keep` was given


@dataclass(frozen=True)
class PlannedRun:
    """What a run has when all flags are resolved, before it restores a checkpoint."""

    context: Context
    loaded: LoadedData
    plan: Plan
    kept: KeptParts
    description: Mapping[str, object]  # the recipe's description of the model
    memory_plan: MemoryPlan
    profiler: Profiler
    # A resume compares these two with the data and the environment of its checkpoint.
    data_facts: DataFacts
    environment: Environment


@dataclass(frozen=True)
class StartedRun(PlannedRun):
    """A run that has restored its checkpoint and written `config.json`, ready for its loop."""

    saved_config: RunConfig  # the contents of `config.json`
    # Checksums of the model's weights that `--init-from` replaced, as `checksums_of_matrices`
    # returns them.
    replaced_weights: frozenset[int]


@dataclass
class Stages:
    """The stages after `Context`. A stage is None until the run reaches it."""

    loaded: LoadedData | None = None
    plan: Plan | None = None
    kept: KeptParts | None = None
    started: StartedRun | None = None


def reached(stage: Stage | None, call: str) -> Stage:
    """Return a stage that a run has reached.

    Args:
        call: the recipe's call that reaches this stage.

    Raises:
        UserError: the recipe has not made this call yet.
    """
    if stage is None:
        raise UserError(
            f"the recipe uses what {call} prepares, but has not called it yet",
            advice=f"call {call} earlier in the recipe",
        )
    return stage
