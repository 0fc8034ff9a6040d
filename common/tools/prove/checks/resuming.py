"""Checks that a resumed run ends with the same bits as an uninterrupted one."""

from common.tools.prove.checks.base import Check
from common.tools.prove.exact_comparison.causes import (
    causes_after_resume,
    causes_in_workers,
    causes_of_lost_state,
    unrestored_in_words,
)
from common.tools.prove.exact_comparison.record_differences import Difference, first_difference
from common.tools.prove.exact_comparison.result_differences import Results, differences_of_results
from common.tools.prove.proof_runs.bench import Bench, RunFailedError, RunSpec
from common.tools.prove.proof_runs.interrupted_run import MANNERS, interrupted_spec
from common.tools.prove.proof_runs.recipe_flags import as_words
from common.tools.prove.records.base import Manner
from common.tools.prove.records.observed_run import ObservedRun
from common.tools.prove.records.run_records import Interruption
from common.tools.prove.verdicts import Cause, Verdict, failed_verdict

MANNERS_IN_WORDS: dict[Manner, str] = {
    "update": "after an update",
    "save": "in a save",
    "evaluation": "in an evaluation",
    "stop": "by SIGTERM",
}
NO_RESULT_DEPENDS_ON_IT = (
    "no compared result depends on this state, but it ends otherwise than without interruptions"
)


def judge_resuming(bench: Bench) -> Verdict:
    """Judge whether a run that was interrupted in each manner ends as the reference run does.

    The check also fails if a resume loses state on which no compared result depends, or if the run
    ends before it was interrupted in each manner.
    """
    reference = bench.reference
    interrupted = bench.run(interrupted_spec(bench))
    results = Results(reference.directory)
    compared = f"{results.counts_text}; {interruptions_in_words(interrupted)}"
    differing_results = differences_of_results(results, Results(interrupted.directory))
    differing_record = first_difference(reference, interrupted)
    if differing_record is not None or differing_results:
        causes = causes_after_resume(reference, interrupted, differing_record)
        if differing_record is not None and is_of_worker(differing_record, reference):
            causes = [*causes_without_workers(bench), *causes]
        return failed_verdict(compared, causes, differing_results)
    lost_state = causes_of_lost_state(reference, interrupted)
    if lost_state:
        return failed_verdict(compared, lost_state, (NO_RESULT_DEPENDS_ON_IT,))
    missing = missing_manners(interrupted)
    if missing:
        return Verdict(
            False,
            compared,
            (f"the run ended before the proof could interrupt it {' and '.join(missing)}",),
            "pass more --updates (if you pass --max-steps, a larger one), so that the run has more "
            "evaluations and checkpoints",
        )
    unrestored = unrestored_in_words(reference, interrupted)
    return Verdict(True, f"{compared}; {unrestored}" if unrestored else compared)


def is_of_worker(difference: Difference, reference: ObservedRun) -> bool:
    """Whether a difference is in the contents of a batch that a worker process has made."""
    return difference.field == "batch_digest" and reference.start_record.worker_count > 0


def causes_without_workers(bench: Bench) -> list[Cause]:
    """Run the check's two runs again without worker processes; see `causes_in_workers`.

    The list is empty if the recipe fails without workers, or resumes to the same bits.
    """
    flags = as_words(num_workers=0)
    interruptions = interrupted_spec(bench).interruptions
    try:
        reference = bench.run(RunSpec("reference-without-workers", flags))
        interrupted = bench.run(
            RunSpec("interrupted-without-workers", flags, interruptions=interruptions)
        )
    except RunFailedError:
        return []
    return causes_in_workers(reference, interrupted)


def interruptions_in_words(run: ObservedRun) -> str:
    """Return the interruptions of a run in words, such as "killed after update 4"."""
    kills: list[str] = []
    stops: list[str] = []
    for _, record in run.all(Interruption):
        if record.manner == "stop":
            stops.append(record.moment)
        else:
            kills.append(record.moment)
    phrases = []
    if kills:
        phrases.append(f"killed {', '.join(kills)}")
    if stops:
        phrases.append(f"stopped by SIGTERM {', '.join(stops)}")
    return "; ".join(phrases) or "not interrupted"


def missing_manners(run: ObservedRun) -> list[str]:
    """Return the planned manners in which a run was not interrupted, once each, in words."""
    missing = [*MANNERS]
    for _, record in run.all(Interruption):
        missing.remove(record.manner)
    return [MANNERS_IN_WORDS[manner] for manner in dict.fromkeys(missing)]


CHECK = Check(
    "resumes",
    "killed at two updates, in a save and in an evaluation, and stopped by SIGTERM, the run ends "
    "with the same weights, rows and best model, and loses no network or other object with "
    "state_dict",
    judge_resuming,
    compares_runs=True,
)
