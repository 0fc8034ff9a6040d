"""Whether a recipe learns: the objective improves on the data that it evaluates."""

from dataclasses import dataclass

from common.objective import Objective
from common.tools.prove.bench import Bench, Check, RunSpec, Verdict
from common.tools.prove.flags import EPOCHS, number
from common.tools.prove.observation import Evaluated, ObservedRun

LONGER = 4  # times the updates of the reference run
ADVICE = (
    "pass more --updates or a larger --learning-rate first; if that does not help, look for a loss "
    "that the weights do not reach, an optimizer without the model's parameters, or a metric of "
    "the wrong direction in OBJECTIVE"
)


@dataclass(frozen=True)
class LearningCurve:
    """The objective of a run on one split, before training and after each evaluation."""

    before: float | None  # None: the recipe makes no evaluation before the first update
    values: tuple[tuple[int, float], ...]  # the update and the objective of each evaluation

    def best(self, objective: Objective) -> float | None:
        """Return the best value after the start; None if there is none."""
        return objective.best(value for _, value in self.values)

    def has_improved(self, objective: Objective) -> bool:
        """Whether an evaluation is better than before training."""
        best = self.best(objective)
        if self.before is None or best is None or best == self.before:
            return False
        return objective.best([self.before, best]) == best

    def compared(self, objective: Objective, samples: int, split: str) -> str:
        """Return in words which values were compared."""
        subject = f"{objective.metric} on {samples} samples of {split}"
        best = self.best(objective)
        if best is None:
            return subject
        step = next(step for step, value in self.values if value == best)
        return f"{subject}: {self.before:.4g} before training, {best:.4g} after {step} updates"


def learning_curve(run: ObservedRun, metric: str) -> LearningCurve:
    """Return the values of a metric in the evaluations of a run on its validation split."""
    before = None
    values = []
    for record in run.launches[0].of(Evaluated):
        value = record.figures.get(metric)
        if value is None or record.split != run.started.validation_split:
            continue
        if record.phase == "rehearsal":
            before = value
        else:
            values.append((record.step, value))
    return LearningCurve(before, tuple(values))


def answer(bench: Bench) -> Verdict:
    """Compare the objective before training with the best one after it.

    The reference run has few updates. If its objective does not improve, a longer run decides: some
    models predict the largest class for dozens of updates before they learn.
    """
    objective = bench.recipe.objective
    run = bench.reference
    curve = learning_curve(run, objective.metric)
    if curve.before is None:
        return Verdict(
            None,
            "the recipe makes no evaluation before the first update (rehearse=False)",
        )
    if curve.values and not curve.has_improved(objective):
        run = longer_run(bench)
        curve = learning_curve(run, objective.metric)
    split = run.started.validation_split
    compared = curve.compared(objective, run.started.split_sizes[split], split)
    if curve.has_improved(objective):
        return Verdict(True, compared)
    if not curve.values:
        cause = f"no evaluation has the objective {objective.metric} as a number"
        return Verdict(False, compared, (cause,), ADVICE)
    updates = f"within {run.started.total_steps} updates"
    cause = f"{objective.metric} did not become better {updates}"
    return Verdict(False, compared, (cause,), ADVICE)


def longer_run(bench: Bench) -> ObservedRun:
    """Return a run with more epochs of the same samples, and otherwise the reference's flags."""
    flags = bench.flags.flags
    name = "--max-steps" if "--max-steps" in flags else "--epochs"
    length = number(flags, name, EPOCHS)
    return bench.run(RunSpec("longer", (name, str(LONGER * length))))


CHECK = Check(
    "learns",
    "the objective is better than before training, on the data that it evaluates",
    answer,
)
