"""What a run says at its beginning, at an evaluation and at its end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from common.console import CONSOLE, peak_memory, say
from common.errors import is_main_rank
from common.memory_plan import MemoryRows, comparison_text, plan_text

PRECISIONS = {"no": "fp32"}


def show_plan(facts: Mapping[str, Any], logs: str) -> None:
    """Print what will run, on what, and why.

    Args:
        facts: what `config.json` holds.
        logs: where the metrics go.
    """
    config, environment, data = facts["config"], facts["environment"], facts["data"]
    model, plan, processes = facts["model"], facts["plan"], facts["environment"]["world_size"]
    sizes = ", ".join(f"{name} {size:,}" for name, size in data["sizes"].items())
    precision = environment["mixed_precision"]
    rows = [
        ("recipe", f"{facts['recipe']}: {model['name']}, {model['parameters']:,} parameters"),
        ("data", f"{data['name']} ({data['reason']}): {sizes}; {data['classes']} classes"),
        *(("", note) for note in data["notes"]),
        (
            "device",
            f"{environment['device']}; {processes} process{'es' if processes > 1 else ''}; "
            + PRECISIONS.get(precision, precision),
        ),
        (
            "batch",
            f"{config['batch_size']} × {config['gradient_accumulation_steps']} accumulated × "
            f"{processes} processes = {environment['effective_batch_size']}",
        ),
        (
            "plan",
            f"{plan['total_steps']:,} updates: {config['epochs']} epochs of "
            f"{plan['updates_per_epoch']:,}"
            + (f", cut at {config['max_steps']:,}" if config["max_steps"] else ""),
        ),
        ("memory", plan_text(facts["memory_plan"])),
        ("logs", logs),
    ]
    for name, text in rows:
        say(f"{name:<6}  {text}")


def show_evaluation(
    values: Mapping[str, float], split: str, step: int, total_steps: int, updates_per_epoch: int
) -> None:
    """Print the figures of an evaluation."""
    figures = [
        f"{name.removeprefix('eval/')} {value:.4f}"
        for name, value in values.items()
        if name != "eval/count"
    ]
    say(
        f"epoch {step / updates_per_epoch:.2f}  step {step}/{total_steps}  "
        f"{split}: {values['eval/count']:,.0f} samples  " + "  ".join(figures)
    )


def show_summary(
    recipe: str,
    summary: Mapping[str, Any],
    split: str,
    directory: Path,
    commands: list[str],
    memory: MemoryRows,
) -> None:
    """Print the table that ends a run.

    Args:
        split: that the final evaluation read.
        commands: to look at what the tracker wrote.
        memory: of each part, planned and measured.
    """
    rows = [("accuracy", f"{summary['eval/accuracy']:.4f} on {split}")]
    if "eval/f1" in summary:
        rows.append(("F1", f"{summary['eval/f1']:.4f}"))
    if "eval/best_accuracy" in summary:
        rows.append(("best accuracy", f"{summary['eval/best_accuracy']:.4f} on validation"))
    seconds = summary["time/total_seconds"]
    time = f"{seconds:.1f} s, {summary['time/train_seconds']:.1f} s in training"
    if "time/compile_seconds" in summary:
        time += f", {summary['time/compile_seconds']:.1f} s of it compiling"
    rows.append(("time", time))
    if "perf/samples_per_second" in summary:
        speed = f"{summary['perf/samples_per_second']:,.0f} samples/s"
        if "perf/tokens_per_second" in summary:
            speed += f", {summary['perf/tokens_per_second']:,.0f} tokens/s"
        rows.append(("throughput", speed))
        rows.append(("peak memory", f"{peak_memory(summary):,.0f} MiB"))
    if memory:
        rows.append(("planned → taken", f"MiB: {comparison_text(memory)}"))
    rows.append(("files", str(directory)))
    rows += [("view" if index == 0 else "", command) for index, command in enumerate(commands)]
    if not is_main_rank():
        return
    table = Table(title=recipe, title_justify="left", show_header=False)
    for row in rows:
        table.add_row(*row)
    CONSOLE.print(table, markup=False)
