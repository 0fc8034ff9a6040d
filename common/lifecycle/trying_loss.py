"""Tries the recipe's loss before training: for the batch size that fits, and for the MFU."""

from functools import partial

from common.command_line.flag_reads import mark_read
from common.console import say
from common.lifecycle.stages import Context, KeptParts, LoadedData
from common.measure.flops import ComputeLoss
from common.training.batch_size import (
    attempt,
    batch_norm_sentence,
    fit_batch_size,
    refuse_unfit_loss,
)
from common.training.precision import compute_dtype


def try_loss(
    context: Context,
    loaded: LoadedData,
    kept: KeptParts,
    compute_loss: ComputeLoss,
    couples_samples: bool,
) -> None:
    """Call the recipe's loss before training.

    `--auto-batch-size` tries micro-batches with it, and the MFU needs the operations of a sample.

    Args:
        couples_samples: whether a sample's loss depends on the other samples of its micro-batch.
            Then `--auto-batch-size` is refused.
    """
    if context.config.auto_batch_size:
        choose_batch_size(context, loaded, kept, compute_loss, couples_samples)
    structure = context.accelerator.structure_of(kept.bare_model)
    samples = loaded.loaders["train"].samples
    dtype = compute_dtype(context.accelerator)
    context.meters.find_flops(structure, compute_loss, samples, dtype)


def choose_batch_size(
    context: Context,
    loaded: LoadedData,
    kept: KeptParts,
    compute_loss: ComputeLoss,
    couples_samples: bool,
) -> None:
    """Choose the fastest micro-batch size that makes the same updates, for `--auto-batch-size`.

    The choice sets the flags, the loaders and the accumulation of gradients.

    Raises:
        UserError: another size would change the updates, or the loss communicates between ranks.
        TrainingError: not even one sample fits into memory.
    """
    config = context.config
    model = kept.bare_model
    train_loader = loaded.loaders["train"]
    world_size = context.accelerator.num_processes
    refuse_unfit_loss(model, train_loader, compute_loss, world_size, couples_samples)
    try_size = partial(attempt, model, kept.optimizer, train_loader, compute_loss)
    batch_size_before = config.batch_size
    batch_size, accumulation = fit_batch_size(try_size, loaded.loaders, config, context.accelerator)
    context.resolution.resolve(batch_size=batch_size, gradient_accumulation_steps=accumulation)
    mark_read(config, "auto_batch_size")
    sentence = batch_norm_sentence(model, batch_size_before, batch_size)
    if sentence:
        say(sentence)
    context.meters.accumulate(accumulation)
