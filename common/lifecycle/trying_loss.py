"""Tries the recipe's loss before training: for the batch size that fits, and for the MFU."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from common.command_line.flag_reads import mark_read
from common.console import say
from common.errors import UserError
from common.failures.error_causes import is_lost_process, is_out_of_memory
from common.failures.sentences import cause_text
from common.failures.user_frames import user_line_of
from common.lifecycle.stages import Context, KeptParts, LoadedData
from common.measure.flops import ComputeLoss
from common.training.batch_size.checks import batch_norm_sentence, refuse_unsuitable_loss
from common.training.batch_size.choice import choose_batch_size
from common.training.batch_size.trials import time_size
from common.training.precision import compute_dtype


def try_loss(
    context: Context,
    loaded: LoadedData,
    kept: KeptParts,
    compute_loss: ComputeLoss,
    couples_samples: bool,
    passes: int,
) -> None:
    """Call the recipe's loss before training.

    `--auto-batch-size` tries micro-batches with it. The MFU, the share of the device's peak rate
    that the model uses, needs the operations of a sample.

    Args:
        couples_samples: whether a sample's loss depends on the other samples of its micro-batch.
            Then `--auto-batch-size` is refused.
        passes: how many forward and backward passes the loop makes with each micro-batch.

    Raises:
        UserError, TrainingError: `--auto-batch-size` finds no size; see `fit_batch_size`.
    """
    if context.config.auto_batch_size:
        fit_batch_size(context, loaded, kept, compute_loss, couples_samples)
    model_structure = context.accelerator.structure_of(kept.bare_model)
    training_samples = loaded.loaders["train"].samples
    dtype = compute_dtype(context.accelerator)
    context.meters.find_flops(model_structure, compute_loss, training_samples, dtype, passes)


def fit_batch_size(
    context: Context,
    loaded: LoadedData,
    kept: KeptParts,
    compute_loss: ComputeLoss,
    couples_samples: bool,
) -> None:
    """For `--auto-batch-size`, use the fastest micro-batch size that makes the same updates.

    Raises:
        UserError: another size would change the updates, the loss communicates between ranks, or it
            fails on a batch of the loader.
        TrainingError: not even one sample fits into memory.
    """
    config = context.config
    model = kept.bare_model
    train_loader = loaded.loaders["train"]
    world_size = context.accelerator.num_processes
    try_size = partial(time_size, model, kept.optimizer, train_loader, compute_loss)
    requested = config.batch_size
    with explained_errors():
        refuse_unsuitable_loss(model, train_loader, compute_loss, world_size, couples_samples)
        chosen, accumulation = choose_batch_size(
            try_size, loaded.loaders, config, context.accelerator
        )
    mark_read(config, "auto_batch_size")
    if chosen != requested:
        use_batch_size(context, loaded, chosen, accumulation)
    sentence = batch_norm_sentence(model, requested, chosen)
    if sentence:
        say(sentence)


@contextmanager
def explained_errors() -> Iterator[None]:
    """Turn an error of the recipe's loss on a batch of the loader into a `UserError`.

    The loop may change a batch before it calls the function, so the same error need not occur
    there. Errors that say nothing about the batch pass unchanged: memory that ran out, a lost
    process, and those that no line of the recipe has raised.
    """
    try:
        yield
    except Exception as error:
        line = user_line_of(error)
        if line is None or is_out_of_memory(error) or is_lost_process(error):
            raise
        raise UserError(
            "--auto-batch-size calls the function that is passed to run.start with a batch as the "
            f"loader yields it, and it failed there in {line} ({cause_text(error)})",
            advice=(
                "let this function or the data set make what the loop adds to a batch, or pass "
                "--no-auto-batch-size"
            ),
        ) from None


def use_batch_size(
    context: Context, loaded: LoadedData, batch_size: int, accumulation: int
) -> None:
    """Let the run train and evaluate with micro-batches of another size.

    Args:
        batch_size: the samples of a micro-batch on each rank.
        accumulation: the micro-batches of an update.
    """
    context.flag_resolution.resolve(batch_size=batch_size, gradient_accumulation_steps=accumulation)
    context.accelerator.gradient_accumulation_steps = accumulation
    context.meters.use_accumulation(accumulation)
    for loader in loaded.loaders.values():
        loader.cut_into(batch_size, accumulation)
