"""Whether a recipe learns: the objective improves on the data that it evaluates."""

from dataclasses import dataclass

from common.tools.prove.bench import Bench, Check, RunSpec, Verdict
from common.tools.prove.checks.figures import split_passes_of_evaluation
from common.tools.prove.flags import EPOCHS, number
from common.tools.prove.margins import (
    LONGER_STANDARD_ERRORS,
    STANDARD_ERRORS,
    Evaluation,
    improvement,
)
from common.tools.prove.observation import ObservedEvaluation, ObservedRun

LONGER = 4  # times the updates of the first run
EVALUATION_SAMPLES = 513  # of each split, at most; more than in other runs, for a smaller margin
INSTRUMENTS = ("common.tools.prove.instruments.outcomes",)
ADVICE = (
    "pass more --updates or a larger --learning-rate first; if that does not help, look for a loss "
    "that the weights do not reach, an optimizer without the model's parameters, or a metric of "
    "the wrong direction in OBJECTIVE"
)


@dataclass(frozen=True)
class Learning:
    """The objective of a run before training, and of its last model."""

    before: Evaluation | None  # None: the recipe makes no evaluation before the first update
    after: Evaluation | None  # None: no evaluation has the objective as a number
    updates: int  # made before the latter


def learning_of(run: ObservedRun, metric: str) -> Learning:
    """Return the objective of a run on its validation split.

    The last model counts, not the best one: the best of several evaluations is better than before
    training even if the model guesses.
    """
    split = run.started.validation_split
    samples = run.started.split_sizes[split]
    before = None
    last: ObservedEvaluation | None = None
    for record in run.launches[0].of(ObservedEvaluation):
        if metric not in record.figures or record.split != split:
            continue
        if record.phase == "rehearsal":
            before = evaluation_of(run, record, metric, samples)
        # After the last update, the final evaluation may be of the best model. It comes second.
        elif last is None or record.step > last.step:
            last = record
    after = None if last is None else evaluation_of(run, last, metric, samples)
    return Learning(before, after, 0 if last is None else last.step)


def evaluation_of(run: ObservedRun, record: ObservedEvaluation, metric: str, samples: int) -> Evaluation:
    return Evaluation(record.figures[metric], samples, split_passes_of_evaluation(run, record))


def answer(bench: Bench) -> Verdict:
    """Compare the objective before training with that of the last model.

    If it has not improved by the margin, a longer run decides: some models predict the largest
    class for dozens of updates before they learn.
    """
    verdict = verdict_of(bench, bench.run(learning_spec("learning")))
    if verdict.passed is False:
        return verdict_of(bench, longer_run(bench), LONGER_STANDARD_ERRORS)
    return verdict


def verdict_of(bench: Bench, run: ObservedRun, errors: float = STANDARD_ERRORS) -> Verdict:
    """Judge one run.

    Args:
        errors: standard errors by which the objective has to improve.
    """
    objective = bench.recipe.objective
    metric = objective.metric
    learning = learning_of(run, metric)
    split = run.started.validation_split
    subject = f"{metric} on {run.started.split_sizes[split]} samples of {split}"
    if learning.before is None:
        return Verdict(
            None,
            "the recipe makes no evaluation before the first update (rehearse=False)",
        )
    if learning.after is None:
        cause = f"no evaluation has the objective {metric} as a number"
        return Verdict(False, subject, (cause,), ADVICE)
    improved = improvement(objective, learning.before, learning.after, errors)
    compared = (
        f"{subject}: {learning.before.value:.4g} before training, {learning.after.value:.4g} after "
        f"{learning.updates} updates (margin: {improved.margin:.2g}, {improved.basis})"
    )
    if improved.is_enough:
        return Verdict(True, compared)
    cause = f"{metric} did not become better by the margin within {learning.updates} updates"
    return Verdict(False, compared, (cause,), ADVICE)


def longer_run(bench: Bench) -> ObservedRun:
    """Return a run with more epochs of the same samples, and otherwise the proof's flags."""
    flags = bench.flags.flags
    name = "--max-steps" if "--max-steps" in flags else "--epochs"
    length = number(flags, name, EPOCHS)
    return bench.run(learning_spec("longer", (name, str(LONGER * length))))


def learning_spec(name: str, flags: tuple[str, ...] = ()) -> RunSpec:
    """Return a run whose evaluations have many samples, with the outcome of each."""
    return RunSpec(
        name,
        flags,
        instruments=INSTRUMENTS,
        is_observed=False,
        evaluation_samples=EVALUATION_SAMPLES,
    )


CHECK = Check(
    "learns",
    "the objective is better than before training by more than chance, on the data that it "
    "evaluates",
    answer,
)
