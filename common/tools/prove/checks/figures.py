"""Checks logged losses, metrics, samples and speed by computing them again from the batches."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from statistics import fmean, median

from pydantic import JsonValue

from common.measure.stopwatch import FIRST_UPDATES
from common.metric_names import SAMPLES, THROUGHPUT, TRAINING_LOSS
from common.objective import PREFIXES
from common.run_directory.records import MetricsRow
from common.run_directory.stored_run import StoredRun
from common.tools.prove.checks.base import Check
from common.tools.prove.layouts.compared_runs import (
    run_of_whole_batches,
    run_with_layout,
    update_layouts,
)
from common.tools.prove.proof_runs.bench import Bench
from common.tools.prove.proof_runs.measured_runs import steady_run
from common.tools.prove.recomputation.checked_figures import (
    CheckedFigures,
    coverage_in_words,
    has_outcomes,
)
from common.tools.prove.recomputation.evaluation_figures import FigureComparison, compare_figure
from common.tools.prove.recomputation.split_passes import split_passes_of_evaluation
from common.tools.prove.recomputation.training_losses import ADVICE_OF_LOSS, checked_losses
from common.tools.prove.recomputation.training_metrics import checked_metrics
from common.tools.prove.records.instrument_records import (
    EvaluatedSamples,
    LayerInTrainingMode,
    LogInterval,
)
from common.tools.prove.records.observed_run import ObservedRun
from common.tools.prove.records.run_records import EvaluationFigures, RecordedMicroBatch
from common.tools.prove.verdicts import Cause, Verdict, failed_verdict
from common.tools.rows import number_or_none, step_of_row

ROW_TOLERANCE = 1e-5  # relative; the run adds up in a different order
SMALLEST_DIFFERENCE = 1e-6  # smaller ones do not count
SPEED_TOLERANCE = 0.1  # relative
ADVICE_OF_EVALUATION = (
    "add up over samples, as sums.record(loss, metrics, count) of Sums does, and return "
    "sums.result()"
)
ADVICE_OF_MODE = "evaluate the model that `with run.evaluating(model) as bare_model:` yields"


def judge_figures(bench: Bench) -> Verdict:
    """Compute the figures of several runs again, and compare them with the logged figures."""
    layouts = update_layouts(bench)
    whole = run_of_whole_batches(bench)
    divided = run_with_layout(bench, "divided", layouts.divided)
    distributed = run_with_layout(bench, "two-processes", layouts.distributed)
    checked = [checked_rows(bench.reference)]
    for run in (divided, distributed):
        checked.append(checked_mode(run))
        checked.append(checked_losses(whole, run))
        checked.append(checked_metrics(run))
    checked.append(checked_evaluations(divided))
    checked.append(checked_evaluations(distributed, correct_figures(divided)))
    checked.append(checked_speeds(steady_run(bench)))
    return verdict_of(checked, bench.recipe.objective.metric)


def verdict_of(checked: Sequence[CheckedFigures], objective_metric: str) -> Verdict:
    """Return the verdict. The check does not apply if no loss or metric could be computed again.

    Args:
        objective_metric: the metric of the objective, without a prefix such as "val/".
    """
    compared = coverage_in_words(checked, objective_metric)
    causes: list[Cause] = []
    for figures in checked:
        causes += figures.causes
    if causes:
        return failed_verdict(compared, causes)
    return Verdict(True if has_outcomes(checked) else None, compared)


# The rows of training


def checked_rows(run: ObservedRun) -> CheckedFigures:
    """Check whether each row is the mean of what the loop recorded, up to the first wrong row."""
    compared_count = 0
    rows = [row for row in StoredRun(run.directory).rows if TRAINING_LOSS in row]
    steps = [0, *map(step_of_row, rows)]  # a row has the mean since the step of the row before it
    for (previous_step, step), row in zip(pairwise(steps), rows, strict=True):
        expected = means_between(run, previous_step, step)
        expected[SAMPLES] = float(step * run.start_record.samples_per_update)
        for name, value in expected.items():
            if name not in row:
                continue
            compared_count += 1
            logged = number_or_nan(row[name])
            if not is_as_expected(logged, value):
                cause = Cause(
                    f"{name} of update {step} was logged as {logged:.6g}, but the mean of what "
                    f"the loop recorded is {value:.6g}",
                    ADVICE_OF_LOSS,
                )
                return CheckedFigures("means in rows", (cause,), compared_count)
    return CheckedFigures("means in rows", compared_count=compared_count)


def number_or_nan(value: JsonValue) -> float:
    """Return a logged figure; NaN for null, which stands for NaN and infinities."""
    number = number_or_none(value)
    return math.nan if number is None else number


def is_as_expected(logged: float, expected: float) -> bool:
    """Whether a logged figure equals an expected one within the tolerance.

    A logged NaN stands for infinities too.
    """
    if math.isnan(logged):
        return not math.isfinite(expected)
    return math.isclose(logged, expected, rel_tol=ROW_TOLERANCE, abs_tol=SMALLEST_DIFFERENCE)


def means_between(run: ObservedRun, previous_step: int, step: int) -> dict[str, float]:
    """Return the means over all ranks' records of the updates `previous_step` + 1 to `step`."""
    losses = []
    totals: defaultdict[str, float] = defaultdict(float)
    elements: defaultdict[str, int] = defaultdict(int)
    for _, record in run.all(RecordedMicroBatch):
        if previous_step <= record.step < step:
            losses.append(record.loss)
            for name, (total, count) in record.metrics.items():
                totals[name] += total
                elements[name] += count
    means = {f"train/{name}": totals[name] / elements[name] for name in totals if elements[name]}
    if losses:
        means[TRAINING_LOSS] = fmean(losses)
    return means


