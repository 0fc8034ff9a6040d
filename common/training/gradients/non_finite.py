"""The errors for losses and gradients that are NaN or infinite, with advice for the next run."""

from common.errors import TrainingError

LOOK_AT_THE_DATA = (
    "also look for damaged samples in the data, and for batches in which all labels are ignored"
)
DATA_AND_MODEL_FIRST = (
    "look at the data first, for values that are NaN, infinite or very large and for batches in "
    "which all labels are ignored; then at the model and the loss, for a division by 0 or a "
    "logarithm of 0"
)


def first_update_error(culprit: str, mixed_precision: str) -> TrainingError:
    """Return the error for the first update. No learning rate can be the cause then.

    Args:
        culprit: "the loss" or "a gradient".
        mixed_precision: the precision of the run; "no" is fp32, the highest one.
    """
    advice = DATA_AND_MODEL_FIRST
    if mixed_precision != "no":
        advice += "; or start a new run with --mixed-precision no"
    return TrainingError(
        f"{culprit} of update 1 is NaN or infinite, before any step has changed the weights",
        advice=advice,
    )


def non_finite_loss_error(global_step: int) -> TrainingError:
    """Return the error for a loss that is NaN, in a loop that does not clip gradients."""
    return TrainingError(
        f"the loss became NaN in update {global_step} or shortly before",
        advice=(
            "start a new run with a lower --learning-rate, and call "
            "run.clip_grad_norm_(model, optimizer) before each step, so that such "
            f"gradients change no weights; {LOOK_AT_THE_DATA}"
        ),
    )


def non_finite_update_error(
    global_step: int, max_grad_norm: float, mixed_precision: str
) -> TrainingError:
    """Return the error for a loss or gradients that are not finite, in a loop that clips.

    The advice names only flags that have an effect in a new run.

    Args:
        max_grad_norm: the largest norm of the gradients; 0: nothing was clipped.
        mixed_precision: the precision of the run; "no" is fp32, the highest one.
    """
    changes = ["a lower --learning-rate or --max-grad-norm"]
    if max_grad_norm == 0:
        changes = ["a lower --learning-rate", "--max-grad-norm 1"]
    if mixed_precision != "no":
        changes.append("--mixed-precision no")
    flags = ", or with ".join(changes)
    return TrainingError(
        (
            f"a gradient or the loss became NaN or infinite in update {global_step} or "
            "shortly before; updates with such gradients are not applied"
        ),
        advice=f"start a new run with {flags}; {LOOK_AT_THE_DATA}",
    )


def overflow_error(global_step: int, updates: int) -> TrainingError:
    """Return the error for fp16 updates in a row that overflowed, whatever their loss scale.

    Args:
        updates: how many there were, up to `global_step`.
    """
    return TrainingError(
        f"{updates} fp16 updates in a row overflowed by update {global_step} and were not applied",
        advice=(
            "start a new run with --mixed-precision bf16 (or no, if the device lacks bf16), or "
            "with a lower --learning-rate"
        ),
    )
