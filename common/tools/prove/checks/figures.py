"""Checks logged figures: losses, metrics, samples and speed, computed again from the batches."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from statistics import fmean, median

from pydantic import JsonValue

from common.objective import PREFIXES
from common.tools.prove.bench import Bench, Cause, Check, Verdict, failed
from common.tools.prove.comparison import run_with_layout, update_layouts
from common.tools.prove.counts import FigureCounts
from common.tools.prove.notes import EvaluationLoss, LogInterval, TrainingLoss, TrainingMode
from common.tools.prove.observation import ObservedEvaluation, ObservedRun, Recorded
from common.tools.prove.outcomes import SplitPass, check_figure, split_passes_of
from common.tools.prove.results import Results
from common.tools.prove.steady import steady_run
from common.tools.prove.training_metrics import wrong_metrics
from common.tools.rows import Row, number_or_none, step_of
from common.track.names import THROUGHPUT

ROWS = 1e-5  # relative tolerance of rows; the run adds up in another order
SMALL_ROWS = 1e-6
FACTORS = 1e-3  # relative tolerance of a factor between two losses
SPEED = 0.1  # relative tolerance of the speed
FIRST_UPDATES = 3  # which the speed leaves out
ADVICE_OF_EVALUATION = (
    "add up over samples, as sums.record(loss, metrics, count) of Sums does, and return "
    "sums.result()"
)
ADVICE_OF_MODE = "evaluate the model that `with run.evaluating(model) as bare_model:` yields"
ADVICE_OF_LOSS = (
    "pass run.record the mean loss of the process's own micro-batch; the run averages it over "
    "micro-batches and processes"
)


def answer(bench: Bench) -> Verdict:
    """Compute the figures of several runs again, and compare them with those that were logged."""
    ways = update_layouts(bench)
    counts = FigureCounts()
    whole = run_with_layout(bench, "whole", ways.whole)
    divided = run_with_layout(bench, "divided", ways.divided)
    distributed = run_with_layout(bench, "two-processes", ways.distributed)
    causes = [*wrong_rows(bench.reference, counts)]
    for run in (divided, distributed):
        causes += training_modes(run)
        causes += wrong_losses(whole, run, counts)
        causes += wrong_metrics(run, counts.metrics)
    causes += wrong_figures(divided, counts)
    causes += wrong_figures(distributed, counts, right_figures(divided))
    causes += wrong_speeds(steady_run(bench), counts)
    return verdict_of(causes, counts)


def verdict_of(causes: Sequence[Cause], counts: FigureCounts) -> Verdict:
    """Return the answer; None if no loss and no metric could be computed again."""
    compared = counts.in_words()
    if causes:
        return failed(compared, causes)
    return Verdict(True if counts.has_outcomes else None, compared)


# The rows of training


def wrong_rows(run: ObservedRun, counts: FigureCounts) -> Iterator[Cause]:
    """Yield a cause for the first row that is not the mean of what the loop recorded."""
    rows = [row for row in Results(run.directory).rows if "train/loss" in row]
    steps = [0, *map(step_of, rows)]
    for (before, step), row in zip(pairwise(steps), rows, strict=True):
        expected = means_between(run, before, step)
        expected["progress/samples"] = float(step * run.started.samples_per_update)
        for name, value in expected.items():
            if name not in row:
                continue
            counts.rows.compared += 1
            logged = number_or_nan(row[name])
            if not is_mean(logged, value):
                yield Cause(
                    f"{name} of update {step} was logged as {logged:.6g}, but the mean of what "
                    f"the loop recorded is {value:.6g}",
                    ADVICE_OF_LOSS,
                )
                return


def number_or_nan(value: JsonValue) -> float:
    """Return a figure that was logged; NaN for null, which stands for NaN and infinities."""
    number = number_or_none(value)
    return math.nan if number is None else number


def is_mean(logged: float, expected: float) -> bool:
    """Whether a logged figure is a mean, within the tolerance; NaN stands for infinities, too."""
    if math.isnan(logged):
        return not math.isfinite(expected)
    return math.isclose(logged, expected, rel_tol=ROWS, abs_tol=SMALL_ROWS)


def means_between(run: ObservedRun, before: int, step: int) -> dict[str, float]:
    """Return the means of what all ranks recorded in the updates `before` + 1 to `step`."""
    losses = []
    totals: defaultdict[str, float] = defaultdict(float)
    elements: defaultdict[str, int] = defaultdict(int)
    for _, record in run.all(Recorded):
        if before <= record.step < step:
            losses.append(record.loss)
            for name, (total, count) in record.metrics.items():
                totals[name] += total
                elements[name] += count
    means = {f"train/{name}": totals[name] / elements[name] for name in totals if elements[name]}
    if losses:
        means["train/loss"] = fmean(losses)
    return means


# The losses that the loop records


def wrong_losses(whole: ObservedRun, run: ObservedRun, counts: FigureCounts) -> Iterator[Cause]:
    """Yield a cause if recorded losses depend on how an update is divided.

    A recipe may record any multiple of the loss that a function of torch computes, such as half of
    a squared error. It may also add terms. But the multiple must not depend on whether an update is
    one batch of one process or is divided.

    Args:
        whole: a run of one micro-batch an update, on one process.
        run: a run with several micro-batches or processes.
        counts: gets the losses whose multiple could be compared, and those whose could not.
    """
    losses = len(recorded_losses(run))
    multiples = zip(multiples_of_losses(whole), multiples_of_losses(run), strict=False)
    known = [(first, second) for first, second in multiples if first and second]
    if any(is_multiple(second / first, 1.0) for first, second in known):
        counts.losses.compared += losses
        return
    for first, second in known:
        for factor, words in factors(run):
            if is_multiple(second / first, factor):
                counts.losses.compared += losses
                yield Cause(
                    f"the recorded losses are {factor:.3g} times those that were computed, which "
                    f"is {words}",
                    ADVICE_OF_LOSS,
                )
                return
    counts.losses.unknown += losses


def multiples_of_losses(run: ObservedRun) -> list[float | None]:
    """Return each recorded loss divided by the computed one; None if the ratio varies.

    A micro-batch may compute several losses. Each has an entry, and the last entry is for their
    sum.
    """
    recorded = recorded_losses(run)
    multiples: list[float | None] = []
    for losses in computed_losses(run):
        ratios = []
        for place, value in losses.items():
            if place in recorded and abs(value) > SMALL_ROWS:
                ratios.append(recorded[place] / value)
        is_constant = bool(ratios) and all(is_multiple(ratio, ratios[0]) for ratio in ratios)
        multiples.append(ratios[0] if is_constant and len(ratios) == len(recorded) else None)
    return multiples


def factors(run: ObservedRun) -> Iterator[tuple[float, str]]:
    """Yield the factors by which a recipe may multiply a loss by mistake, each with its name."""
    numbers = {
        "the number of processes": run.world_size,
        "the number of micro-batches of an update": run.started.accumulation,
    }
    for words, number in numbers.items():
        if number > 1:
            yield float(number), words
            yield 1 / number, f"1 / {words}"


def is_multiple(ratio: float, factor: float) -> bool:
    """Whether a ratio equals a factor, within the tolerance."""
    return math.isclose(ratio, factor, rel_tol=FACTORS)


Place = tuple[int, int]  # updates before a micro-batch, and its number within the update


def recorded_losses(run: ObservedRun) -> dict[Place, float]:
    """Return the mean over ranks of the losses that the loop recorded."""
    losses: defaultdict[Place, list[float]] = defaultdict(list)
    for _, record in run.all(Recorded):
        losses[record.step, record.micro_batch].append(record.loss)
    return {place: fmean(values) for place, values in losses.items()}


def computed_losses(run: ObservedRun) -> list[dict[Place, float]]:
    """Return the losses that functions of torch computed, as means over ranks, by micro-batch.

    A micro-batch may compute several losses. Each has an entry in the order of the calls, and the
    last entry has their sum.
    """
    values = losses_of_ranks(run)
    most_calls = max((len(by_call) for by_call in values.values()), default=0)
    losses = []
    for call in range(most_calls):
        means = {}
        for place, by_call in values.items():
            if len(by_call.get(call, ())) == run.world_size:
                means[place] = fmean(by_call[call])
        losses.append(means)
    sums = {}
    for place, by_call in values.items():
        sums[place] = math.fsum(fmean(of_ranks) for of_ranks in by_call.values())
    return [*losses, sums]


def losses_of_ranks(run: ObservedRun) -> dict[Place, dict[int, list[float]]]:
    """Return the losses of all ranks, by micro-batch and by the number of the call in it."""
    values: defaultdict[Place, defaultdict[int, list[float]]]
    values = defaultdict(lambda: defaultdict(list))
    for launch in run.launches:
        calls: defaultdict[Place, int] = defaultdict(int)
        for loss in launch.of(TrainingLoss):
            place = loss.step, loss.micro_batch
            values[place][calls[place]].append(loss.value)
            calls[place] += 1
    return {place: dict(by_call) for place, by_call in values.items()}


# The figures of evaluations


def training_modes(run: ObservedRun) -> Iterator[Cause]:
    """Yield a cause if layers are in training mode in an evaluation."""
    layers = {record.layer for _, record in run.all(TrainingMode)}
    if layers:
        yield Cause(
            f"the model is in training mode in the evaluation, so {' and '.join(sorted(layers))} "
            "acts as in training",
            ADVICE_OF_MODE,
        )


def wrong_figures(
    run: ObservedRun, counts: FigureCounts, trusted: Collection[str] | None = None
) -> Iterator[Cause]:
    """Yield a cause for the first figure of an evaluation that its outcomes do not give.

    Args:
        trusted: names of figures that the outcomes give on one process. Others may be figures of
            another kind under a known name. None: all names.
    """
    for record in run.launches[0].of(ObservedEvaluation):
        readings = split_passes_of_evaluation(run, record)
        for name, value in logged_figures(run, record).items():
            figure_check = check_figure(name, value, readings)
            if figure_check.is_correct is None or (trusted is not None and name not in trusted):
                counts.evaluations.unknown += name != "count"
                continue
            counts.evaluations.compared += 1
            if not figure_check.is_correct:
                ranks = f" on {run.world_size} processes" if run.world_size > 1 else ""
                yield Cause(
                    f"{name} of the {record.phase} evaluation after update {record.step}{ranks} is "
                    f"{value:.6g}, and {figure_check.expected:.6g} by its samples: {figure_check.explanation}",
                    ADVICE_OF_EVALUATION,
                )
                return


def right_figures(run: ObservedRun) -> set[str]:
    """Return the names of the figures that the outcomes of each evaluation give."""
    right: set[str] = set()
    wrong: set[str] = set()
    for record in run.launches[0].of(ObservedEvaluation):
        readings = split_passes_of_evaluation(run, record)
        for name, value in logged_figures(run, record).items():
            (right if check_figure(name, value, readings).is_correct else wrong).add(name)
    return right - wrong


def logged_figures(run: ObservedRun, evaluated: ObservedEvaluation) -> dict[str, float]:
    """Return the figures of an evaluation as they were logged, by their names without prefix.

    A recipe may return the figures of its process alone. The run then logs their mean over
    processes. The rehearsal logs nothing, so its figures are those that the recipe returned. They
    are left out if there are several processes.
    """
    if evaluated.phase == "rehearsal":
        return evaluated.figures if run.world_size == 1 else {}
    prefix = PREFIXES[evaluated.split]
    results = Results(run.directory)
    logged: Row = {}
    if evaluated.phase == "final":
        logged = results.final_figures
    else:
        for row in results.rows:
            if step_of(row) == evaluated.step:
                logged |= row
    figures = {}
    for name, value in evaluated.figures.items():
        figures[name] = number_or_nan(logged.get(f"{prefix}/{name}", value))
    return figures


def split_passes_of_evaluation(run: ObservedRun, evaluated: ObservedEvaluation) -> list[SplitPass]:
    """Return all passes over the split of one evaluation."""
    place = (evaluated.step, evaluated.phase, evaluated.split)
    ranks: list[list[EvaluationLoss]] = []
    for launch in run.of_launch(0):
        outcomes = launch.of(EvaluationLoss)
        ranks.append([each for each in outcomes if (each.step, each.phase, each.split) == place])
    return split_passes_of(ranks)


# Speed


def wrong_speeds(run: ObservedRun, counts: FigureCounts) -> Iterator[Cause]:
    """Yield a cause if the logged speed is not that of the bench's own clock."""
    rows = {step_of(row): row for row in Results(run.directory).rows}
    per_update = run.started.samples_per_update
    ratios = []
    for interval in run.launches[0].of(LogInterval):
        # The record was written at the log line itself, when the update had been counted.
        row = rows.get(interval.step, {})
        speed = number_or_none(row.get(THROUGHPUT))
        if speed and interval.after >= FIRST_UPDATES:
            samples = (interval.step - interval.after) * per_update
            ratios.append(speed * interval.seconds / samples)
    counts.speeds.compared += len(ratios)
    if ratios and abs(median(ratios) - 1) > SPEED:
        yield Cause(
            f"{THROUGHPUT} times the seconds of the clock is {median(ratios):.2f} times "
            "the number of samples",
            "let the loop take each batch from run.batches(train_loader), which counts its samples",
        )


CHECK = Check(
    "figures",
    "logged losses, metrics, samples and speed are those of the batches",
    answer,
)