# The figures of evaluations


def checked_mode(run: ObservedRun) -> CheckedFigures:
    """Check whether layers are in training mode in an evaluation; this counts no figures."""
    layers = {record.layer_class for _, record in run.all(LayerInTrainingMode)}
    if not layers:
        return CheckedFigures("figures of evaluations")
    cause = Cause(
        "the model is in training mode in the evaluation, so these layers act as in training: "
        f"{', '.join(sorted(layers))}",
        ADVICE_OF_MODE,
    )
    return CheckedFigures("figures of evaluations", (cause,))


def checked_evaluations(run: ObservedRun, trusted: Collection[str] | None = None) -> CheckedFigures:
    """Check the figures of evaluations, up to the first one that its samples contradict.

    Each figure is computed again from the outcomes of the evaluation's samples.

    Args:
        trusted: names of figures that agree with the outcomes on one process. Figures with other
            names may have a meaning of their own. None: trust all names.
    """
    compared_count = 0
    compared_names: set[str] = set()
    unknown_names: set[str] = set()
    causes: tuple[Cause, ...] = ()
    for record, name, value, comparison in compared_figures(run):
        if name == "count":  # the number of samples is not a figure
            continue
        logged_name = f"{PREFIXES[record.split]}/{name}"
        is_trusted = trusted is None or name in trusted
        if comparison.is_correct is None or not is_trusted:
            unknown_names.add(logged_name)
            continue
        compared_count += 1
        compared_names.add(logged_name)
        if not comparison.is_correct:
            causes = (cause_of_figure(run, record, name, value, comparison),)
            break
    return CheckedFigures(
        "figures of evaluations",
        causes=causes,
        compared_count=compared_count,
        compared_names=frozenset(compared_names),
        unknown_names=frozenset(unknown_names),
    )


def compared_figures(
    run: ObservedRun,
) -> Iterator[tuple[EvaluationFigures, str, float, FigureComparison]]:
    """Yield each figure of an evaluation with its name, its value, and what its samples give."""
    for record in run.processes[0].of(EvaluationFigures):
        split_passes = split_passes_of_evaluation(run, record)
        has_more_calls = calls_model_several_times(run, record)
        for name, value in logged_figures(run, record).items():
            comparison = compare_figure(
                name, value, split_passes, may_have_other_outputs=has_more_calls
            )
            yield record, name, value, comparison


