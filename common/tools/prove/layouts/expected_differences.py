"""Finds out why two correct runs may make different updates in different layouts.

A layout decides which samples share a micro-batch, and how many draws of random numbers an update
makes. If the result depends on either, two layouts can't be compared, and the recipe has no
mistake.
"""

from common.tools.prove.records.instrument_records import (
    CollateDraw,
    MixingModule,
    OwnDraw,
    SampleMixing,
)
from common.tools.prove.records.observed_run import ObservedRun, differing_common_keys
from common.tools.prove.records.run_records import MicroBatch, RecordedMicroBatch


def drawn_generators(run: ObservedRun) -> list[str]:
    """Return the names of the random generators from which the loop draws as it uses a batch.

    A generator that the recipe has made itself is described by its use, because it has no name.
    """
    names: set[str] = set()
    for process in run.processes:
        micro_batch: MicroBatch | None = None
        for record in process.records:
            if isinstance(record, MicroBatch):
                micro_batch = record
            elif isinstance(record, RecordedMicroBatch) and micro_batch is not None:
                before = micro_batch.generator_digests
                after = record.generator_digests
                names.update(differing_common_keys(before, after))
    # The loop may also draw from a generator that it passes to an operation of torch.
    own_draws = {f"that it passes to {draw.operation}" for _, draw in run.all(OwnDraw)}
    return [*sorted(names), *sorted(own_draws)]


def generators_drawn_in_collate(run: ObservedRun) -> list[str]:
    """Return the names of the random generators from which a collate function draws."""
    names: set[str] = set()
    for _, draw in run.all(CollateDraw):
        names.update(draw.generators)
    return sorted(names)


def sample_mixing_of(run: ObservedRun) -> SampleMixing:
    """Return the record of how a run's samples affect each other: by batch norms, or by the loss.

    Each layout puts different samples together, so such effects may forbid a comparison. If the run
    wrote no record, the result is an empty one.
    """
    for _, sample_mixing in run.all(SampleMixing):
        return sample_mixing
    return SampleMixing(step=0, batch_norms=[], couples_samples=False)


def mixing_modules_of(run: ObservedRun) -> list[str]:
    """Return the class names of the modules that mix samples, except batch norms.

    The output of such a module for one sample depends on the other samples of the micro-batch.
    """
    return sorted({mixing_module.module_class for _, mixing_module in run.all(MixingModule)})


def reason_processes_differ(mixing: SampleMixing) -> str | None:
    """Return why one process and two must make different updates; None if they need not."""
    if "SyncBatchNorm" in mixing.batch_norms:
        return "SyncBatchNorm mixes the samples of all processes"
    if mixing.batch_norms and mixing.couples_samples:
        layers = " and ".join(mixing.batch_norms)
        return (
            f"the loss compares samples with each other, so one process needs a larger batch, in "
            f"which {layers} has other statistics"
        )
    return None
