"""Computes a run's metrics again in float64, from the notes that each rank wrote."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tests.generated.grammar import Case

Record = dict[str, Any]
Violate = Callable[[str, str], None]  # with a symptom, and details

# Tolerances: plain numbers may pass through float32, and another order of a sum changes its last
# bits.
RELATIVE = 3e-6
ABSOLUTE = 3e-7
# Metrics that training logs besides those that the copy records.
OTHERS = {"train/grad_norm", "train/skipped_updates", "train/learning_rate"}


def mean(values: Sequence[float]) -> float:
    """Return the mean, summed without rounding errors."""
    return math.fsum(values) / len(values)


def training_figures(ranks: Iterable[Sequence[Record]], after: int, until: int) -> dict[str, float]:
    """Return the means over all ranks' records of the updates `after` + 1 to `until`."""
    values = defaultdict[str, list[float]](list)
    for records in ranks:
        for record in records:
            if after < record["update"] <= until:
                values["train/loss"] += record["loss"]
                for name, elements in record["metrics"].items():
                    values[f"train/{name}"] += elements
    return {name: mean(elements) for name, elements in values.items() if elements}


def evaluation_figures(
    ranks: Iterable[Sequence[Record]], purpose: str, step: int
) -> dict[str, float]:
    """Return the metrics of one evaluation, from what all ranks added in it."""
    count = 0
    totals = defaultdict[str, list[float]](list)
    losses: list[float] = []
    elements = defaultdict[str, list[float]](list)
    for records in ranks:
        for record in records:
            if (record["purpose"], record["step"]) != (purpose, step):
                continue
            count += record["count"]
            for name, values in record["totals"].items():
                totals[name] += values
            for name, values in record["metrics"].items():
                elements[name] += values
            if record["loss"] is not None:
                losses.append(record["loss"][0] * record["count"])
    figures = {"count": float(count)}
    figures |= {name: math.fsum(values) / count for name, values in totals.items()}
    figures |= {name: mean(values) for name, values in elements.items() if values}
    if losses:
        figures["loss"] = math.fsum(losses) / count
    return figures


def check_figures(
    case: Case,
    records: Callable[[str], list[list[Record]]],
    rows: Sequence[Record],
    summary: Mapping[str, Any],
    violate: Violate,
) -> None:
    """Compare all metrics that a run logged with the notes of its ranks.

    Args:
        records: returns the notes of one event for each rank.
        rows: the rows of `metrics.jsonl`.
        violate: is called for each difference.
    """
    check_training(case, records("record"), rows, summary, violate)
    check_evaluations(case, records("evaluation"), rows, summary, violate)


def check_training(
    case: Case,
    ranks: list[list[Record]],
    rows: Sequence[Record],
    summary: Mapping[str, Any],
    violate: Violate,
) -> None:
    """Compare the rows that training logged, and the loss of the last update in the summary."""
    last = max(record["update"] for record in ranks[0])
    due = [step for step in range(1, last + 1) if step % case.log_every == 0 or step == last]
    logged = {row["progress/global_step"]: row for row in rows if "train/loss" in row}
    if [*logged] != due:
        violate("other log lines than are due", f"logged {[*logged]}, due {due}")
    for before, step in zip([0, *due], due, strict=False):
        expected = training_figures(ranks, before, step)
        names = {name for name in logged[step] if name.startswith("train/")} - OTHERS
        recorded = {name: logged[step][name] for name in names}
        compare(expected, recorded, f"training, updates {before + 1} to {step}", violate)
    loss = training_figures(ranks, last - 1, last)["train/loss"]
    compare({"train/loss": loss}, {"train/loss": summary["train/loss"]}, "the summary", violate)


def check_evaluations(
    case: Case,
    ranks: list[list[Record]],
    rows: Sequence[Record],
    summary: Mapping[str, Any],
    violate: Violate,
) -> None:
    """Compare each evaluation that was logged, and the final one in the summary."""
    validation_prefix = "test/" if case.validation is None else "val/"
    final_prefix = "val/" if case.test is None else "test/"
    every = [record for records in ranks for record in records]
    # At step 0 a run may only rehearse.
    steps = sorted({r["step"] for r in every if r["purpose"] == "validation" and r["step"] > 0})
    name = f"{validation_prefix}loss"
    logged = [row for row in rows if name in row]
    if steps and len(logged) < len(steps):
        violate("evaluations are not logged", f"{len(logged)} rows, evaluated at {steps}")
    for row, step in zip(logged, steps, strict=False):
        if row["progress/global_step"] != step:
            violate("evaluations are logged at other steps", f"{row}\nevaluated at {steps}")
        is_replaced = step == steps[-1] and validation_prefix == final_prefix
        if not is_replaced:  # else the final evaluation wrote into the same row
            expected = evaluation_figures(ranks, "validation", step)
            compare_evaluation(expected, row, validation_prefix, f"evaluation {step}", violate)
    final_steps = {r["step"] for r in every if r["purpose"] == "final"}
    expected = evaluation_figures(ranks, "final", max(final_steps))
    compare_evaluation(expected, summary, final_prefix, "the final evaluation", violate)


def compare_evaluation(
    expected: Mapping[str, float],
    row: Record | Mapping[str, Any],
    prefix: str,
    place: str,
    violate: Violate,
) -> None:
    """Compare an evaluation's metrics with those of a row whose names begin with a prefix."""
    logged = {
        name.removeprefix(prefix): value
        for name, value in row.items()
        if name.startswith(prefix) and not name.startswith(f"{prefix}best_")
    }
    compare(expected, logged, place, violate)


def compare(
    expected: Mapping[str, float], logged: Mapping[str, Any], place: str, violate: Violate
) -> None:
    """Compare metrics by name; both sides must have the same names."""
    if expected.keys() != logged.keys():
        missing = sorted(expected.keys() ^ logged.keys())
        violate("names are missing or too many", f"{place}: {missing}\n{expected}\n{logged}")
    for name in expected.keys() & logged.keys():
        value = expected[name]
        other = logged[name]
        is_number = isinstance(other, (int, float))
        if not is_number or not math.isclose(value, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
            violate("a figure is wrong", f"{place}: {name} is {other}, and {value} was recorded")
