"""The first stage of a run: its Accelerator, its directory, and the parts that need no data."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from common.checkpoints.adapters import RandomState
from common.checkpoints.state import Parts
from common.checkpoints.store import Checkpoints
from common.config import TrainingConfig
from common.errors import UserError
from common.failures.outcomes import outcome_of
from common.flags import check_limits, flag_values_of
from common.lifecycle.crossed_shapes import refuse_crossed_shapes
from common.lifecycle.resolution import ConfigResolution
from common.lifecycle.stages import Context
from common.measure.meters import Meters
from common.objective import Objective
from common.run_directory.directory import RunDirectory
from common.run_directory.provenance import ProvenanceWriter
from common.run_directory.recipe_source import RecipeSource
from common.run_directory.records import CHECKPOINTS_FOLDER
from common.run_directory.status import write_refusal
from common.run_directory.taking import take_run_directory
from common.track.log import Log
from common.training.accelerator import build_accelerator
from common.training.evaluation.best import Best
from common.training.gradients.guard import GradientGuard
from common.training.progress import Progress
from common.training.rank_decisions import RankDecisions
from common.training.sharding.accelerator import ShardingAccelerator
from common.training.stop_request import StopRequest


def set_up(
    config: TrainingConfig,
    recipe_file: Path,
    objective: str,
    ddp: Mapping[str, object] | None,
    is_embedded: bool,
) -> Context:
    """Build the Accelerator, take the run directory, and make the parts that need no data.

    Args:
        is_embedded: whether another program called the recipe: see `launch.notebook.is_embedded`.

    Raises:
        UserError: a flag, the objective or an option of DDP can't work, or the directory can't be
            used.
        SystemExit: with status 0, if the run to resume is finished.
    """
    resolution = ConfigResolution(config)
    if is_embedded:
        resolution.settle(flag_values_of(config))
    progress = Progress()
    source = RecipeSource(recipe_file)
    with noting_refusal(config):
        if is_embedded:
            check_limits(config)
        parsed_objective = Objective.parse(objective)
        accelerator = build_accelerator(config, ddp)
        # Rank 0 waits at most this long for the directory. Other ranks wait longer for rank 0.
        timeout = config.collective_timeout / 2
        directory = take_run_directory(config, recipe_file.stem, timeout)
    checkpoints = make_checkpoints(config, accelerator, directory)
    refuse_crossed_shapes()
    # `--evaluate-only` saves nothing, so a signal may end it at once.
    request = StopRequest(acts_on_signals=not config.evaluate_only)
    return Context(
        flag_resolution=resolution,
        recipe_file=recipe_file,
        source=source,
        objective=parsed_objective,
        accelerator=accelerator,
        directory=directory,
        provenance=ProvenanceWriter(directory.path, recipe_file),
        checkpoints=checkpoints,
        decisions=RankDecisions(
            accelerator,
            directory.path,
            find_failure=lambda: checkpoints.failure,
            request=request,
        ),
        parts=Parts(accelerator.process_index, accelerator.mesh),
        random=RandomState(accelerator.device),
        guard=GradientGuard(accelerator, config.max_grad_norm, config.log_gradients),
        meters=Meters(accelerator, config.gradient_accumulation_steps),
        logs=Log(accelerator, directory.path),
        progress=progress,
        best=Best(parsed_objective, config.keep == "best"),
    )


@contextmanager
def noting_refusal(config: TrainingConfig) -> Iterator[None]:
    """Note a mistake that ends the command in the block, in the status of the run to resume.

    Otherwise a supervisor would repeat the command forever.
    """
    try:
        yield
    except UserError as error:
        write_refusal(config.output_dir, outcome_of(error), is_resumed=config.resume is not None)
        raise


def make_checkpoints(
    config: TrainingConfig, accelerator: ShardingAccelerator, directory: RunDirectory
) -> Checkpoints:
    """Return the store of the run's checkpoints."""
    return Checkpoints(
        folder=directory.path / CHECKPOINTS_FOLDER,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        checkpoints_to_keep=config.keep_checkpoints,
        timeout=config.collective_timeout,
        device=accelerator.device,
        run_id=directory.run_id,
        require_ownership=directory.require_ownership,
    )
