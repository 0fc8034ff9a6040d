"""Sums of the training loss and metrics between two log lines, kept on the device."""

import math
from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, TypedDict

import torch
from accelerate import Accelerator

from common.errors import UserError
from common.measure.totals import (
    Total,
    elements_total,
    from_parts,
    mean_of,
    parts_on_host,
    total_with,
)
from common.measure.value_checks import Metrics, Value, measured_value, refuse_another_loss
from common.ranks.agreement import gather_from_ranks
from common.system import devices

SumsAndCounts = dict[str, tuple[float, float]]  # the sum and number of each metric's elements


def version_of(value: Value) -> int | None:
    """Return how often a tensor was changed in place; None if torch does not count its changes.

    Torch counts none for numbers, and none for tensors of `torch.inference_mode`.
    """
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return None
    return value._version


class TrainingSumsState(TypedDict):
    """The sums' part of a checkpoint."""

    # For each metric: the first part of the sum, the number of elements, and the sum's further
    # parts (see `parts_on_host`). The further parts come last, because a sum in float64 has none.
    metrics: dict[str, list[float]]
    numbers: dict[str, list[float]]  # the sum and the count of each metric's plain numbers
    last_update: list[float]  # losses of its micro-batches


class MeanLoss(NamedTuple):
    """The mean loss of some micro-batches."""

    value: float  # 0 if there are no micro-batches
    micro_batches: int


