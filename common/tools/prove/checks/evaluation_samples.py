"""Finds mistakes in how evaluations use their samples: each sample of a split counts once."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from common.system.wording import counted
from common.tools.prove.checks.samples_in_words import first_samples
from common.tools.prove.records.instrument_records import EvaluatedSamples
from common.tools.prove.records.observed_run import ObservedProcess, ObservedRun
from common.tools.prove.records.run_records import EvaluationBatch, EvaluationFigures
from common.tools.prove.verdicts import Cause

ADVICE = (
    "read the whole loader, `for batch in loader`; with run.equal_batches(loader), apply the mask "
    "to everything that is added up"
)


def causes_in_evaluations(run: ObservedRun, element_counts: Mapping[str, float]) -> list[Cause]:
    """Return the mistakes in the samples of a run's evaluations, at most one of each sort.

    Args:
        element_counts: the result of `counts_of_elements` for the reference run.
    """
    causes = (cause_of_wrong_evaluation(run, element_counts), cause_of_unseen_samples(run))
    return [cause for cause in causes if cause is not None]


@dataclass(frozen=True)
class CompleteEvaluation:
    """The samples that all ranks have read in an evaluation that was not interrupted."""

    step: int
    phase: str
    split: str  # the split of the figures
    figures: dict[str, float]
    read_counts: dict[str, Counter[int]]  # how often each sample was read, by split

    @property
    def in_words(self) -> str:
        """The evaluation in words, such as "the final evaluation after update 6"."""
        return f"the {self.phase} evaluation after update {self.step}"


def complete_evaluations(run: ObservedRun) -> list[CompleteEvaluation]:
    """Return the evaluations of all launches, except those that were interrupted."""
    evaluations = []
    for number in sorted({process.launch for process in run.processes}):
        processes = run.processes_of_launch(number)
        for record in processes[0].of(EvaluationFigures):
            read_counts: defaultdict[str, Counter[int]] = defaultdict(Counter)
            for batch in batches_of(processes, record):
                read_counts[batch.split].update(batch.sample_indices)
            evaluations.append(
                CompleteEvaluation(
                    record.step, record.phase, record.split, record.figures, dict(read_counts)
                )
            )
    return evaluations


def batches_of(
    processes: list[ObservedProcess], evaluation: EvaluationFigures
) -> Iterator[EvaluationBatch]:
    """Yield the batches of one evaluation of all ranks.

    Args:
        processes: the processes of one launch.
        evaluation: the record of its figures.
    """
    for process in processes:
        for record in process.of(EvaluationBatch):
            if (record.step, record.phase) == (evaluation.step, evaluation.phase):
                yield record


def counts_of_elements(reference: ObservedRun) -> dict[str, float]:
    """Return the logged counts that are no numbers of samples, by split.

    An evaluation may count elements of samples, such as the tokens whose labels are not ignored.
    Its count says nothing about the samples if it read each of them equally often.

    Args:
        reference: the run on one process.
    """
    counts = {}
    for evaluation in complete_evaluations(reference):
        count = evaluation.figures.get("count")
        if count is None or not count.is_integer():
            continue
        read_counts = evaluation.read_counts.get(evaluation.split, Counter())
        has_repetitions = len(set(read_counts.values())) > 1
        counts_samples = count in (len(read_counts), read_counts.total())
        if not has_repetitions and not counts_samples:
            counts[evaluation.split] = count
    return counts


def element_counts_in_words(element_counts: Mapping[str, float]) -> str:
    """Return a remark on the counts that are no numbers of samples; empty if there are none."""
    remark = ""
    for split, count in element_counts.items():
        remark += (
            f"; `count` of {split} is {count:g}, so it counts elements of its samples, such as "
            "labels (each sample was read equally often; check that this is meant)"
        )
    return remark


def cause_of_wrong_evaluation(
    run: ObservedRun, element_counts: Mapping[str, float]
) -> Cause | None:
    """Return the cause for the first evaluation with missing or repeated samples, or None."""
    for evaluation in complete_evaluations(run):
        split = evaluation.split
        counts_elements = split in element_counts
        cause = cause_of_evaluation(
            evaluation, run.start_record.split_sizes[split], counts_elements
        )
        if cause is not None:
            return cause
    return None


def cause_of_evaluation(
    evaluation: CompleteEvaluation, size: int, counts_elements: bool
) -> Cause | None:
    """Return the cause if an evaluation leaves out a sample or counts one too often, or None.

    Args:
        size: the number of samples in the split.
        counts_elements: whether the reference run counts elements of the samples.
    """
    read_counts = evaluation.read_counts.get(evaluation.split)
    if read_counts is None:
        return cause_of_other_split(evaluation)
    if len(read_counts) < size:
        return Cause(
            f"{evaluation.in_words} read {len(read_counts)} of the {size} samples of "
            f"{evaluation.split}",
            ADVICE,
        )
    return cause_of_count(evaluation, size, counts_elements)


def cause_of_count(
    evaluation: CompleteEvaluation, size: int, counts_elements: bool
) -> Cause | None:
    """Return the cause if an evaluation that has read all samples counts them wrongly, or None.

    Args:
        size: the number of samples in the split.
        counts_elements: whether the reference run counts elements of the samples.
    """
    read_counts = evaluation.read_counts[evaluation.split]
    # An evaluation may read its split several times. Each pass reads each sample at least once.
    passes = min(read_counts.values())
    repeated = [index for index, count in read_counts.items() if count > passes]
    logged_count = evaluation.figures.get("count")
    if logged_count is None and repeated:
        return Cause(
            f"{evaluation.in_words} read {len(read_counts)} samples"
            f"{repetitions_in_words(repeated)}, and logs no `count`",
            f"{ADVICE}; log `count`, the number of samples that count",
        )
    if logged_count in (None, size) or (counts_elements and not repeated):
        return None
    sentence = (
        f"{evaluation.in_words} counted {logged_count:g} samples, and {evaluation.split} has {size}"
    )
    if repeated:
        return Cause(
            f"{sentence}{repetitions_in_words(repeated)}: samples that only fill up a batch must "
            "not count",
            ADVICE,
        )
    times = "once" if passes == 1 else f"{passes} times"
    return Cause(
        f"{sentence}, each of which it read {times}",
        "count each sample once, and add up `count` over all processes, as Sums does",
    )


def repetitions_in_words(repeated: list[int]) -> str:
    """Return the end of a sentence about the samples that an evaluation read too often."""
    return (
        f", and it read {counted(len(repeated), 'sample')} twice or more "
        f"({first_samples(repeated)})"
    )


def cause_of_other_split(evaluation: CompleteEvaluation) -> Cause | None:
    """Return the cause if an evaluation reads only splits that its figures do not stand for.

    This function is for an evaluation that has read no sample of its split. If the recipe has made
    the loader itself, or reads none, the samples are unknown, and the result is None.
    """
    splits = sorted(evaluation.read_counts)
    are_samples_unknown = not splits or "" in splits  # "" stands for a loader of the recipe's own
    if are_samples_unknown:
        return None
    return Cause(
        f"{evaluation.in_words} stands for the split {evaluation.split}, but read only "
        f"{' and '.join(splits)}",
        f"evaluate on the loader of {evaluation.split} that run.loaders(data) returns",
    )


def cause_of_unseen_samples(run: ObservedRun) -> Cause | None:
    """Return the cause if an evaluation reads samples without passing them to the model, or None.

    If the model got no sample of the split, the recipe evaluates without it. That can't be judged.
    """
    for process, record in run.all(EvaluatedSamples):
        if 0 < len(record.unseen_indices) < record.sample_count:
            rank = f" on process {process.rank}" if run.world_size > 1 else ""
            unseen = first_samples(record.unseen_indices)
            return Cause(
                f"the {record.phase} evaluation after update {record.step}{rank} read "
                f"{record.sample_count} samples of {record.split or 'its data'}, but did not pass "
                f"{len(record.unseen_indices)} of them to the model ({unseen})",
                "pass all samples of each batch to the model, also of the last, smaller batch",
            )
    return None
