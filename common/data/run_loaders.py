"""Makes the loaders of a run: one for each split, with the order of its samples."""

from collections.abc import Mapping
from typing import Protocol

import torch

from common.config import TrainingConfig
from common.data.iterable import IterableOrder, IterableSamples
from common.data.loader import Loader, RunSignals, free_memory_bytes
from common.data.order import EvaluationOrder, TrainingOrder
from common.data.samples import Samples
from common.errors import UserError
from common.system.wording import counted


class RunAccelerator(Protocol):
    """What loaders need of a run's Accelerator, whose class is in a higher layer."""

    @property
    def device(self) -> torch.device: ...

    @property
    def num_processes(self) -> int: ...

    @property
    def process_index(self) -> int: ...

    @property
    def mesh(self) -> object: ...  # None unless the ranks hold different parts of one model


def make_loaders(
    config: TrainingConfig,
    accelerator: RunAccelerator,
    splits: Mapping[str, Samples],
    signals: RunSignals,
) -> dict[str, Loader]:
    """Return a loader for each split, by the split's name.

    The loader of train yields samples in a shuffled order. The others yield each sample once.

    Args:
        signals: what the loaders ask the run between two batches.

    Raises:
        UserError: the flags don't suit an `IterableDataset`, or a split has too few samples.
    """
    loaders: dict[str, Loader] = {}
    # The samples of all splits together may take half of the free memory.
    memory_budget = free_memory_bytes(accelerator.device) / 2
    # With several ranks, this timeout is shorter than that of a collective. So a rank that gets no
    # batch reports this before the other ranks, which wait for it, report a lost rank.
    timeout = config.collective_timeout * (1.0 if accelerator.num_processes == 1 else 0.9)
    for name, samples in splits.items():
        order: TrainingOrder | EvaluationOrder
        if isinstance(samples, IterableSamples):
            order = iterable_order(config, accelerator, name)
        elif name == "train":
            order = training_order(config, accelerator, samples)
        else:
            order = evaluation_order(config, accelerator, name, samples)
        loader = Loader(
            samples,
            order,
            accelerator.device,
            config.data_placement,
            config.num_workers,
            seed=config.seed,
            memory_budget=memory_budget,
            timeout=timeout,
            signals=signals,
        )
        memory_budget -= loader.placed_bytes
        loaders[name] = loader
    return loaders


def iterable_order(config: TrainingConfig, accelerator: RunAccelerator, name: str) -> IterableOrder:
    """Return an order of as many batches as the run has, for an `IterableDataset`.

    The data set chooses its samples itself. Its number of samples is not known, so the number of
    batches follows from `--max-steps`.

    Args:
        name: the name of the split.

    Raises:
        UserError: the number of batches does not follow from the flags, or the split is not train.
    """
    if config.max_steps is None or config.auto_batch_size or name != "train":
        if name != "train":
            advice = f"pass a map-style data set as split {name}"
        elif config.max_steps is None:
            advice = "pass --max-steps N"
        else:
            advice = "pass --no-auto-batch-size, and --batch-size N"
        raise UserError(
            "an IterableDataset does not state its number of samples, so it can only be used for "
            "training, with a stated number of updates of a stated size",
            advice=advice,
        )
    accumulation = config.gradient_accumulation_steps
    global_batch = config.batch_size * accumulation * accelerator.num_processes
    return IterableOrder(
        num_samples=config.max_steps * global_batch,
        batch_size=config.batch_size,
        accumulation=accumulation,
        world_size=accelerator.num_processes,
        rank=accelerator.process_index,
        seed=config.seed,
    )


def training_order(
    config: TrainingConfig, accelerator: RunAccelerator, samples: Samples
) -> TrainingOrder:
    """Return the shuffled order of the training split.

    Raises:
        UserError: the split has too few samples for one update.
    """
    batch_size = config.batch_size
    accumulation = config.gradient_accumulation_steps
    if config.evaluate_only:
        # A run that only evaluates makes a training loader as well. If it has too few samples for
        # one update, a smaller update keeps `TrainingOrder` from refusing them.
        samples_per_rank = len(samples) // accelerator.num_processes
        accumulation = min(accumulation, max(1, samples_per_rank))
        batch_size = min(batch_size, max(1, samples_per_rank // accumulation))
    # Samples in blocks are not ordered by length: a batch would need too many blocks at once.
    return TrainingOrder(
        num_samples=len(samples),
        batch_size=batch_size,
        accumulation=accumulation,
        world_size=accelerator.num_processes,
        rank=accelerator.process_index,
        seed=config.seed,
        lengths=samples.lengths if samples.blocks is None else None,
        blocks=samples.blocks,
    )


def evaluation_order(
    config: TrainingConfig, accelerator: RunAccelerator, name: str, samples: Samples
) -> EvaluationOrder:
    """Return the order of a split for evaluation.

    Args:
        name: the name of the split, for messages.

    Raises:
        UserError: the ranks share out a model, and have too few samples for equal batches.
    """
    world_size = accelerator.num_processes
    # Samples in blocks are not ordered by length here either; see `training_order`.
    order = EvaluationOrder(
        num_samples=len(samples),
        batch_size=config.batch_size,
        world_size=world_size,
        rank=accelerator.process_index,
        lengths=samples.lengths if samples.blocks is None else None,
        blocks=samples.blocks,
    )
    is_model_shared = accelerator.mesh is not None
    if is_model_shared and len(samples) // world_size < order.most_batches:
        advice = "add samples to this split, or start fewer processes"
        if len(samples) >= world_size:  # otherwise, a process has no sample in any case
            advice = "add samples to this split, raise --batch-size, or start fewer processes"
        raise UserError(
            (
                f"split {name} has {counted(len(samples), 'sample')}, too few to give each of the "
                f"{world_size} processes of a sharded model the same number of batches"
            ),
            advice=advice,
        )
    return order