class TrainingSums:
    """Sums of the loss and of a recipe's metrics since the last log line, on one rank.

    `add` is called for each micro-batch and never waits for the device. At a log line, `take`
    fetches the sums, and the ranks gather them as rows of numbers.

    Ranks may record different metrics. A row therefore has the sums of the metrics that all ranks
    have agreed on, and the number of this rank's other metrics. The ranks exchange names only if
    one of them has other metrics, mostly at the first log line.
    """

    FOLD_EVERY = 32  # micro-batches that are summed at a time, in few and large operations

    def __init__(self, device: torch.device, accumulation: int) -> None:
        """Prepare empty sums.

        Args:
            accumulation: the micro-batches of an update.
        """
        self.device = device
        self.accumulation = accumulation
        devices.has_float64(device)  # asked now, because the first answer waits for the device
        # The losses of the last update's micro-batches.
        self.last_update_losses: deque[Value] = deque(maxlen=accumulation)
        self.pending: list[dict[str, Value]] = []  # micro-batches that are not in the sums yet
        # The version of each pending tensor when it was recorded; see `version_of`.
        self.pending_versions: list[dict[str, int | None]] = []
        # The sum of all elements of a metric's tensors, on the device, and the number of elements.
        self.device_sums: dict[str, Total] = {}
        self.device_counts: dict[str, float] = {}
        # The same for plain numbers and for tensors on the host.
        self.host_sums: SumsAndCounts = {}
        self.agreed_names = ["loss"]  # the metrics in a row, the same on all ranks

    def add(self, loss: torch.Tensor | float, metrics: Metrics) -> None:
        """Record one micro-batch, without waiting for the device.

        Args:
            loss: the micro-batch's mean loss, a plain number or a tensor. If the tensor has several
                elements, such as a loss for each sample, they are averaged like those of a metric.
            metrics: tensors of any shape or plain numbers, whose elements are averaged.

        Raises:
            UserError: a value is not a number, or a metric named "loss" is another tensor or number
                than `loss`.
        """
        # `measured_value` detaches tensors, because a pending tensor must not keep the graph of
        # activations.
        measured_loss = measured_value("loss", loss, "run.record")
        measured_metrics = {
            name: measured_value(name, value, "run.record") for name, value in metrics.items()
        }
        if "loss" in metrics:
            refuse_another_loss(loss, metrics["loss"], "run.record")
        measured = {"loss": measured_loss, **measured_metrics}
        self.pending.append(measured)
        self.pending_versions.append({name: version_of(value) for name, value in measured.items()})
        mean_loss = measured_loss
        if isinstance(measured_loss, torch.Tensor) and measured_loss.ndim:
            mean_loss = mean_of(measured_loss)
        self.last_update_losses.append(mean_loss)
        if len(self.pending) >= self.FOLD_EVERY:
            self.fold()

    def fold(self) -> None:
        """Add the pending micro-batches to the sums.

        Raises:
            UserError: the recipe has changed a tensor in place since it recorded it.
        """
        self.refuse_changed_tensors()
        for name in dict.fromkeys(chain.from_iterable(self.pending)):
            values = [metrics[name] for metrics in self.pending if name in metrics]
            tensors_on_device, numbers = self.divided(values)
            if tensors_on_device:
                self.fold_tensors(name, tensors_on_device)
            if numbers:
                self.fold_numbers(name, numbers)
        self.pending.clear()
        self.pending_versions.clear()

    def divided(self, values: list[Value]) -> tuple[list[torch.Tensor], list[float]]:
        """Divide a metric's values into those to add up on the device, and on the host.

        Returns:
            The tensors on the device; and all numbers on the host, plain ones and the elements of
            tensors.
        """
        tensors_on_device: list[torch.Tensor] = []
        numbers: list[float] = []
        for value in values:
            if not isinstance(value, torch.Tensor):
                numbers.append(value)
            elif self.is_left_on_host(value):
                numbers += value.double().flatten().tolist()
            else:
                tensors_on_device.append(value)
        return tensors_on_device, numbers

    def refuse_changed_tensors(self) -> None:
        """Raise a `UserError` if a pending tensor has another value than when it was recorded.

        Pending tensors are not copied, because a copy would cost time in each micro-batch.
        """
        for metrics, versions in zip(self.pending, self.pending_versions, strict=True):
            for name, value in metrics.items():
                if version_of(value) != versions[name]:
                    raise UserError(
                        f"the recipe changed the tensor {name!r} in place after run.record(...), "
                        "before its value was added up",
                        advice=f"pass a copy to run.record, as in {name}.clone()",
                        every_rank=True,
                    )

    def is_left_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the host while training runs on a device.

        Such a tensor is added up on the host: no copy to the device is needed.
        """
        return tensor.device.type == "cpu" and devices.is_accelerator(self.device)

    def fold_tensors(self, name: str, tensors: list[torch.Tensor]) -> None:
        """Add a metric's tensors in the pending micro-batches to their sum on the device."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor.flatten().to(self.device))
        # Add up each dtype separately, because `cat` of several may turn integers into bf16.
        for same_dtype in by_dtype.values():
            elements = torch.cat(same_dtype)
            total = elements_total(elements)
            self.device_sums[name] = total_with(total, self.device_sums.get(name))
            self.device_counts[name] = self.device_counts.get(name, 0.0) + elements.numel()

    def fold_numbers(self, name: str, numbers: list[float]) -> None:
        """Add a metric's numbers on the host in the pending micro-batches to their sum."""
        total, count = self.host_sums.get(name, (0.0, 0.0))
        self.host_sums[name] = (total + math.fsum(numbers), count + len(numbers))

    def take(self) -> SumsAndCounts:
        """Return this rank's sums and counts by metric, and reset both; wait for the device."""
        self.fold()
        sums_and_counts: SumsAndCounts = {}
        parts_of_sums = parts_on_host([*self.device_sums.values()])
        for name, parts in zip(self.device_sums, parts_of_sums, strict=True):
            sums_and_counts[name] = (sum(parts), self.device_counts[name])
        for name, (total, count) in self.host_sums.items():
            total_before, count_before = sums_and_counts.get(name, (0.0, 0.0))
            sums_and_counts[name] = (total_before + total, count_before + count)
        self.device_sums = {}
        self.device_counts = {}
        self.host_sums = {}
        return sums_and_counts

    def row(self, own_sums: SumsAndCounts) -> list[float]:
        """Return this rank's row of numbers, for the ranks to gather.

        Returns:
            [1 + 2 × agreed metrics]: the number of this rank's other metrics, then the sum and the
            count of each agreed metric.
        """
        other_names = own_sums.keys() - set(self.agreed_names)
        pairs = [own_sums.get(name, (0.0, 0.0)) for name in self.agreed_names]
        return [float(len(other_names)), *chain.from_iterable(pairs)]

    def agree_on_names(self, accelerator: Accelerator, own_sums: SumsAndCounts) -> None:
        """Add the metrics of all ranks to the agreed metrics; called on all ranks."""
        names_of_ranks = gather_from_ranks(accelerator, [*own_sums])
        self.agreed_names = [
            *dict.fromkeys([*self.agreed_names, *chain.from_iterable(names_of_ranks)])
        ]

    def means(self, rows: torch.Tensor) -> dict[str, float]:
        """Return the ``train/`` metrics, means over the elements of all ranks.

        Args:
            rows: the rows of all ranks, float64 [world_size, 1 + 2 × agreed metrics]; see `row`.
        """
        pairs = rows[:, 1:].sum(0).view(-1, 2).tolist()
        means = {}
        for name, (total, count) in zip(self.agreed_names, pairs, strict=True):
            if count:
                means[f"train/{name}"] = total / count
        return means

    def last_update_loss(self) -> MeanLoss:
        """Return this rank's mean loss of the last update, for the summary of the run.

        A rank has no loss if a run was resumed after its last update on more ranks than before.
        """
        micro_batches = len(self.last_update_losses)
        if not micro_batches:
            return MeanLoss(0.0, 0)
        return MeanLoss(float(torch.tensor([*self.last_update_losses]).mean()), micro_batches)

    def state_dict(self) -> TrainingSumsState:
        self.fold()
        metrics = {}
        parts_of_sums = parts_on_host([*self.device_sums.values()])
        for name, (first_part, *other_parts) in zip(self.device_sums, parts_of_sums, strict=True):
            metrics[name] = [first_part, self.device_counts[name], *other_parts]
        return {
            "metrics": metrics,
            "numbers": {name: [*pair] for name, pair in self.host_sums.items()},
            "last_update": [float(loss) for loss in self.last_update_losses],
        }

    def load_from_ranks(self, states: Sequence[TrainingSumsState]) -> None:
        """Restore the sums of one rank, or of several ranks added up."""
        for state in states:
            for name, (first_part, size, *other_parts) in state["metrics"].items():
                total = from_parts([first_part, *other_parts], self.device)
                self.device_sums[name] = total_with(total, self.device_sums.get(name))
                self.device_counts[name] = self.device_counts.get(name, 0.0) + float(size)
            for name, (total_of_numbers, count) in state["numbers"].items():
                total_before, count_before = self.host_sums.get(name, (0.0, 0.0))
                self.host_sums[name] = (
                    total_before + float(total_of_numbers),
                    count_before + float(count),
                )
        losses = [float(loss) for state in states for loss in state["last_update"]]
        if len(losses) > self.accumulation:  # those of several ranks
            losses = [sum(losses) / len(losses)]
        # Extending by a 1-D tensor appends its losses one by one, as 0-D tensors.
        self.last_update_losses.extend(torch.tensor(losses, device=self.device))
