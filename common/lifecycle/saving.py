"""Saves a run's checkpoints, and restores the newest one when the run is resumed."""

from pathlib import Path

from common.checkpoints.adapters import State
from common.checkpoints.newest import restore_newest
from common.config import TrainingConfig
from common.console import say
from common.console.display import DISPLAY
from common.lifecycle.stages import Context, PlannedRun, StartedRun
from common.ranks.agreement import do_on_each_rank
from common.run_directory.records import CONFIG, RunIdentity
from common.run_directory.saved_flags import fixed_flags
from common.storage.json_files import json_safe
from common.system.wording import counted
from common.training.evaluation.best import Best
from common.training.plan import Plan
from common.training.unequal_weights import networks_of, require_equal_weights

# A resume resolves these flags again, so a checkpoint does not fix them.
RESOLVED_AGAIN = ("init_from", "mixed_precision")


def is_due(context: Context, plan: Plan) -> bool:
    """Whether a checkpoint is due, by the plan or because of a request to stop.

    None is due between the micro-batches of an update.
    """
    if not context.accelerator.sync_gradients:
        return False
    decisions = context.decisions
    is_planned = plan.saves(context.progress.global_step, decisions.is_checkpoint_old)
    return decisions.stopping or is_planned


def save(started: StartedRun) -> None:
    """Save a checkpoint: copy the state now, and write it in the background.

    A second save at the same step does nothing. All ranks call this function.

    Raises:
        TrainingError: an update had non-finite gradients, or the weights differ between ranks.
    """
    context = started.context
    step = context.progress.global_step
    activity = "saving, then stopping" if context.decisions.stopping else "saving"
    with DISPLAY.showing_activity(activity), context.meters.stopwatch.stopped():
        # End the run now if a non-finite update was skipped: a checkpoint from after that update
        # would be of no use, because a resume from it would end in the same way.
        context.guard.check(step)
        compare_weights_of_ranks(context)
        context.parts.compare_over_ranks(context.accelerator)
        context.checkpoints.save(step, context.parts.collect(), run_identity(started))
        context.decisions.note_checkpoint()


def save_and_leave(started: StartedRun) -> None:
    """Save a checkpoint, and raise `Preempted` once all ranks have written it."""
    context = started.context
    save(started)
    context.meters.stopwatch.stop()
    context.checkpoints.wait()
    context.decisions.stop(context.progress.global_step)


def compare_weights_of_ranks(context: Context) -> None:
    """Raise a `TrainingError` if the weights differ between ranks; called on all ranks.

    Unless the model is sharded, rank 0 alone saves it. Other weights on other ranks would be lost.
    """
    require_equal_weights(context.accelerator, networks_of(context.parts.shared))


def run_identity(planned: PlannedRun) -> RunIdentity:
    """Return the identity of this run at the current update.

    A checkpoint's manifest has it, and a resume compares the manifest with its own identity.
    """
    context = planned.context
    plan = planned.plan
    step = context.progress.global_step
    updates_in_epoch = step % plan.updates_per_epoch
    environment = planned.environment
    class_names = planned.loaded.data.class_names
    values = {
        "run_id": context.directory.run_id,
        "recipe": context.recipe,
        "model": str(planned.description["name"]),
        "objective": str(context.objective),
        "flags": flags_of_manifest(context.config),
        "parts_described": context.parts.parts_described,
        "global_step": step,
        "global_sample_index": updates_in_epoch * plan.samples_per_update,
        "data": planned.data_facts.to_json() | {"class_names": class_names},
        "effective_batch_size": environment.effective_batch_size,
        "world_size": environment.world_size,
        "mixed_precision": environment.mixed_precision,
        "versions": environment.versions,
    }
    return RunIdentity.model_validate(json_safe(values))


def flags_of_manifest(config: TrainingConfig) -> dict[str, object]:
    """Return the flags that a resume can't change, except those that it resolves again."""
    fixed = fixed_flags(type(config), vars(config))
    return {name: value for name, value in fixed.items() if name not in RESOLVED_AGAIN}


def restore(planned: PlannedRun, resume_path: Path) -> State | None:
    """Restore the newest whole checkpoint of a run.

    `--resume` may also name a checkpoint of the run. Then only checkpoints up to this one are
    considered, and newer ones are set aside: see `choose_and_clean_up`.

    Args:
        resume_path: the value of `--resume`.

    Returns:
        The random states to restore as the last step of the start. None if no checkpoint is whole,
        or if the number of processes has changed.

    Raises:
        UserError: the checkpoint does not fit this run; or `--resume` names a checkpoint, and it
            and all earlier ones are damaged.
    """
    context = planned.context
    last_checkpoint = named_checkpoint(resume_path)
    # Wait for all ranks here. A single rank may fail, because each reads its own files, and it
    # writes the failure to `status.json`. Without the wait, `record_start` on rank 0 could
    # overwrite that.
    restored = do_on_each_rank(
        context.accelerator,
        lambda: restore_newest(
            context.checkpoints, last_checkpoint, context.parts, run_identity(planned)
        ),
    )
    if restored is None:
        return None
    context.decisions.note_checkpoint()
    if restored.has_lost_best:
        forget_lost_best(context)
    context.best.require_best_model(context.checkpoints.lasting_receipts, context.directory.path)
    world_size_before = len(restored.manifest.of_ranks)
    if world_size_before != context.accelerator.num_processes:
        say_other_world_size(context, world_size_before)
        return None
    # The random generators were restored with the other parts, but the rest of the start may draw
    # from them. So the caller restores these states once more at the end.
    return context.random.state_dict()


def forget_lost_best(context: Context) -> None:
    """Reset the search for the best model to its state before the first evaluation.

    A resume calls this if the file of the best model is damaged. The best model is then chosen
    among later ones.
    """
    best = context.best
    no_best = Best(context.objective, best.is_kept)
    best.load_state_dict(no_best.state_dict())


def say_other_world_size(context: Context, world_size_before: int) -> None:
    """Say on rank 0 that a run continues with another number of processes."""
    accumulation = context.config.gradient_accumulation_steps
    processes = counted(context.accelerator.num_processes, "process", "processes")
    batches = counted(accumulation, "batch", "batches")
    say(
        f"the run continues with {processes} instead of {world_size_before}; each update still "
        f"has the same samples, with {batches} accumulated"
    )


def named_checkpoint(resume_path: Path) -> str | None:
    """Return the name of the checkpoint that `--resume` names; None if it names the run itself.

    A run's own directory may have any name, even that of a checkpoint.
    """
    is_run = (resume_path / CONFIG).is_file()
    is_checkpoint = resume_path.name.startswith("step-") and not is_run
    return resume_path.name if is_checkpoint else None
