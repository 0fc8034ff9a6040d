"""The passes of an evaluation over its split, with the outcomes of the samples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.tools.prove.recomputation.sample_outcomes import (
    BatchOutcomes,
    SampleOutcome,
    first_of_each_sample,
    outcomes_of_columns,
)
from common.tools.prove.records.instrument_records import EvaluationLoss
from common.tools.prove.records.observed_run import ObservedRun
from common.tools.prove.records.run_records import EvaluationFigures


@dataclass(frozen=True)
class SplitPass:
    """The outcomes of one pass over a split in an evaluation.

    They come from one loss of each batch. If the recipe computes several losses for a batch, the
    pass has a `SplitPass` for each of these.
    """

    split: str
    batches_by_rank: list[list[BatchOutcomes]]
    calls: int  # the most losses that the recipe computes for a batch of the pass

    @property
    def batches(self) -> list[BatchOutcomes]:
        """The batches of all ranks."""
        return [batch for batches in self.batches_by_rank for batch in batches]

    @property
    def outcomes(self) -> list[SampleOutcome]:
        """All outcomes, including those that repeat a sample."""
        return [outcome for batch in self.batches for outcome in batch]

    @property
    def unique_outcomes(self) -> list[SampleOutcome]:
        """The first outcome of each sample."""
        return first_of_each_sample(self.outcomes)


def split_passes_of_evaluation(run: ObservedRun, evaluation: EvaluationFigures) -> list[SplitPass]:
    """Return all passes of one evaluation over its split."""
    key = (evaluation.step, evaluation.phase, evaluation.split)
    losses_by_rank: list[list[EvaluationLoss]] = []
    for process in run.processes_of_launch(0):
        losses = []
        for loss in process.of(EvaluationLoss):
            if (loss.step, loss.phase, loss.split) == key:
                losses.append(loss)
        losses_by_rank.append(losses)
    return split_passes_of(losses_by_rank)


def split_passes_of(losses_by_rank: Sequence[Sequence[EvaluationLoss]]) -> list[SplitPass]:
    """Return each pass over a split, once for each loss that the recipe computes per batch.

    A pass is left out if a rank has no batch of it, or if the outcomes of a batch are unknown.

    Args:
        losses_by_rank: for each rank, the losses that one evaluation computed.
    """
    # The batches of each rank, by the number of the pass and the number of the call.
    batches_by_key: dict[tuple[int, int], list[list[BatchOutcomes]]] = {}
    splits: dict[int, str] = {}  # by the number of the pass
    most_calls: dict[int, int] = {}  # the most losses of a batch, by the number of the pass
    for rank, losses in enumerate(losses_by_rank):
        for numbered in numbered_losses(losses):
            pass_number = numbered.pass_number
            splits[pass_number] = numbered.loss.split
            most_calls[pass_number] = max(most_calls.get(pass_number, 0), numbered.call + 1)
            key = (pass_number, numbered.call)
            batches_by_rank = batches_by_key.setdefault(key, [[] for _ in losses_by_rank])
            batches_by_rank[rank].append(outcomes_of_batch(numbered.loss))
    split_passes = []
    for (pass_number, _), batches_by_rank in batches_by_key.items():
        has_all_ranks = all(batches_by_rank)
        has_all_outcomes = all(batch for batches in batches_by_rank for batch in batches)
        if has_all_ranks and has_all_outcomes:
            split_pass = SplitPass(splits[pass_number], batches_by_rank, most_calls[pass_number])
            split_passes.append(split_pass)
    return split_passes


class NumberedLoss(NamedTuple):
    """A loss of an evaluation, and where in the evaluation it was computed."""

    # Passes are counted within the evaluation, from 0, so all ranks give a pass the same number.
    pass_number: int
    # The number of the call of a loss function within the batch, from 0.
    call: int
    loss: EvaluationLoss


def numbered_losses(losses: Sequence[EvaluationLoss]) -> Iterator[NumberedLoss]:
    """Yield each loss of a rank in an evaluation with its numbers.

    Args:
        losses: in the order of time.
    """
    pass_numbers: dict[int, int] = {}  # by the number of the pass within the launch
    call = 0
    previous_batch: tuple[int, list[int]] | None = None
    for loss in losses:
        pass_number = pass_numbers.setdefault(loss.pass_number, len(pass_numbers))
        batch = (loss.pass_number, loss.sample_indices)
        call = call + 1 if batch == previous_batch else 0
        previous_batch = batch
        yield NumberedLoss(pass_number, call, loss)


def outcomes_of_batch(loss: EvaluationLoss) -> BatchOutcomes:
    """Return the outcomes of a batch; empty if they are not known for each sample."""
    return outcomes_of_columns(loss.sample_indices, loss.sample_losses, loss.outcomes)
