"""The texts that a run prints: its plan, progress and evaluation lines, and a table at the end.

The progress bar, and the limit on the number of progress lines, are in `common.console.display`.
"""

from collections.abc import Mapping
from pathlib import Path

from common.console import say
from common.measure.memory import peak_memory
from common.measure.memory_plan import MemoryRows, comparison_text, plan_text
from common.metric_names import (
    COMPILE_SECONDS,
    EPOCH,
    EXPORTED_STEP,
    LEARNING_RATE,
    STEP,
    THROUGHPUT,
    TOKEN_THROUGHPUT,
    TOTAL_SECONDS,
    TRAINING_SECONDS,
)
from common.objective import PREFIXES, Objective, Split
from common.output.tables import print_facts
from common.run_directory.init_from import describe_local_weights
from common.run_directory.records import RunConfig
from common.system.launch_variables import is_main_rank
from common.system.platforms.messages import system_limits
from common.system.wording import counted
from common.track.names import METRICS, metric_named, precision_name
from common.track.trackers.tracker import Command

# The metrics of the whole run, and not of one split, that have rows in the final table.
WHOLE_RUN_METRICS = (
    TOTAL_SECONDS,
    TRAINING_SECONDS,
    COMPILE_SECONDS,
    THROUGHPUT,
    TOKEN_THROUGHPUT,
)


def show_plan(run_config: RunConfig, logs: str) -> None:
    """Print the model, the data, the device and the length of a run before it begins.

    Args:
        run_config: the contents of `config.json`.
        logs: where the metrics go, such as "W&B online (...), and metrics.jsonl".
    """
    data = run_config.data
    environment = run_config.environment
    world_size = environment.world_size
    sizes = ", ".join(f"{split} {size:,}" for split, size in data.sizes.items())
    classes = "" if data.classes is None else f"; {data.classes} classes"
    processes = counted(world_size, "process", "processes")
    model = run_config.architecture
    say(f"recipe  {run_config.recipe}: {model.name}, {model.parameters:,} parameters")
    is_trained = not run_config.flags["evaluate_only"]
    if not is_trained:
        say(f"model   {evaluated_model_text(run_config)}")
    say(f"data    {data.name} ({data.reason}): {sizes}{classes}")
    for note in data.notes:
        say(f"        {note}")
    precision = precision_name(environment.mixed_precision)
    say(f"device  {environment.device}; {processes}; {precision}")
    limits = system_limits()
    if limits is not None:
        say(f"system  {limits}")
    if is_trained:
        for line in training_lines(run_config):
            say(line)
    say(f"logs    {logs}")


def evaluated_model_text(run_config: RunConfig) -> str:
    """Return the name and the update of the model that a run only evaluates."""
    name = str(run_config.flags["init_from"])
    origin = describe_local_weights(name)
    return f"{name}, {origin}" if origin else name


def training_lines(run_config: RunConfig) -> list[str]:
    """Return the printed lines on a run's batch, learning rate, length and memory plan."""
    flags = run_config.flags
    plan = run_config.plan
    epochs = flags["epochs"]
    assert isinstance(epochs, int)  # `run.make_plan` has settled it
    is_cut = plan.total_steps < epochs * plan.updates_per_epoch  # by --max-steps
    limit = f", cut at {plan.total_steps:,}" if is_cut else ""
    lines = [
        f"batch   {flags['batch_size']} × {flags['gradient_accumulation_steps']} accumulated × "
        f"{counted(run_config.environment.world_size, 'process', 'processes')} = "
        f"{run_config.environment.effective_batch_size}",
        *scaled_rate_lines(run_config),
        *batch_advice_lines(run_config),
        f"plan    {plan.total_steps:,} updates: {counted(epochs, 'epoch')} of "
        f"{plan.updates_per_epoch:,}{limit}; logged every {plan.log_every:,}, evaluated every "
        f"{plan.eval_every:,}",
    ]
    if run_config.memory_plan is not None:
        lines.append(f"memory  {plan_text(run_config.memory_plan)}")
    return lines


def scaled_rate_lines(run_config: RunConfig) -> list[str]:
    """Return the line that shows how the learning rate was scaled.

    There is none if the rate was not scaled, or if the recipe sets its own rates.
    """
    plan = run_config.plan
    peak = plan.peak_learning_rate
    scaling = run_config.flags["scale_learning_rate"]
    if scaling == "no" or peak is None:
        return []
    rate = f"{peak / plan.rate_scale:g} × {plan.rate_scale:.4g} = {peak:g}"
    warmup = f"after {plan.warmup_steps:,} updates of warm-up"
    return [f"rate    {rate} ({scaling} in the update's samples), {warmup}"]


def batch_advice_lines(run_config: RunConfig) -> list[str]:
    """Return the line with advice if several processes make the batch larger at the same rate.

    There is none for one process, with `--effective-batch-size` or with a scaled learning rate.
    """
    world_size = run_config.environment.world_size
    if world_size == 1:
        return []
    is_rate_scaled = run_config.flags["scale_learning_rate"] != "no"
    is_batch_kept = run_config.flags["effective_batch_size"] is not None
    if is_rate_scaled or is_batch_kept:
        return []
    batch_size_of_rank = run_config.environment.effective_batch_size // world_size
    return [
        f"        this is {world_size} times the batch of one process, at the same learning rate: "
        f"pass --effective-batch-size {batch_size_of_rank} to keep the batch, or "
        "--scale-learning-rate linear to scale the rate"
    ]


