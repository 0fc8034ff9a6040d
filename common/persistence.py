"""A run's whole state: into a checkpoint, and back."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast_object_list, set_seed

from common import checkpoint, state
from common.console import say
from common.errors import UserError

if TYPE_CHECKING:
    from common.run import Run

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


def rank_file(rank: int) -> str:
    """Return the name of the file that holds what differs between ranks."""
    return f"rank-{rank}.safetensors"


def save_run(run: Run) -> None:
    """Copy the state of this rank, and let it be written in the background.

    Raises:
        TrainingError: when an update before it was not finite: resumed, it would only end again.
    """
    run.guard.check(run.global_step)
    accelerator = run.accelerator
    mine = {
        **state.random_state(run.device),
        **state.buffer_tensors(run.unwrapped),
        **run.meters.state(),
        **run.guard.state(),
    }
    files = {rank_file(accelerator.process_index): mine}
    facts: dict[str, Any] = {}
    if accelerator.is_main_process:
        tensors, rest = state.optimizer_tensors(run.optimizer.optimizer)
        files |= {MODEL: dict(run.unwrapped.named_parameters()), OPTIMIZER: tensors}
        facts = describe(run) | {
            "optimizer": rest,
            "scheduler": plain(run.scheduler.state_dict()),
            "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
            "logbook": run.logbook.state(),
            "elapsed_seconds": time.perf_counter() - run.began,
            "began_at": run.meters.began_at,
        }
    run.checkpoints.save(run.global_step, files, facts)


def describe(run: Run) -> dict[str, Any]:
    """Return what a person, or another world size, must know of a checkpoint."""
    config = run.config
    return {
        "recipe": run.recipe,
        "model": run.description["name"],
        "global_step": run.global_step,
        "epoch": run.global_step // run.plan.updates_per_epoch,
        "owes_evaluation": run.owes_evaluation,
        "global_sample_index": run.global_step
        % run.plan.updates_per_epoch
        * run.plan.samples_per_update,
        "effective_batch_size": run.plan.samples_per_update,
        "batch_size": config.batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "world_size": run.accelerator.num_processes,
        "seed": config.seed,
        "wandb_run_id": run.facts["wandb_run_id"],
        "versions": run.facts["environment"]["versions"],
    }


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what JSON has no word for, such as a schedule's function."""
    kinds = (int, float, str, bool, list, type(None))
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, kinds) and not (isinstance(value, list) and any(map(callable, value)))
    }


def restore_run(run: Run) -> None:
    """Put the run back to its newest checkpoint that is whole, if there is one.

    Rank 0 chooses and tells the others. A damaged checkpoint is named and passed over. Random
    generators are restored by `restore_random_state`, as the last thing before the loop.

    Raises:
        UserError: when the checkpoint is of another model.
    """
    chosen: list[Any] = [None]
    if run.accelerator.is_main_process:
        checkpoint.remove_unfinished(run.checkpoints.folder)
        newest = Path(run.config.resume or "")
        named = newest.name if newest.name.startswith("step-") else None
        path, problems = checkpoint.newest_whole(run.checkpoints.folder, named)
        for problem in problems:
            say(f"checkpoint passed over: {problem}")
        say(f"resuming {path or f'{run.directory.path} from its start: no whole checkpoint'}")
        checkpoint.supersede(run.checkpoints.folder, path)
        chosen = [path]
    broadcast_object_list(chosen)
    path = chosen[0]
    if path is None:
        return
    manifest = checkpoint.read_manifest(path)
    if (manifest["recipe"], manifest["model"]) != (run.recipe, run.description["name"]):
        raise UserError(
            f"{path} is of {manifest['recipe']}, {manifest['model']}, and this is {run.recipe}, "
            f"{run.description['name']}"
        )
    weights = checkpoint.read_tensors(path, MODEL)
    with torch.no_grad():
        for name, parameter in run.unwrapped.named_parameters():
            if name not in weights or weights[name].shape != parameter.shape:
                raise UserError(f"{path} is of another model: its {name} does not fit")
            parameter.copy_(weights[name])
    state.load_optimizer(
        run.optimizer.optimizer, checkpoint.read_tensors(path, OPTIMIZER), manifest["optimizer"]
    )
    run.scheduler.load_state_dict(manifest["scheduler"])
    if run.accelerator.scaler is not None:
        run.accelerator.scaler.load_state_dict(manifest["scaler"])
    restore_rank(run, path, manifest["world_size"])
    run.global_step = run.checkpoints.last_step = manifest["global_step"]
    run.owes_evaluation = manifest.get("owes_evaluation", False)
    run.logbook.load_state(manifest["logbook"])
    run.meters.began_at = manifest["began_at"]
    run.began = time.perf_counter() - manifest["elapsed_seconds"]


def restore_rank(run: Run, path: Path, world_size: int) -> None:
    """Put back what differs between ranks; on another world size, what can be told apart."""
    rank = run.accelerator.process_index
    same = world_size == run.accelerator.num_processes
    mine = checkpoint.read_tensors(path, rank_file(rank if same else 0))
    state.load_buffers(run.unwrapped, mine)
    run.guard.load_state(mine)
    if same:
        run.meters.load_state(mine)
        run.random_state = mine
    elif rank == 0:
        names = (rank_file(old_rank) for old_rank in range(world_size))
        run.meters.sums.load_state([checkpoint.read_tensors(path, name) for name in names])


def restore_random_state(run: Run) -> None:
    """Let each rank draw its own dropout: from the seed, or on from where a checkpoint was."""
    rank = run.accelerator.process_index
    set_seed((run.config.seed + run.global_step + rank) % 2**32)
    if run.random_state is not None:
        state.load_random_state(run.random_state, run.device)
        run.random_state = None
