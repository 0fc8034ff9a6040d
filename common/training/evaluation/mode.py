"""The state around an evaluation: the model's mode, its buffers, and the random generators.

`common.lifecycle.evaluations` decides when an evaluation is due.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch import nn

from common.checkpoints.adapters import RandomState
from common.data.order import hash_integers
from common.data.samples import seed_cpu_generators
from common.models.compile import as_written
from common.system.devices import has_float64, seed_generator

# One of the integers from which the seed of evaluations is hashed. This integer keeps their random
# numbers apart from those that order the samples.
EVALUATION_STREAM = 2


@contextmanager
def evaluation_mode(
    accelerator: Accelerator, model: nn.Module, generators: RandomState, seed: int
) -> Iterator[Callable[[], None]]:
    """Put a bare model into evaluation mode, with its buffers averaged over ranks.

    Each evaluation uses the same random numbers, so that figures can be compared. At the end, the
    random generators and the mode of each module are restored. The buffers stay averaged. After an
    error nothing is restored.

    Yields:
        A function that restores this rank's own buffers. Call it after an evaluation that was
        abandoned, so that the checkpoint has the buffers of an uninterrupted run.
    """
    random_states = generators.state_dict()
    training_modes = {module: module.training for module in model.modules()}
    restore_buffers = average_buffers(accelerator, model)
    model.eval()
    seed_generators(
        generators.device, hash_integers(seed, accelerator.process_index, EVALUATION_STREAM)
    )
    # Training can't use tensors that were made in `torch.inference_mode`. FSDP2 keeps tensors of a
    # forward pass, and so does a model that caches a table of positions. A recipe may also weigh
    # its loss by the errors of an evaluation.
    with torch.no_grad(), as_written(model):
        yield restore_buffers
    for module, training in training_modes.items():
        module.training = training
    generators.load_state_dict(random_states)


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the generators that `RandomState` restores: torch's, NumPy's, Python's, the device's."""
    seed_cpu_generators(seed)
    seed_generator(device, seed)


def keep_buffers(model: nn.Module) -> Callable[[], None]:
    """Copy all buffers of `model`; return a function that restores them to their current values.

    The rehearsal and `--auto-batch-size` use it, because they must leave no trace in the buffers.
    The rehearsal is an evaluation, which averages buffers. `--auto-batch-size` makes forward passes
    in training mode, which change batch norm's statistics.
    """
    buffers = [*model.buffers()]
    values = [buffer.clone() for buffer in buffers]

    def restore_buffers() -> None:
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)

    return restore_buffers


def average_buffers(accelerator: Accelerator, model: nn.Module) -> Callable[[], None]:
    """Average a model's buffers over ranks; return a function that restores this rank's own.

    By default, training does not synchronise buffers, so each rank has its own statistics of batch
    norm. With the averages, all ranks evaluate the same model. Buffers of integers, such as
    counters, stay as they are.

    The averages are computed in float64 if the device has it. A narrower buffer that is equal on
    all ranks then keeps its bits. In its own dtype, its sum could be rounded, or infinite: a mask
    may hold the lowest float32.
    """
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if accelerator.num_processes == 1 or not buffers:
        return lambda: None
    sizes = [buffer.numel() for buffer in buffers]

    def set_buffers(flat: torch.Tensor) -> None:
        for buffer, values in zip(buffers, flat.split(sizes), strict=True):
            buffer.copy_(values.view_as(buffer))

    own_values = torch.cat([buffer.flatten() for buffer in buffers])  # for one collective
    wide_values = own_values.double() if has_float64(own_values.device) else own_values
    set_buffers(accelerator.reduce(wide_values, "mean"))
    return lambda: set_buffers(own_values)
