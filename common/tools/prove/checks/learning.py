"""Whether a recipe learns: the objective improves on the data that it evaluates."""

from common.tools.prove.bench import Bench, Check, Verdict
from common.tools.prove.observation import Evaluated

ADVICE = (
    "pass more --updates or a larger --learning-rate first; if that does not help, look for a loss "
    "that the weights do not reach, an optimizer without the model's parameters, or a metric of "
    "the wrong direction in OBJECTIVE"
)


def answer(bench: Bench) -> Verdict:
    """Compare the objective before training with the best one after it."""
    objective = bench.recipe.objective
    reference = bench.reference
    evaluated = reference.launches[0].of(Evaluated)
    started = reference.started
    values = []  # of each evaluation of one split: update and objective
    before = None
    for record in evaluated:
        value = record.figures.get(objective.metric)
        if value is None or record.split != started.validation_split:
            continue
        if record.phase == "rehearsal":
            before = value
        else:
            values.append((record.step, value))
    if before is None:
        return Verdict(
            None,
            "the recipe makes no evaluation before the first update (rehearse=False)",
        )
    best = objective.best(value for _, value in values)
    split = started.validation_split
    samples = started.split_sizes[split]
    if best is None:
        return Verdict(
            False,
            f"{objective.metric} on {samples} samples of {split}",
            (f"no evaluation has the objective {objective.metric} as a number",),
            ADVICE,
        )
    step = next(step for step, value in values if value == best)
    compared = (
        f"{objective.metric} on {samples} samples of {split}: {before:.4g} before training, "
        f"{best:.4g} after {step} updates"
    )
    if best != before and objective.best([before, best]) == best:
        return Verdict(True, compared)
    return Verdict(False, compared, (f"{objective.metric} did not become better",), ADVICE)


CHECK = Check(
    "learns",
    "the objective is better than before training, on the data that it evaluates",
    answer,
)