def cause_of_figure(
    run: ObservedRun,
    record: EvaluationFigures,
    name: str,
    value: float,
    comparison: FigureComparison,
) -> Cause:
    """Return the cause of a figure that its samples contradict."""
    ranks = f" on {run.world_size} processes" if run.world_size > 1 else ""
    return Cause(
        f"{name} of the {record.phase} evaluation after update {record.step}{ranks} is "
        f"{value:.6g}, but its samples give {comparison.expected:.6g}: {comparison.explanation}",
        ADVICE_OF_EVALUATION,
    )


def correct_figures(run: ObservedRun) -> set[str]:
    """Return the names of the figures that agree with their outcomes in each evaluation.

    `checked_evaluations` trusts only these names in a run on several processes.
    """
    correct: set[str] = set()
    wrong_or_unknown: set[str] = set()
    for record in run.processes[0].of(EvaluationFigures):
        split_passes = split_passes_of_evaluation(run, record)
        for name, value in logged_figures(run, record).items():
            if compare_figure(name, value, split_passes).is_correct:
                correct.add(name)
            else:
                wrong_or_unknown.add(name)
    return correct - wrong_or_unknown


def logged_figures(run: ObservedRun, evaluation: EvaluationFigures) -> dict[str, float]:
    """Return the logged figures of an evaluation, by their names without the prefix.

    A process may lack figures that another process has, so the logged figures count, and not those
    that the recipe returned. A figure that was not logged keeps the value that the recipe returned.

    The rehearsal logs nothing, so its figures are those that the recipe returned. With several
    processes, the result is empty for it.
    """
    if evaluation.phase == "rehearsal":
        return evaluation.figures if run.world_size == 1 else {}
    prefix = PREFIXES[evaluation.split]
    stored = StoredRun(run.directory)
    logged: MetricsRow = {}
    if evaluation.phase == "final":
        # Without a summary, the figures of the recipe would be compared with themselves.
        assert stored.is_complete
        logged = stored.summary.to_json()
    else:
        for row in stored.rows:
            if step_of_row(row) == evaluation.step:
                logged |= row
    figures = {}
    for name, value in evaluation.figures.items():
        figures[name] = number_or_nan(logged.get(f"{prefix}/{name}", value))
    return figures


def calls_model_several_times(run: ObservedRun, evaluation: EvaluationFigures) -> bool:
    """Whether an evaluation calls the model more often than it reads batches.

    Then its figures may come from outputs that no loss got, so they may differ from the outcomes.
    """
    for _, record in run.all(EvaluatedSamples):
        is_of_evaluation = (record.step, record.phase) == (evaluation.step, evaluation.phase)
        if is_of_evaluation and record.model_calls > record.batch_count:
            return True
    return False


# Speed


def checked_speeds(run: ObservedRun) -> CheckedFigures:
    """Check whether the logged speed is the speed by the proof's own clock."""
    rows = {step_of_row(row): row for row in StoredRun(run.directory).rows}
    samples_per_update = run.start_record.samples_per_update
    ratios = []  # of the logged speed to the speed by the proof's own clock
    for interval in run.processes[0].of(LogInterval):
        # The record was written at the log line, after the update was counted.
        row = rows.get(interval.step, {})
        logged_speed = number_or_none(row.get(THROUGHPUT))
        # The logged speed leaves out the first updates.
        if logged_speed and interval.previous_step >= FIRST_UPDATES:
            sample_count = (interval.step - interval.previous_step) * samples_per_update
            ratios.append(logged_speed * interval.seconds / sample_count)
    causes: tuple[Cause, ...] = ()
    if ratios and abs(median(ratios) - 1) > SPEED_TOLERANCE:
        cause = Cause(
            f"the logged {THROUGHPUT} is {median(ratios):.2f} times the speed by the proof's own "
            "clock",
            "let the loop take each batch from run.batches(train_loader), which counts its samples",
        )
        causes = (cause,)
    return CheckedFigures("speeds", causes, compared_count=len(ratios))


CHECK = Check(
    "figures",
    "logged losses, metrics, samples and speed match the batches",
    judge_figures,
    compares_runs=True,
)
