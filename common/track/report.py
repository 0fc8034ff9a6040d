"""What a run says at its beginning, at an evaluation and at its end."""

from pathlib import Path

from rich.table import Column, Table

from common.console import CONSOLE, say
from common.machine import is_main_rank
from common.measure.memory import peak_memory
from common.measure.memory_plan import MemoryRows, comparison_text, plan_text
from common.objective import PREFIXES, Objective
from common.platforms import limits
from common.track.names import METRICS, RATE, STEP, Facts, describe, precision_name

OF_THE_RUN = (
    *("time/total_seconds", "time/train_seconds", "time/compile_seconds"),
    *("perf/samples_per_second", "perf/tokens_per_second"),
)


def show_plan(facts: Facts, logs: str) -> None:
    """Print what will run, on what, and why; `logs`: where the metrics go."""
    config, environment, data = facts["config"], facts["environment"], facts["data"]
    model, plan, processes = facts["architecture"], facts["plan"], environment["world_size"]
    sizes = ", ".join(f"{name} {size:,}" for name, size in data["sizes"].items())
    classes = f"; {data['classes']} classes" if "classes" in data else ""
    precision = environment["mixed_precision"]
    count = f"{processes} process{'es' if processes > 1 else ''}"
    lacking = limits()
    cut = f", cut at {config['max_steps']:,}" if config["max_steps"] else ""
    training = (
        f"batch   {config['batch_size']} × {config['gradient_accumulation_steps']} accumulated × "
        f"{processes} processes = {environment['effective_batch_size']}",
        *rate_lines(config, environment, plan),
        f"plan    {plan['total_steps']:,} updates: {config['epochs']} epochs of "
        f"{plan['updates_per_epoch']:,}{cut}; logged every {plan['log_every']:,}, evaluated every "
        f"{plan['eval_every']:,}",
        f"memory  {plan_text(facts['memory_plan'])}",
    )
    for line in (
        f"recipe  {facts['recipe']}: {model['name']}, {model['parameters']:,} parameters",
        f"data    {data['name']} ({data['reason']}): {sizes}{classes}",
        *(f"        {note}" for note in data["notes"]),
        f"device  {environment['device']}; {count}; {precision_name(precision)}",
        *(() if lacking is None else (f"system  {lacking}",)),
        *(() if config["evaluate_only"] else training),
        f"logs    {logs}",
    ):
        say(line)


def rate_lines(config: Facts, environment: Facts, plan: Facts) -> list[str]:
    """Say how the rate follows the update, or that it does not where processes made it larger."""
    asked, scale = config["scale_learning_rate"], plan["rate_scale"]
    processes, update = environment["world_size"], environment["effective_batch_size"]
    if asked != "no":
        peak = plan["peak_learning_rate"]
        if peak is None:  # the recipe has rates of its own, to which no scale is applied
            return []
        rate = f"{peak / scale:g} × {scale:.4g} = {peak:g}"
        warmup = f"after {plan['warmup_steps']:,} updates of warm-up"
        return [f"rate    {rate} ({asked} in the update's samples), {warmup}"]
    if processes == 1 or config["effective_batch_size"] is not None:
        return []
    advice = f"--effective-batch-size {update // processes} keeps the update"
    return [
        f"        {processes} times that of one process, at the same learning rate: {advice}, "
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
    facts: Facts, summary: Facts, split: str, folder: Path, commands: list[str], memory: MemoryRows
) -> None:
    """Print the table that ends a run; `split` is what the final evaluation read."""
    table = Table(
        *("", Column(overflow="fold")),  # a path is cut nowhere
        title=facts["recipe"],
        title_justify="left",
        show_header=False,
    )
    objective, prefix = Objective.parse(facts["objective"]), f"{PREFIXES[split]}/"
    own = [n for n in summary if n.startswith(prefix) and n != f"{prefix}count"]
    shown = dict.fromkeys([prefix + objective.metric, objective.best_key, *own], f", {split}")
    shown |= {objective.best_key: ", validation"} | dict.fromkeys(OF_THE_RUN, "")
    for name, on in shown.items():
        if name in summary:
            table.add_row(describe(name).heading + on, describe(name).text(summary[name]))
    kept, last = (f"{summary[name]:,.0f}" for name in ("progress/kept_step", STEP))
    table.add_row("model", f"of update {kept}" + ("" if kept == last else f", the best of {last}"))
    if "perf/samples_per_second" in summary:
        table.add_row("peak memory", f"{peak_memory(summary):,.0f} MiB")
    if memory:
        table.add_row("planned → taken", f"MiB: {comparison_text(memory)}")
    table.add_row("files", str(folder))
    if is_main_rank():
        CONSOLE.print(table, markup=False)
    for command in commands:
        say(f"{'upload' if ' sync ' in command else 'view':8}{command}")
