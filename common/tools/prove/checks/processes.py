"""Checks that two processes make the updates of one, also when the number changes on a resume."""

from dataclasses import dataclass

from common.tools.launching.command import FSDP2_VARIABLES
from common.tools.prove.bench import (
    Bench,
    Cause,
    Check,
    Interruption,
    Verdict,
    failed,
    skipped,
)
from common.tools.prove.comparison import (
    UpdateLayout,
    UpdateLayouts,
    drawn_generators,
    run_with_layout,
    sample_mixing_of,
    update_layouts,
)
from common.tools.prove.instruments.updates import COMPARED_UPDATE
from common.tools.prove.notes import SampleMixing
from common.tools.prove.observation import ObservedRun
from common.tools.prove.pairs import (
    RunPair,
    cause_of_figures,
    cause_of_later_loss,
    cause_of_optimizers,
    cause_of_weights,
    is_near,
    summary,
    values_in_words,
)

STOPPED_AFTER = COMPARED_UPDATE - 1  # so that the resumed run makes the update that is compared
KILLED_AFTER = COMPARED_UPDATE + 2  # the proof's runs have a checkpoint after update 3
NOT_RESUMED = (
    "no resume on another number of processes was compared, because one process makes an update of "
    "a single batch, which two can't divide"
)


@dataclass(frozen=True)
class Move:
    """A run that goes on with another number of processes after an interruption."""

    name: str  # of the run
    interruption: Interruption
    processes: int  # of its first launch
    resumed_processes: int
    words: str


MOVES = (
    Move(
        "from-one-to-two",
        Interruption("stop", STOPPED_AFTER),
        1,
        2,
        f"a run stopped on one process after update {STOPPED_AFTER} and resumed on two",
    ),
    Move(
        "from-two-to-one",
        Interruption("update", KILLED_AFTER),
        2,
        1,
        f"a run killed on two processes after update {KILLED_AFTER} and resumed on one",
    ),
)


def answer(bench: Bench) -> Verdict:
    """Compare two processes with one, and then with the latter, runs that change the number."""
    ways = update_layouts(bench)
    distributed = run_with_layout(bench, "two-processes", ways.distributed)
    single, way = run_on_one(bench, ways, sample_mixing_of(distributed))
    verdict = verdict_of(RunPair(single, distributed, way, ways.distributed))
    if not verdict.passed:
        return verdict
    if way.accumulation == 1:
        return Verdict(True, f"{verdict.compared}; {NOT_RESUMED}")
    for move in MOVES:
        moved = run_with_layout(
            bench,
            move.name,
            ways.distributed if move.processes > 1 else way,
            interruptions=(move.interruption,),
            resumed_processes=move.resumed_processes,
        )
        resumed = verdict_of(RunPair(single, moved, way, ways.distributed))
        if not resumed.passed:
            causes = tuple(f"{move.words}: {cause}" for cause in resumed.causes)
            return Verdict(
                resumed.passed, f"{move.words}: {resumed.compared}", causes, resumed.advice
            )
    return Verdict(True, "; ".join([verdict.compared, *(move.words for move in MOVES)]))


def answer_sharded(bench: Bench) -> Verdict:
    """Compare one process with two that divide the weights among them by FSDP2."""
    ways = update_layouts(bench)
    sharded = run_with_layout(bench, "sharded", ways.distributed, environment=tuple(FSDP2_VARIABLES.items()))
    single, way = run_on_one(bench, ways, sample_mixing_of(sharded))
    return verdict_of(RunPair(single, sharded, way, ways.distributed))


def run_on_one(bench: Bench, ways: UpdateLayouts, mixers: SampleMixing) -> tuple[ObservedRun, UpdateLayout]:
    """Return the run on one process that two processes should equal, and its way.

    A loss that compares samples with each other needs a larger batch in the place of accumulation.
    """
    if mixers.couples_samples:
        return run_with_layout(bench, "whole", ways.whole), ways.whole
    return run_with_layout(bench, "divided", ways.divided), ways.divided


def verdict_of(pair: RunPair) -> Verdict:
    """Compare a run on one process with one on two."""
    mixers = sample_mixing_of(pair.second)
    if "SyncBatchNorm" in mixers.layers:
        return skipped("SyncBatchNorm mixes the samples of all processes")
    cause = cause_of(pair)
    if cause is None and not mixers.layers:
        cause = cause_of_figures(pair)
    compared = summary(pair)
    if mixers.layers:
        compared += (
            f"; {' and '.join(mixers.layers)} averages its statistics over processes, so "
            "evaluations are not compared"
        )
    if cause is None:
        return Verdict(True, compared)
    generators = drawn_generators(pair.second)
    if generators:
        names = " and ".join(generators)
        return skipped(f"the loop draws random numbers on each process (generator {names})")
    return failed(compared, [cause])


def cause_of(pair: RunPair) -> Cause | None:
    """Return why two processes make other updates than one, in words about processes."""
    difference = pair.first_difference()
    if difference is None:
        return cause_of_weights(pair)
    values = values_in_words(pair, difference)
    if difference.quantity == "optimizers":
        return cause_of_optimizers(pair, difference)
    if difference.quantity == "learning rate":
        return Cause(
            f"the learning rate of update {difference.update} is {values}: a schedule depends on "
            "the number of processes or of micro-batches",
            "pass the scheduler to accelerator.prepare(...), which steps it once an update",
        )
    if difference.quantity == "gradients":
        sentence = f"the gradients of update {difference.update} have the norm {values}"
        ratio = difference.ratio
        if sample_mixing_of(pair.second).couples_samples:
            return Cause(
                f"{sentence}, {ratio:.2f} times as large: the loss of a process compares its own "
                "samples alone, or counts those of others several times",
                "gather the rows of all processes by run.gather(rows), and take the mean",
            )
        return cause_of_ratio(sentence, ratio)
    if difference.update > 1:
        return cause_of_later_loss(pair, difference)
    return Cause(
        f"the loss of update 1 is {values}, before any weight has changed: the loss that is "
        "recorded is no mean over the samples of a process",
        "pass run.record the mean loss of the process's own samples; the run averages it over "
        "processes",
    )


def cause_of_ratio(sentence: str, ratio: float) -> Cause:
    """Return why gradients are larger or smaller on two processes."""
    if is_near(ratio, 0.5):
        return Cause(
            f"{sentence}, half as large: on one process, the loss is not divided by the number of "
            "micro-batches",
            "call accelerator.backward(loss), which divides it; loss.backward() does not",
        )
    if is_near(ratio, 2):
        return Cause(
            f"{sentence}, twice as large: the gradients of the processes are added up",
            "leave the mean over processes to the prepared model, and do not multiply the loss by "
            "their number",
        )
    return Cause(
        f"{sentence}, {ratio:.2f} times as large, for the same samples and weights",
        "call the model that accelerator.prepare(...) returned, and compute the loss as a mean "
        "over the samples of the process",
    )


CHECK = Check(
    "processes",
    "two processes make the same updates as one, also after a resume if it accumulates batches",
    answer,
)
SHARDED_CHECK = Check(
    "sharded",
    "two processes that divide the weights among them by FSDP2 make the same updates as one",
    answer_sharded,
    is_optional=True,
)
