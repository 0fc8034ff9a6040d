"""Finishes a run after its last update: final figures, the exported model, the summary."""

from collections.abc import Mapping

from common.checkpoints import export
from common.console import say
from common.console.display import DISPLAY
from common.lifecycle import training_figures
from common.lifecycle.evaluations import Evaluations
from common.lifecycle.saving import compare_weights_of_ranks
from common.lifecycle.stages import Context, StartedRun
from common.measure.memory_plan import MemoryRows
from common.measure.value_checks import Metrics
from common.metric_names import (
    COMPILE_SECONDS,
    EXPORTED_STEP,
    GOODPUT,
    TOTAL_SECONDS,
    TRAINING_SECONDS,
)
from common.objective import PREFIXES
from common.ranks.agreement import wait_for_ranks
from common.run_directory.model_records import ModelFacts
from common.run_directory.records import MEMORY, MODEL_FOLDER, SUMMARY, PartMemory, Summary
from common.track import report
from common.track.card import model_card


def finish(started: StartedRun, evaluations: Evaluations, figures: Metrics) -> None:
    """Log the final evaluation, export the model that it evaluated, and show the summary.

    Args:
        figures: the figures of the final evaluation.

    Raises:
        TrainingError: a rank could not write its checkpoint, or the weights differ between ranks;
            nothing is exported then. Or the final evaluation misses `--target`; the model has been
            exported by then.
        UserError: the run's directory no longer belongs to this run, or the model to export is not
            the one that `run.load_best` was given.
    """
    context = started.context
    step = context.progress.global_step
    evaluations.networks.require_best_last()
    split = started.loaded.test_split
    was_trained = not context.config.evaluate_only
    end_training(started)
    # The final evaluation used the last weights, unless `load_best` loaded earlier ones.
    exported_step = step if evaluations.exported_step is None else evaluations.exported_step
    model_position = started.plan.position_figures(exported_step)
    final_figures = evaluations.log_final(figures, split, model_position)
    DISPLAY.show_activity("finishing")
    context.logs.write_row()
    memory = started.memory_plan.finish() if was_trained else []
    summary = summarize(context, final_figures, exported_step)
    # Unless the model is sharded, this is the last time that the ranks meet. So no rank waits in a
    # collective, which could time out, while rank 0 writes the model.
    wait_for_ranks(context.accelerator)
    if was_trained:
        export_model(started, evaluations, exported_step, summary)
    context.directory.write(SUMMARY, Summary.model_validate(summary).to_json())
    write_memory(context, memory)
    send_results(started, figures, memory)
    commands = context.logs.finish(summary)
    path = context.directory.path
    report.show_summary(started.saved_config, summary, split, path, commands, memory)
    idle_sentence = context.meters.idle_sentence()
    if idle_sentence:
        say(idle_sentence)
    final_value = final_figures[f"{PREFIXES[split]}/{context.objective.metric}"]
    context.objective.require_target(final_value, context.config.target, was_trained=was_trained)
    context.directory.write_status("finished", step)


def end_training(started: StartedRun) -> None:
    """Stop the clock, wait for the last checkpoint, log the last updates, and compare the weights.

    Raises:
        TrainingError: a rank could not write its checkpoint, or the weights differ between ranks.
        UserError: the run's directory no longer belongs to this run.
    """
    context = started.context
    stopwatch = context.meters.stopwatch
    stopwatch.stop()
    context.directory.require_ownership()
    context.checkpoints.wait()
    context.decisions.check(context.progress.global_step)
    # Early stopping, for example, may end the loop between two log lines.
    if stopwatch.has_unlogged_updates:
        training_figures.log_interval(started)
    if not context.config.evaluate_only:
        compare_weights_of_ranks(context)


def summarize(
    context: Context, final_figures: Mapping[str, float], exported_step: int
) -> dict[str, float]:
    """Return the figures for `summary.json`, which is not written yet.

    Args:
        exported_step: the update after which the model had the weights that are exported.
    """
    summary = {**context.logs.pending_row.latest, **final_figures}
    if not context.config.evaluate_only:
        summary |= context.meters.whole_run_figures()
    summary[GOODPUT] = context.meters.goodput()
    summary[EXPORTED_STEP] = exported_step
    if context.best.value is not None:
        summary[context.objective.best_key] = context.best.value
    if context.config.compile:
        summary[COMPILE_SECONDS] = context.meters.compile_time.seconds
    summary[TRAINING_SECONDS] = context.meters.stopwatch.training_seconds
    summary[TOTAL_SECONDS] = context.progress.seconds
    return summary


def export_model(
    started: StartedRun,
    evaluations: Evaluations,
    exported_step: int,
    summary: Mapping[str, float],
) -> None:
    """Write `model/`: rank 0 alone, or all ranks together if the model is sharded.

    Args:
        exported_step: the update after which the model had the weights that are exported.
        summary: the figures for the model card.
    """
    context = started.context
    accelerator = context.accelerator
    is_sharded = accelerator.mesh is not None
    if not is_sharded and not accelerator.is_main_process:
        return
    model = evaluations.model_to_export(started.kept)
    structure = accelerator.structure_of(model)
    facts = ModelFacts(
        recipe=context.recipe,
        class_name=type(structure).__name__,
        update=exported_step,
        run_id=context.directory.run_id,
    )
    description = {**facts.to_json(), **started.description}
    loaded = started.loaded
    card = model_card(
        context.config, started.saved_config, description, loaded.data, loaded.test_split, summary
    )
    skeleton = structure if is_sharded else None  # gives names and shapes; see `save_model`
    export.save_model(context.directory.path / MODEL_FOLDER, model, description, card, skeleton)
    if is_sharded:
        wait_for_ranks(accelerator)


def write_memory(context: Context, memory: MemoryRows) -> None:
    """Write `memory.json`: the planned and the measured memory of each part, in MiB.

    An evaluation without training has no such file.
    """
    if not memory:
        return
    entries = {
        part: PartMemory(planned_mib=planned, measured_mib=measured).to_json()
        for part, planned, measured in memory
    }
    context.directory.write(MEMORY, entries)


def send_results(started: StartedRun, figures: Metrics, memory: MemoryRows) -> None:
    """Send the tracker what the final evaluation has besides figures, and the memory of each part.

    A classifier's evaluation has its misclassified samples, for example. With `--log-model`, send
    the model that this run has trained as well.
    """
    config = started.context.config
    logs = started.context.logs
    loaded = started.loaded
    split = loaded.test_split
    loader = loaded.loaders[split]
    logs.send_to_tracker(
        lambda tracker: tracker.log_results(figures, PREFIXES[split], loader, loaded.data, memory)
    )
    if config.log_model and not config.evaluate_only:
        model_folder = started.context.directory.path / MODEL_FOLDER
        logs.send_to_tracker(lambda tracker: tracker.log_model(model_folder))
