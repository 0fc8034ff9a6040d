"""Chooses how many batches to accumulate, so that each update has a given number of samples.

This number of samples is the effective batch. A resumed run keeps that of its start, although the
number of processes may have changed. A new run gets it from `--effective-batch-size`, if that is
set.
"""

import math
from dataclasses import Field, replace
from typing import ClassVar, Protocol, TypeVar

from common.errors import UserError
from common.system.launch_variables import world_size
from common.system.wording import counted


class ResumableConfig(Protocol):
    """The flags that a resume reads or sets. The `Config` of every recipe has them."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]
    resume: str | None
    dataset: str
    output_dir: str | None
    batch_size: int
    gradient_accumulation_steps: int
    effective_batch_size: int | None


Config = TypeVar("Config", bound=ResumableConfig)


def keep_effective_batch(config: Config, defaults: Config, effective_batch: int) -> Config:
    """Return the configuration whose updates have as many samples as those of the saved run.

    If the command line does not choose sizes itself, the accumulation is adapted to the current
    number of processes.

    Args:
        config: the flags of the command line over those of the saved run.
        defaults: the flags of the saved run.
        effective_batch: the samples in an update of the saved run.

    Raises:
        UserError: the flags of the command line make updates of another size, or the current
            number of processes allows no updates of this size with `batch_size`.
    """
    if config.effective_batch_size not in (None, effective_batch):
        raise UserError(
            (
                f"--effective-batch-size {config.effective_batch_size} can't be used, because each "
                f"update of the run to resume has {effective_batch} samples"
            ),
            advice=(
                "leave --effective-batch-size out, or start another run without --resume in "
                "another directory"
            ),
        )
    batch_size = config.batch_size
    accumulation = config.gradient_accumulation_steps
    saved_sizes = (defaults.batch_size, defaults.gradient_accumulation_steps)
    # If the command line does not choose other sizes, choose the accumulation here.
    if config.effective_batch_size or (batch_size, accumulation) == saved_sizes:
        return with_effective_batch(config, effective_batch)
    processes = world_size()
    product = batch_size * accumulation * processes
    if product != effective_batch:
        raise UserError(
            (
                f"each update of the run to resume has {effective_batch} samples, but --batch-size "
                f"{batch_size} × --gradient-accumulation-steps {accumulation} × "
                f"{counted(processes, 'process', 'processes')} is {product}"
            ),
            advice=advice_on_sizes(config, effective_batch),
        )
    return config


def with_effective_batch(config: Config, effective_batch: int) -> Config:
    """Return the configuration with the accumulation for updates of `effective_batch` samples.

    Raises:
        UserError: no number of accumulated batches makes such updates.
    """
    processes = world_size()
    batch_size = config.batch_size
    if batch_size < 1:  # avoid a division by zero: `check_limits` refuses this size with a message
        return replace(config, gradient_accumulation_steps=effective_batch // processes)
    if effective_batch % (batch_size * processes) == 0:
        accumulation = effective_batch // (batch_size * processes)
        return replace(config, gradient_accumulation_steps=accumulation)
    problem = f"--effective-batch-size {effective_batch} is"
    if config.effective_batch_size is None:  # the run to resume states the size
        problem = f"each update of the run to resume has {effective_batch} samples, which is"
    raise UserError(
        (
            f"{problem} not a multiple of {batch_size * processes} (--batch-size {batch_size} × "
            f"{counted(processes, 'process', 'processes')})"
        ),
        advice=advice_on_sizes(config, effective_batch),
    )


def advice_on_sizes(config: ResumableConfig, effective_batch: int) -> str:
    """Return the advice to pass sizes that make updates of `effective_batch` samples.

    If no sizes do so with the current number of processes, the advice names another number of
    processes.
    """
    processes = world_size()
    fitting_processes = math.gcd(effective_batch, processes)  # divides the effective batch
    share = effective_batch // fitting_processes  # samples of each process in an update
    batch_size = nearest_divisor(share, config.batch_size)
    sizes = f"--batch-size {batch_size}"
    if config.effective_batch_size is None:  # otherwise, the accumulation follows from the batch
        sizes += f" --gradient-accumulation-steps {share // batch_size}"
    if fitting_processes == processes:
        return f"pass {sizes}"
    return (
        f"start a number of processes by which {effective_batch} can be divided, such as "
        f"{fitting_processes} with {sizes}"
    )


def nearest_divisor(number: int, size: int) -> int:
    """Return the divisor of `number` whose ratio to `size` is closest to 1.

    `advice_on_sizes` advises it as a batch size instead of `size`. It is at most twice `size`,
    because a larger batch may not fit into memory.
    """
    divisors = (n for n in range(1, min(2 * size, number) + 1) if number % n == 0)
    # There is no such divisor for a `size` below 1, which a user may pass by mistake.
    return min(divisors, key=lambda divisor: abs(math.log(divisor / size)), default=1)
