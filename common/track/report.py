"""What a run says at its beginning, at an evaluation and at its end."""

from pathlib import Path

from rich.table import Column, Table

from common.console import CONSOLE, say
from common.machine import is_main_rank
from common.measure.memory import peak_memory
from common.measure.memory_plan import MemoryRows, comparison_text, plan_text
from common.objective import PREFIXES, Objective
from common.platforms import limits
from common.printable import printable
from common.records import RunConfig
from common.track.names import METRICS, RATE, STEP, Facts, describe, precision_name

OF_THE_RUN = (
    *("time/total_seconds", "time/train_seconds", "time/compile_seconds"),
    *("perf/samples_per_second", "perf/tokens_per_second"),
)


def show_plan(run: RunConfig, logs: str) -> None:
    """Print what will run, on what, and why; `logs` says where the metrics go."""
    data = run.data
    environment = run.environment
    world_size = environment.world_size
    sizes = ", ".join(f"{split} {size:,}" for split, size in data.sizes.items())
    classes = "" if data.classes is None else f"; {data.classes} classes"
    processes = "1 process" if world_size == 1 else f"{world_size} processes"
    model = run.architecture
    say(f"recipe  {run.recipe}: {model.name}, {model.parameters:,} parameters")
    say(f"data    {data.name} ({data.reason}): {sizes}{classes}")
    for note in data.notes:
        say(f"        {note}")
    precision = precision_name(environment.mixed_precision)
    say(f"device  {environment.device}; {processes}; {precision}")
    missing = limits()
    if missing is not None:
        say(f"system  {missing}")
    if not run.config["evaluate_only"]:
        for line in training_lines(run):
            say(line)
    say(f"logs    {logs}")


def training_lines(run: RunConfig) -> list[str]:
    """Return the lines on the batch, the learning rate, the length and the memory of a run."""
    flags = run.config
    plan = run.plan
    max_steps = flags["max_steps"]
    cut = f", cut at {max_steps:,}" if max_steps else ""
    lines = [
        f"batch   {flags['batch_size']} × {flags['gradient_accumulation_steps']} accumulated × "
        f"{run.environment.world_size} processes = {run.environment.effective_batch_size}",
        *rate_lines(run),
        f"plan    {plan.total_steps:,} updates: {flags['epochs']} epochs of "
        f"{plan.updates_per_epoch:,}{cut}; logged every {plan.log_every:,}, evaluated every "
        f"{plan.eval_every:,}",
    ]
    if run.memory_plan is not None:
        lines.append(f"memory  {plan_text(run.memory_plan)}")
    return lines


def rate_lines(run: RunConfig) -> list[str]:
    """Return the line on how the learning rate follows the effective batch size.

    With several processes and an unscaled rate, the line says so. It is left out where neither
    holds, and where the recipe sets rates of its own.
    """
    plan = run.plan
    world_size = run.environment.world_size
    scaling = run.config["scale_learning_rate"]
    if scaling != "no":
        peak = plan.peak_learning_rate
        if peak is None:
            return []
        rate = f"{peak / plan.rate_scale:g} × {plan.rate_scale:.4g} = {peak:g}"
        warmup = f"after {plan.warmup_steps:,} updates of warm-up"
        return [f"rate    {rate} ({scaling} in the update's samples), {warmup}"]
    if world_size == 1 or run.config["effective_batch_size"] is not None:
        return []
    batch_size_of_rank = run.environment.effective_batch_size // world_size
    return [
        f"        {world_size} times that of one process, at the same learning rate: "
        f"--effective-batch-size {batch_size_of_rank} keeps the update, "
        "--scale-learning-rate the rate in proportion"
    ]


def figure(name: str, value: float) -> str:
    metric = describe(name)
    return f"{metric.label} {metric.text(value)}"


def interval_text(row: Facts) -> str:
    # What is learned: the loss and the recipe's own metrics, not the rates or the norm.
    learned = [
        figure(name, value)
        for name, value in row.items()
        if name.startswith("train/") and name not in METRICS and not name.startswith(f"{RATE}/")
    ]
    speed = row.get("perf/samples_per_second")
    rate = "profiling" if speed is None else f"{speed:,.0f} samples/s"
    return "  ".join([*learned, rate, f"{peak_memory(row):,.0f} MiB"])


def evaluation_text(values: Facts, split: str, position: Facts) -> str:
    figures = [figure(name, value) for name, value in values.items() if name != "count"]
    samples = f" of {values['count']:,.0f}" if "count" in values else ""
    where = f"epoch {position['progress/epoch']:.2f}  step {position[STEP]:.0f}"
    return f"{where}  {split}{samples}: {'  '.join(figures)}"  # not wider than 100


def show_summary(
    run: RunConfig,
    summary: Facts,
    split: str,
    folder: Path,
    commands: list[str],
    memory: MemoryRows,
) -> None:
    """Print the table that ends a run; `split` is what the final evaluation read."""
    table = Table(
        *("", Column(overflow="fold")),  # a path is cut nowhere
        title=printable(run.recipe),
        title_justify="left",
        show_header=False,
    )
    objective, prefix = Objective.parse(run.objective), f"{PREFIXES[split]}/"
    own = [n for n in summary if n.startswith(prefix) and n != f"{prefix}count"]
    shown = dict.fromkeys([prefix + objective.metric, objective.best_key, *own], f", {split}")
    final_value = summary.get(prefix + objective.metric)
    if split == "validation" and final_value == summary.get(objective.best_key):
        del shown[objective.best_key]  # the final figure and the best one are the same
    else:
        shown[objective.best_key] = ", validation"
    shown |= dict.fromkeys(OF_THE_RUN, "")
    for name, on in shown.items():
        if name in summary:
            heading = printable(describe(name).heading + on)
            table.add_row(heading, describe(name).text(summary[name]))
    kept, last = (f"{summary[name]:,.0f}" for name in ("progress/kept_step", STEP))
    table.add_row("model", f"of update {kept}" + ("" if kept == last else f", the best of {last}"))
    if "perf/samples_per_second" in summary:
        table.add_row("peak memory", f"{peak_memory(summary):,.0f} MiB")
    if memory:
        table.add_row("planned → taken", f"MiB: {comparison_text(memory)}")
    table.add_row("files", printable(str(folder)))
    if is_main_rank():
        CONSOLE.print(table, markup=False)
    for command in commands:
        say(f"{'upload' if ' sync ' in command else 'view':8}{command}")
