"""Checks that the same command gives the same bits twice."""

from common.tools.prove.checks.base import Check
from common.tools.prove.exact_comparison.causes import causes_of_repeat
from common.tools.prove.exact_comparison.record_differences import first_difference
from common.tools.prove.exact_comparison.result_differences import Results, differences_of_results
from common.tools.prove.proof_runs.bench import Bench, RunSpec
from common.tools.prove.verdicts import Verdict, failed_verdict


def judge_repeating(bench: Bench) -> Verdict:
    """Compare the reference run with another run of the same command."""
    reference = bench.reference
    repeated = bench.run(RunSpec("repeated", is_fresh=True))
    results = Results(reference.directory)
    compared = f"{reference.start_record.total_steps} updates, {results.counts_text}, of 2 runs"
    differences = differences_of_results(results, Results(repeated.directory))
    difference = first_difference(reference, repeated)
    if difference is None and not differences:
        return Verdict(True, compared)
    return failed_verdict(compared, causes_of_repeat(reference, repeated, difference), differences)


CHECK = Check(
    "repeatable",
    "the same command twice gives the same weights, rows and best model",
    judge_repeating,
)
