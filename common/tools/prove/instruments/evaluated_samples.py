"""Records which samples of an evaluation reach the model.

A loader gives a sample to the evaluation, but the evaluation may still leave it out: for example,
it may skip the last, smaller batch. So the instrument notes after which batches the model is
called, and compares the values that the loader gives with those that the model gets.

It writes an `EvaluatedSamples` for each split that an evaluation reads in `run.evaluating`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils import _pytree as tree

from common.data.loader import Loader
from common.data.samples import BatchesWithWork
from common.run import Run
from common.storage.value_digests import digest_of_state
from common.tools.prove.observation.session import Session
from common.tools.prove.records.base import Phase
from common.tools.prove.records.instrument_records import EvaluatedSamples


def install(session: Session) -> None:
    """Install the instrument. The probe calls this before the recipe runs."""
    observer = EvaluatedSamplesObserver(session)
    session.wrap(Run, "evaluating", observer.around_evaluating)
    session.wrap(Loader, "evaluation_batches", observer.around_evaluation_batches)


@dataclass
class EvaluatedBatch:
    """A batch that a loader has given to an evaluation, and the calls of the model that followed.

    The calls are those before the loader's next batch.
    """

    split: str
    digests: dict[int, str]  # the digest of each sample's values, by the sample's index
    model_calls: int = 0


@dataclass
class WatchedEvaluation:
    """The batches that loaders gave to one evaluation, and the values that its model got."""

    phase: Phase | None = None  # None until a loader has given a batch
    batches: list[EvaluatedBatch] = field(default_factory=list)
    model_calls: int = 0  # how often the model was called
    model_inputs: set[str] = field(default_factory=set)  # digests of values that the model got

    @property
    def is_batch_by_batch(self) -> bool:
        """Whether the model was called between the batches, and not only after the last one."""
        return len(self.batches) == 1 or any(batch.model_calls for batch in self.batches[:-1])

    def unseen_indices(self, split: str) -> list[int]:
        """Return the indices of a split's samples in batches that have not reached the model.

        A batch counts only if the model was not called before the next batch, and did not get the
        batch's values later. The result is empty if nothing can be told: if the recipe reads all
        batches before it calls the model, or if it changes all values before the model gets them.
        """
        sample_digests = {digest for batch in self.batches for digest in batch.digests.values()}
        if not self.is_batch_by_batch or sample_digests.isdisjoint(self.model_inputs):
            return []
        indices = []
        for batch in self.batches:
            if batch.split != split or batch.model_calls:
                continue
            for index, digest in batch.digests.items():
                if digest not in self.model_inputs:
                    indices.append(index)
        return indices


class EvaluatedSamplesObserver:
    """Watches the loaders and the model of each evaluation."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.evaluation: WatchedEvaluation | None = None  # None outside of an evaluation

    def __deepcopy__(self, memo: object) -> "EvaluatedSamplesObserver":
        """Return the same object. A recipe may copy its model, which has this object's hook."""
        return self

    @contextmanager
    def around_evaluating(
        self,
        original: Callable[[Run, nn.Module], AbstractContextManager[nn.Module]],
        run: Run,
        model: nn.Module,
    ) -> Iterator[nn.Module]:
        """Watch the model that an evaluation uses, and write the records at its end."""
        with original(run, model) as bare_model:
            outer_evaluation = self.evaluation  # a recipe may evaluate two models side by side
            evaluation = WatchedEvaluation()
            self.evaluation = evaluation
            hook = bare_model.register_forward_pre_hook(self.before_forward, with_kwargs=True)
            try:
                yield bare_model
            finally:
                hook.remove()
                self.evaluation = outer_evaluation
        self.write_records(evaluation)

    def around_evaluation_batches(
        self,
        original: Callable[[Loader, list[torch.Tensor]], BatchesWithWork],
        loader: Loader,
        micro_batches: list[torch.Tensor],
    ) -> BatchesWithWork:
        """Yield the batches of an evaluation, and note the values of their samples."""
        batches = original(loader, micro_batches)
        if not self.session.has_started:
            yield from batches
            return
        for indices, (batch, work) in zip(micro_batches, batches, strict=True):
            if self.evaluation is not None:
                self.note_batch(self.evaluation, loader, indices.tolist(), batch)
            yield batch, work

    def note_batch(
        self, evaluation: WatchedEvaluation, loader: Loader, indices: Sequence[int], batch: object
    ) -> None:
        """Note the values of each sample of a batch.

        Args:
            indices: the index of each sample of the batch.
        """
        evaluation.phase = self.session.evaluation_phase
        digests = digests_of_samples(largest_tensor(batch), len(indices))
        split = self.session.split_of(loader)
        digests_by_index = dict(zip(indices, digests, strict=True))
        evaluation.batches.append(EvaluatedBatch(split, digests_by_index))

    def before_forward(
        self, module: nn.Module, inputs: tuple[object, ...], named: Mapping[str, object]
    ) -> None:
        """Note the values that the model gets."""
        evaluation = self.evaluation
        if evaluation is None:
            return
        evaluation.model_calls += 1
        if evaluation.batches:
            evaluation.batches[-1].model_calls += 1
        sample_count = sum(len(batch.digests) for batch in evaluation.batches)
        for tensor in tensors_with_rows((inputs, named)):
            evaluation.model_inputs.add(digest_of(tensor))
            if len(tensor) <= sample_count:  # more rows are not samples, but tokens or the like
                evaluation.model_inputs.update(digest_of(row) for row in tensor)

    def write_records(self, evaluation: WatchedEvaluation) -> None:
        """Write an `EvaluatedSamples` for each split that an evaluation has read."""
        sample_counts: Counter[str] = Counter()
        for batch in evaluation.batches:
            sample_counts[batch.split] += len(batch.digests)
        for split, sample_count in sample_counts.items():
            assert evaluation.phase is not None  # `note_batch` has set it
            self.session.write(
                EvaluatedSamples(
                    step=self.session.step,
                    phase=evaluation.phase,
                    split=split,
                    sample_count=sample_count,
                    unseen_indices=evaluation.unseen_indices(split),
                    batch_count=len(evaluation.batches),
                    model_calls=evaluation.model_calls,
                )
            )


def largest_tensor(batch: object) -> torch.Tensor | None:
    """Return the tensor of a batch with the most elements; None if it has no tensor with rows."""
    return max(tensors_with_rows(batch), key=torch.Tensor.numel, default=None)


def digests_of_samples(largest: torch.Tensor | None, sample_count: int) -> list[str]:
    """Return a digest of the values that each sample has in the largest tensor of its batch.

    If this tensor has no row for each sample, as with texts that are packed into one row, all
    samples of the batch get the digest of the whole tensor. Without a tensor, no digest is equal to
    one of the model's.
    """
    if largest is None:
        return [""] * sample_count
    if len(largest) == sample_count:
        return [digest_of(row) for row in largest]
    return [digest_of(largest)] * sample_count


def tensors_with_rows(values: object) -> list[torch.Tensor]:
    """Return the dense tensors in nested containers that have values and at least one dimension."""
    tensors = []
    for leaf in tree.tree_leaves(values):
        if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided or leaf.is_nested:
            continue
        if leaf.ndim and leaf.device.type != "meta":
            tensors.append(leaf)
    return tensors


def digest_of(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's dtype and values, whatever its shape and memory layout."""
    return digest_of_state(tensor.detach().reshape(-1))
