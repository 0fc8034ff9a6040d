"""The run that is interrupted in each manner. Several checks use it."""

import random

from common.tools.prove.observation.launch_plan import PlannedInterruption
from common.tools.prove.proof_runs.bench import Bench, RunSpec
from common.tools.prove.records.base import Manner
from common.tools.prove.records.observed_run import ObservedRun
from common.tools.prove.records.run_records import EvaluationFigures, SavedState

# The manners of the interruptions, in any order; one of them occurs twice.
MANNERS: tuple[Manner, ...] = ("update", "update", "save", "evaluation", "stop")


def interrupted_spec(bench: Bench) -> RunSpec:
    """Return the specification of the run."""
    interruptions = draw_interruptions(bench.random_generator("interruptions"), bench.reference)
    return RunSpec("interrupted", interruptions=interruptions)


def draw_interruptions(
    generator: random.Random, reference: ObservedRun
) -> tuple[PlannedInterruption, ...]:
    """Draw the interruptions of a run, one in each of equal sections of its updates.

    Args:
        generator: the source of random numbers.
        reference: an uninterrupted run with the same flags.
    """
    total_steps = reference.start_record.total_steps
    rank_zero = reference.processes[0]
    # An interruption waits for the first save or evaluation from its update on, so it must not come
    # after the last one. That may move it to an earlier section.
    last_chances = {
        "save": max((record.step for record in rank_zero.of(SavedState)), default=total_steps),
        "evaluation": max(
            (record.step for record in rank_zero.of(EvaluationFigures)), default=total_steps
        ),
    }
    manners = [*MANNERS]
    generator.shuffle(manners)
    interruptions = []
    for number, manner in enumerate(manners):
        section_begin = number * total_steps // len(manners)
        section_end = (number + 1) * total_steps // len(manners)
        step = generator.randint(section_begin + 1, max(section_begin + 1, section_end - 1))
        # The other manners interrupt the run between two updates.
        step = min(step, last_chances.get(manner, total_steps - 1))
        interruptions.append(
            PlannedInterruption(manner=manner, step=max(1, step), share=generator.random())
        )
    return tuple(interruptions)
