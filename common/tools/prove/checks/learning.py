"""Checks that a recipe learns: its objective improves on validation or test data."""

from dataclasses import dataclass

from common.tools.prove.checks.base import Check
from common.tools.prove.proof_runs.bench import Bench, RunSpec
from common.tools.prove.proof_runs.recipe_flags import EPOCHS, whole_number
from common.tools.prove.recomputation.margins import (
    LONGER_STANDARD_ERRORS,
    STANDARD_ERRORS,
    ObjectiveValue,
    improvement,
)
from common.tools.prove.recomputation.split_passes import split_passes_of_evaluation
from common.tools.prove.records.observed_run import ObservedRun
from common.tools.prove.records.run_records import EvaluationFigures
from common.tools.prove.verdicts import Verdict

LONGER_FACTOR = 4  # the longer run has this many times the updates of the first run
EVALUATION_SAMPLES = 513  # the most of each split; more than in other runs, for a smaller margin
INSTRUMENTS = ("common.tools.prove.instruments.losses",)
ADVICE = (
    "pass more --updates or a larger --learning-rate first; if that does not help, look for a loss "
    "that the weights do not reach, an optimizer without the model's parameters, or the wrong "
    "direction of the metric in OBJECTIVE"
)

ADVICE_TO_EVALUATE = (
    "return the objective from each evaluation; if you pass --eval-every, leave it out, so that "
    "the short run evaluates"
)


@dataclass(frozen=True)
class Learning:
    """The objective of a run before training, and of its last model."""

    before: ObjectiveValue | None  # None: the recipe makes no evaluation before the first update
    after: ObjectiveValue | None  # None: no evaluation has the objective as a number
    updates: int  # the number of updates before `after`


def learning_of(run: ObservedRun, metric: str) -> Learning:
    """Return the objective of a run on its validation split.

    The last model counts, not the best one. The best of several evaluations is probably better than
    the one before training even if the model guesses.
    """
    split = run.start_record.validation_split
    sample_count = run.start_record.split_sizes[split]
    before = None
    last: EvaluationFigures | None = None
    for record in run.processes[0].of(EvaluationFigures):
        if metric not in record.figures or record.split != split:
            continue
        if record.phase == "rehearsal":
            before = objective_value(run, record, metric, sample_count)
        # After the last update, the final evaluation may be of the best model. It comes second, so
        # an evaluation at the same step does not replace the last one.
        elif last is None or record.step > last.step:
            last = record
    after = None if last is None else objective_value(run, last, metric, sample_count)
    return Learning(before, after, 0 if last is None else last.step)


def objective_value(
    run: ObservedRun, record: EvaluationFigures, metric: str, sample_count: int
) -> ObjectiveValue:
    return ObjectiveValue(
        record.figures[metric], sample_count, split_passes_of_evaluation(run, record)
    )


def judge_learning(bench: Bench) -> Verdict:
    """Compare the objective before training with that of the last model.

    If it has not improved by the margin, a longer run decides: some models predict the largest
    class for dozens of updates before they learn.
    """
    verdict = verdict_of(bench, bench.run(learning_spec("learning")))
    if verdict.passed is False:
        return verdict_of(bench, longer_run(bench), LONGER_STANDARD_ERRORS)
    return verdict


def verdict_of(bench: Bench, run: ObservedRun, standard_errors: float = STANDARD_ERRORS) -> Verdict:
    """Return the verdict on one run.

    Args:
        standard_errors: the margin, as a number of standard errors.
    """
    objective = bench.recipe.objective
    metric = objective.metric
    learning = learning_of(run, metric)
    split = run.start_record.validation_split
    subject = f"{metric} on {run.start_record.split_sizes[split]} samples of {split}"
    if learning.before is None:
        return Verdict(
            None,
            "the recipe makes no evaluation before the first update (rehearse=False)",
        )
    if learning.after is None:
        cause = f"no evaluation after the first update has the objective {metric} as a number"
        return Verdict(False, subject, (cause,), ADVICE_TO_EVALUATE)
    gained = improvement(objective, learning.before, learning.after, standard_errors)
    compared = (
        f"{subject}: {learning.before.value:.4g} before training, {learning.after.value:.4g} after "
        f"{learning.updates} updates (margin: {gained.margin:.2g}, {gained.basis})"
    )
    if gained.is_enough:
        return Verdict(True, compared)
    cause = f"{metric} did not improve by the margin within {learning.updates} updates"
    return Verdict(False, compared, (cause,), ADVICE)


def longer_run(bench: Bench) -> ObservedRun:
    """Train with the proof's flags, but `LONGER_FACTOR` times as long on the same samples."""
    values = bench.flags.values
    name = "--max-steps" if "--max-steps" in values else "--epochs"
    length = whole_number(values, name, EPOCHS)
    return bench.run(learning_spec("longer", (name, str(LONGER_FACTOR * length))))


def learning_spec(name: str, flags: tuple[str, ...] = ()) -> RunSpec:
    """Return the specification of a run whose evaluations have many samples.

    `INSTRUMENTS` record the outcome of each evaluated sample.
    """
    return RunSpec(
        name,
        flags,
        instruments=INSTRUMENTS,
        reads_tensors=False,
        evaluation_samples=EVALUATION_SAMPLES,
    )


CHECK = Check(
    "learns",
    "training improves the objective on validation or test data by more than chance",
    judge_learning,
)