def labelled(name: str, value: float) -> str:
    """Return a metric's label and value, such as "loss 0.1234"."""
    metric = metric_named(name)
    return f"{metric.label} {metric.text(value)}"


def is_training_metric(name: str) -> bool:
    """Whether a metric is the training loss, or one that the recipe recorded.

    The others under ``train/`` are the learning rates, and those listed in `METRICS` with this
    prefix, such as the gradient norm.
    """
    is_rate_of_group = name.startswith(f"{LEARNING_RATE}/")
    return name.startswith("train/") and name not in METRICS and not is_rate_of_group


def progress_line_text(row: Mapping[str, float]) -> str:
    """Return the progress line of a log interval: loss, the recipe's metrics, speed, memory.

    The learning rates and the gradient norm are only in the logs.
    """
    training_metrics = [
        labelled(name, value) for name, value in row.items() if is_training_metric(name)
    ]
    samples_per_second = row.get(THROUGHPUT)
    # An interval in which every update was profiled has no throughput.
    speed = "profiling" if samples_per_second is None else f"{samples_per_second:,.0f} samples/s"
    memory = f"{peak_memory(row):,.0f} MiB"
    return "  ".join([*training_metrics, speed, memory])


def evaluation_text(
    values: Mapping[str, float], split: Split, model_position: Mapping[str, float] | None
) -> str:
    """Return the printed line of an evaluation: the model's position, the samples and the metrics.

    Args:
        values: metrics by name, without the split's prefix.
        split: "validation" or "test".
        model_position: the ``progress/`` metrics of the model that was evaluated; None if the run
            did not train it.
    """
    metrics = [labelled(name, value) for name, value in values.items() if name != "count"]
    samples = f" of {values['count']:,.0f}" if "count" in values else ""
    text = f"{split}{samples}: {'  '.join(metrics)}"
    if model_position is None:
        return text
    return f"epoch {model_position[EPOCH]:.2f}  step {model_position[STEP]:.0f}  {text}"


def show_summary(
    run_config: RunConfig,
    summary: Mapping[str, float],
    split: Split,
    folder: Path,
    commands: list[Command],
    memory: MemoryRows,
) -> None:
    """Print the table of results at the end of a run, and how to view or upload the run.

    Args:
        run_config: the contents of `config.json`.
        summary: the contents of `summary.json`.
        split: the split of the final evaluation, "validation" or "test".
        folder: the run directory.
        commands: how the user can view or upload the tracked run.
        memory: the planned and measured MiB of each part; empty if nothing was planned.
    """
    rows = []
    suffixes = metric_suffixes(Objective.parse(run_config.objective), summary, split)
    for name, suffix in suffixes.items():
        if name in summary:
            metric = metric_named(name)
            rows.append([metric.heading + suffix, metric.text(summary[name])])
    rows.append(["model", model_text(run_config, summary)])
    rows += memory_rows(run_config.environment.world_size, summary, memory)
    rows.append(["files", str(folder)])
    if is_main_rank():
        print_facts(rows, title=run_config.recipe)
    for command in commands:
        say(f"{command.purpose:8}{command.text}")


def memory_rows(
    world_size: int, summary: Mapping[str, float], memory: MemoryRows
) -> list[list[str]]:
    """Return the rows of the final table on memory; see `show_summary` for the arguments.

    The peak is the highest of all processes. The parts are those of rank 0, whose total may be
    lower. With several processes, the rows say so.
    """
    rows = []
    of_process = ", the most of any process" if world_size > 1 else ""
    of_rank = " on rank 0" if world_size > 1 else ""
    if THROUGHPUT in summary:  # a run that only evaluates has no figures of speed and memory
        rows.append(["peak memory", f"{peak_memory(summary):,.0f} MiB{of_process}"])
    if memory:
        rows.append(["planned → taken", f"MiB{of_rank}: {comparison_text(memory)}"])
    return rows


def model_text(run_config: RunConfig, summary: Mapping[str, float]) -> str:
    """Return which model the final figures are from, for the final table."""
    if run_config.flags["evaluate_only"]:
        return evaluated_model_text(run_config)
    exported_step = f"{summary[EXPORTED_STEP]:,.0f}"
    last_step = f"{summary[STEP]:,.0f}"
    best = "" if exported_step == last_step else f", the best of {last_step}"
    return f"of update {exported_step}{best}"


def metric_suffixes(
    objective: Objective, summary: Mapping[str, float], split: Split
) -> dict[str, str]:
    """Return the metrics of the final table, in its order, each with a suffix for its heading.

    The suffix names the split that the metric was measured on, such as ", test"; it is empty for a
    metric of the whole run. A metric that `summary` lacks gets no row in the table.
    """
    prefix = f"{PREFIXES[split]}/"
    final_key = prefix + objective.metric
    best_key = objective.best_key
    suffixes = {final_key: f", {split}"}  # the objective comes first
    repeats_final = split == "validation" and summary.get(final_key) == summary.get(best_key)
    if not repeats_final:
        suffixes[best_key] = ", validation"  # the best model is always chosen on validation data
    for name in summary:
        if name.startswith(prefix) and name not in (f"{prefix}count", best_key):
            suffixes[name] = f", {split}"
    for name in WHOLE_RUN_METRICS:
        suffixes[name] = ""
    return suffixes
