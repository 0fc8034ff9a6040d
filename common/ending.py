"""How a run ends: with its figures, on request, or by a failure; `status.json` says which."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from common import console, report
from common.checkpoint import step_folders
from common.compilation import compile_seconds
from common.directory import json_safe
from common.errors import UserError, let_main_rank_exit_first
from common.export import save_model
from common.failures import (
    Preempted,
    TrainingError,
    is_lost_process,
    is_out_of_memory,
    out_of_memory_advice,
)
from common.memory import memory_used
from common.wandb_media import attach_results
from common.workers import kill_workers

if TYPE_CHECKING:
    from common.run import Run


def finish(run: Run, evaluation: dict[str, float]) -> None:
    """Save the model, write `summary.json`, show the summary, and check the target.

    Args:
        evaluation: the final evaluation of the model as it is now.

    Raises:
        TrainingError: when the accuracy is below `--target-accuracy`.
    """
    config, directory = run.config, run.directory
    run.checkpoints.wait()
    run.agreement.check(run.global_step)
    if run.validation_split == run.test_split:
        run.log(evaluation)
    else:
        run.show_evaluation(evaluation, run.test_split)
    run.logbook.flush()
    run.logbook.close_display()
    memory = [] if config.evaluate_only else run.memory_plan.finish()
    summary = summarize(run, evaluation)
    run.agreement.end_collectives()
    if run.accelerator.is_main_process and not config.evaluate_only:
        export(run)
    directory.write("summary.json", json_safe(summary))
    if memory:
        named = {p: {"planned_mib": plan, "measured_mib": taken} for p, plan, taken in memory}
        directory.write("memory.json", named)
    attach_results(run, evaluation, memory)
    run.tracking.finish(summary)
    commands = run.tracking.commands
    report.show_summary(run.recipe, summary, run.test_split, directory.path, commands, memory)
    accuracy, target = evaluation["eval/accuracy"], config.target_accuracy
    if target is not None and accuracy < target:
        raise TrainingError(
            f"the final accuracy {accuracy:.4f} is below --target-accuracy {target}"
        )
    directory.write_status("finished", run.global_step)


def summarize(run: Run, evaluation: Mapping[str, float]) -> dict[str, Any]:
    """Return the run's figures under the metrics' names."""
    summary = {**run.logbook.latest, **evaluation}
    if not run.config.evaluate_only:
        summary |= run.meters.whole_run()
    if run.logbook.best_accuracy is not None:
        summary["eval/best_accuracy"] = run.logbook.best_accuracy
    summary["perf/goodput"] = run.meters.goodput()
    if run.config.compile:
        summary["time/compile_seconds"] = compile_seconds()
    summary["time/train_seconds"] = run.meters.stopwatch.train_seconds
    summary["time/total_seconds"] = time.perf_counter() - run.began
    return summary


def export(run: Run) -> None:
    """Write `model/`: the weights, and what is needed to use them."""
    folder = run.directory.path / "model"
    facts = {"recipe": run.recipe, "class_names": run.data.class_names}
    save_model(folder, run.unwrapped, facts | run.description)
    if hasattr(run.data, "tokenizer_folder"):
        shutil.copytree(run.data.tokenizer_folder, folder, dirs_exist_ok=True)


def close(run: Run, error: BaseException | None) -> None:
    """Say in `status.json` and to the tracker how the run ended, and leave the process group.

    Raises:
        TrainingError: in place of an out-of-memory error, with the command that needs less.
    """
    run.logbook.close_display()
    run.profile.stop()
    if error is not None:
        kill_workers()
    if isinstance(error, Preempted):
        console.say(error.message)
        run.logbook.flush()
        run.tracking.finish(run.logbook.latest)
        run.directory.write_status("preempted", run.global_step, error.message)
    elif error is not None:
        named = f"rank {run.accelerator.process_index}: {type(error).__name__}: {error}"
        reason = error.message if isinstance(error, UserError) else named
        if not isinstance(error, UserError):
            run.checkpoints.hurry()
        first = run.directory.write_failure(run.global_step, reason, is_lost_process(error))
        run.logbook.flush()
        run.tracking.finish(run.logbook.latest, exit_code=1)
        run.directory.remove_if_unused()
        if is_out_of_memory(error) and first:
            peak = console.peak_memory(memory_used(run.device))
            saved = any(step_folders(run.checkpoints.folder))
            resume = str(run.directory.path) if saved else None
            advice = out_of_memory_advice(run.config, resume, peak)
            raise TrainingError(advice, every_rank=True) from None
    if isinstance(error, UserError):
        let_main_rank_exit_first()
    together = error is None or isinstance(error, (UserError, Preempted))
    if torch.distributed.is_initialized() and together:
        torch.distributed.destroy_process_group()
    run.directory.release()
