"""Sums of losses, metrics and totals: kept on the device, and reduced over all ranks."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from accelerate import Accelerator

from common import devices
from common.agreement import gather_from_ranks, reduce_numbers
from common.errors import UserError
from common.measure.totals import (
    Total,
    as_total,
    elements_total,
    from_parts,
    mean_of,
    on_host,
    parts_on_host,
    total_with,
)
from common.measure.values import Value, figure, measured_value

Metrics = Mapping[str, Any]  # tensors of any shape, or plain numbers, by name
Totals = dict[str, torch.Tensor]
# Makes figures of totals, which are float64 on the host and include "count".
Finish = Callable[[Totals], Mapping[str, Any]]
Taken = dict[str, tuple[float, float]]  # by metric: the sum of its elements, and their number

# A figure counts as halved if its ratio is one half up to this relative error. The loss may be
# computed in bf16, which is less exact.
HALVED = {"loss": 0.01}
HALVED_OTHERS = 0.001


class TrainingSums:
    """Sums of the loss and of a recipe's metrics since the last log line.

    Ranks may record different metrics. Each rank sends a row of numbers for the names that all
    ranks agreed on before, and the number of its other names. Ranks exchange names only if one of
    them has such others, which mostly happens at the first log line.
    """

    FOLD_EVERY = 32  # micro-batches that are summed together, in few and large operations

    def __init__(self, device: torch.device, accumulation: int) -> None:
        self.device = device
        devices.has_float64(device)  # tried now, because the answer waits for the device
        self.last_update: deque[Value] = deque(maxlen=accumulation)
        self.held: list[dict[str, Value]] = []
        # By metric, of tensors: the sum of all elements, on the device, and their number.
        self.sums: dict[str, Total] = {}
        self.sizes: dict[str, float] = {}
        # By metric, of plain numbers and of tensors on the host.
        self.numbers: Taken = {}
        self.agreed = ["loss"]  # the names of a row's columns, the same on all ranks

    def add(self, loss: Any, metrics: Metrics) -> None:
        """Record one micro-batch, without synchronising.

        Args:
            loss: its mean loss, a tensor or a plain number.
            metrics: tensors of any shape or plain numbers, whose elements are averaged.
        """
        # `measured_value` detaches, because a held tensor must not keep the graph of activations.
        mean_loss = measured_value("loss", loss, "run.record")
        values = {"loss": mean_loss}
        for name, value in metrics.items():
            values[name] = measured_value(name, value, "run.record")
        if "loss" in metrics:
            refuse_another_loss(mean_loss, values["loss"], "run.record")
        self.held.append(values)
        if isinstance(mean_loss, torch.Tensor) and mean_loss.ndim:
            mean_loss = mean_of(mean_loss)
        self.last_update.append(mean_loss)
        if len(self.held) >= self.FOLD_EVERY:
            self.fold()

    def fold(self) -> None:
        """Add the held micro-batches to the sums."""
        names = dict.fromkeys(chain.from_iterable(self.held))
        for name in names:
            values = [metrics[name] for metrics in self.held if name in metrics]
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            numbers = [value for value in values if not isinstance(value, torch.Tensor)]
            on_device = [tensor for tensor in tensors if not self.is_left_on_host(tensor)]
            for tensor in tensors:
                if self.is_left_on_host(tensor):
                    numbers += tensor.double().flatten().tolist()
            if on_device:
                self.fold_tensors(name, on_device)
            if numbers:
                total, count = self.numbers.get(name, (0.0, 0.0))
                self.numbers[name] = total + math.fsum(numbers), count + len(numbers)
        self.held.clear()

    def is_left_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the host's while the device is not, and is added up there."""
        return tensor.device.type == "cpu" and devices.is_accelerator(self.device)

    def fold_tensors(self, name: str, tensors: list[torch.Tensor]) -> None:
        """Add the elements of tensors, on any devices, to the sum of a metric."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor.flatten().to(self.device))
        # `cat` may promote integers to bf16.
        for same_dtype in by_dtype.values():
            elements = torch.cat(same_dtype)
            total = elements_total(elements)
            self.sums[name] = total_with(total, self.sums.get(name))
            self.sizes[name] = self.sizes.get(name, 0.0) + elements.numel()

    def take(self) -> Taken:
        """Return the sum and the number of elements of each metric of this rank, and reset them."""
        self.fold()
        taken: Taken = {}
        parts_of_sums = parts_on_host([*self.sums.values()])
        for name, parts in zip(self.sums, parts_of_sums, strict=True):
            taken[name] = sum(parts), self.sizes[name]
        for name, (total, count) in self.numbers.items():
            total_before, count_before = taken.get(name, (0.0, 0.0))
            taken[name] = total_before + total, count_before + count
        self.sums = {}
        self.sizes = {}
        self.numbers = {}
        return taken

    def row(self, taken: Taken) -> list[float]:
        """Return [1 + 2 × agreed names]: the number of other names, then sums and counts."""
        others = taken.keys() - set(self.agreed)
        pairs = [taken.get(name, (0.0, 0.0)) for name in self.agreed]
        return [float(len(others)), *chain.from_iterable(pairs)]

    def agree_on_names(self, accelerator: Accelerator, taken: Taken) -> None:
        """Add the names of all ranks to the agreed ones; called on all ranks."""
        ranks = gather_from_ranks(accelerator, [*taken])
        self.agreed = [*dict.fromkeys([*self.agreed, *chain.from_iterable(ranks)])]

    def means(self, rows: torch.Tensor) -> dict[str, float]:
        """Return ``train/`` metrics from the rows of all ranks, [world_size, 1 + 2 × names]."""
        pairs = rows[:, 1:].sum(0).view(-1, 2).tolist()
        means = {}
        for name, (total, count) in zip(self.agreed, pairs, strict=True):
            if count:
                means[f"train/{name}"] = total / count
        return means

    def last_loss(self) -> float:
        """Return this rank's mean loss of the last update; NaN if there was no update."""
        return float(torch.tensor([*self.last_update]).mean())

    def state_dict(self) -> dict[str, Any]:
        self.fold()
        metrics = {}
        parts_of_sums = parts_on_host([*self.sums.values()])
        for name, (first, *rest) in zip(self.sums, parts_of_sums, strict=True):
            metrics[name] = [first, self.sizes[name], *rest]
        return {
            "metrics": metrics,
            "numbers": {name: [*pair] for name, pair in self.numbers.items()},
            "last_update": [float(loss) for loss in self.last_update],
        }

    def load_from_ranks(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the sums of one rank, or of several ranks added up."""
        for state in states:
            for name, (first, size, *rest) in state["metrics"].items():
                total = from_parts([first, *rest], self.device)
                self.sums[name] = total_with(total, self.sums.get(name))
                self.sizes[name] = self.sizes.get(name, 0.0) + float(size)
            for name, (total_of_numbers, count) in state.get("numbers", {}).items():
                total_before, count_before = self.numbers.get(name, (0.0, 0.0))
                self.numbers[name] = (
                    total_before + float(total_of_numbers),
                    count_before + float(count),
                )
            losses = [*map(float, state["last_update"])]
            self.last_update.extend(torch.tensor(losses, device=self.device))


@dataclass
class BatchTotals:
    """The arguments of one call of `Sums.add`."""

    count: Value
    totals: dict[str, Value]

    def on_host(self) -> Totals:
        """Return the totals in the form that `finish` takes: float64, on the host."""
        values = {"count": self.count, **self.totals}
        return {name: torch.as_tensor(value).cpu().double() for name, value in values.items()}


class Evaluation(dict[str, float]):
    """The figures of an evaluation by name, over all ranks and the same on each."""

    first_batches: Sequence[BatchTotals] = ()  # of this rank, at most two
    finish: Finish | None = None

    def evident_means(self) -> list[str]:
        """Return the names of figures for which `Sums.add` evidently got means, not totals.

        This only works in a rehearsal, whose second batch has the samples of the first one twice.
        A total doubles with the samples, so its figure stays. A mean stays, so its figure halves.
        """
        if len(self.first_batches) < 2:
            return []
        once, twice = (batch.on_host() for batch in self.first_batches)
        if once.keys() != twice.keys() or float(twice["count"]) != 2 * float(once["count"]):
            return []
        figures_once = self.comparable_figures(once)
        figures_twice = self.comparable_figures(twice)
        return [
            name
            for name, value in figures_once.items()
            if name in figures_twice and is_halved(name, value, figures_twice[name])
        ]

    def comparable_figures(self, totals: Totals) -> Mapping[str, Any]:
        """Return the figures of one batch that should not depend on its size."""
        if self.finish is None:
            return {name: total / totals["count"] for name, total in totals.items()}
        # `finish` may compute anything; of its figures, only the loss is surely a mean.
        return {name: value for name, value in self.finish(totals).items() if name == "loss"}


def is_halved(name: str, before: Any, after: Any) -> bool:
    before = torch.as_tensor(before).double()
    after = torch.as_tensor(after).double()
    if name == "count" or before.numel() != 1 or not float(before):
        return False
    relative_error = abs(float(after / before) / 0.5 - 1)
    return relative_error <= HALVED.get(name, HALVED_OTHERS)


@dataclass
class Reduced:
    """The sums of all ranks, in float64 on the host."""

    totals: Totals  # by name, of added and recorded values, with "count"
    means: dict[str, float]  # by name, of recorded values only


class Sums:
    """Sums of an evaluation: added up on the device, then reduced over all ranks.

    Call ``sums.record(loss, {"accuracy": logits.argmax(-1) == y}, len(y))`` for each batch, with
    the arguments of `run.record` and the number of samples; ``sums.result()`` returns the means.
    For figures that are no means, add totals: ``sums.add(len(y), squares=errors.square().sum())``.
    """

    def __init__(self, accelerator: Accelerator, finish: Finish | None = None) -> None:
        """Prepare empty sums.

        Args:
            finish: makes the figures of the totals. By default each total is divided by ``count``,
                the number of samples.
        """
        self.accelerator, self.finish = accelerator, finish
        self.count: Value = 0  # samples given to `add`
        self.totals: dict[str, Total | float] = {}
        self.recorded_count: Value = 0  # samples given to `record`
        self.recorded: dict[str, Total | float] = {}  # by name, the sum of all elements
        self.elements: dict[str, Value] = {}  # by name, their number
        self.first_batches: list[BatchTotals] = []

    def add(self, count: Any, **values: Any) -> None:
        """Add totals over a batch of `count` samples: tensors of any shape, or plain numbers.

        For a mean loss, add ``loss=loss * count``, or use `record`.

        Raises:
            UserError: a value is no number, has another shape than before, or its name is taken.
        """
        size = measured_value("count", count, "sums.add")
        batch = {name: measured_value(name, value, "sums.add") for name, value in values.items()}
        if len(self.first_batches) < 2:
            self.first_batches.append(BatchTotals(size, batch))
        self.count = self.count + size
        for name, value in batch.items():
            self.refuse_if_taken(name, self.recorded)
            self.totals[name] = added(name, self.totals.get(name), value)

    def record(self, loss: Any, metrics: Metrics | None, count: Any) -> None:
        """Record a batch of `count` samples, as `run.record` records a micro-batch.

        Args:
            loss: the mean loss of the batch. Its mean over all samples becomes ``loss``.
            metrics: by name, tensors of any shape or plain numbers. The mean over all elements of
                all batches and ranks becomes the figure of that name.
            count: the number of samples, an int or a tensor of one element.

        Raises:
            UserError: an argument is of another type, or the name of a metric is taken.
        """
        if not isinstance(metrics, Mapping | None):
            raise UserError(
                f"sums.record got a {type(metrics).__name__} in place of metrics: "
                "call it as record(loss, {name: values}, number_of_samples)",
                every_rank=True,
            )
        size = measured_value("count", count, "sums.record")
        mean_loss = measured_value("loss", loss, "sums.record")
        if isinstance(mean_loss, torch.Tensor):
            mean_loss = mean_of(mean_loss)
        batch_loss = mean_loss * size
        self.recorded_count = self.recorded_count + size
        if isinstance(batch_loss, torch.Tensor):
            self.add_recorded("loss", as_total(batch_loss), size)
        else:
            self.add_recorded("loss", batch_loss, size)
        for name, metric in (metrics or {}).items():
            value = measured_value(name, metric, "sums.record")
            if name == "loss":
                refuse_another_loss(
                    measured_value("loss", loss, "sums.record"), value, "sums.record"
                )
                continue
            if isinstance(value, torch.Tensor):
                self.add_recorded(name, elements_total(value), float(value.numel()))
            else:
                self.add_recorded(name, value, 1.0)

    def add_recorded(self, name: str, total: Total | float, elements: Value) -> None:
        self.refuse_if_taken(name, self.totals)
        self.recorded[name] = total_with(total, self.recorded.get(name))
        self.elements[name] = self.elements.get(name, 0.0) + elements

    def refuse_if_taken(self, name: str, others: Mapping[str, Any]) -> None:
        if name == "count":
            conflict = "the number of samples"
        elif name in others:
            conflict = "given to sums.add and sums.record"
        else:
            return
        raise UserError(f"{name!r} is {conflict}: choose another name", every_rank=True)

    def reduce(self) -> Reduced:
        """Return the sums of all ranks; any of them may lack names, or have had no batch at all."""
        local_sums: dict[tuple[str, str], Total | float] = {
            ("count", "added"): self.count,
            ("count", "recorded"): self.recorded_count,
            **{("added", name): value for name, value in self.totals.items()},
            **{("recorded", name): value for name, value in self.recorded.items()},
            **{("elements", name): value for name, value in self.elements.items()},
        }
        sums = sum_over_ranks(self.accelerator, local_sums)
        count = sums["count", "added"] or sums["count", "recorded"]
        totals = {"count": count}
        means = {}
        for (group, name), value in sums.items():
            if group in ("added", "recorded"):
                totals[name] = value
            if group == "recorded":
                means[name] = float(value / sums["elements", name])
        return Reduced(totals, means)

    def reduced(self) -> Totals:
        """Return the totals of all ranks, float64, on the host; called on all ranks."""
        return self.reduce().totals

    def result(self) -> Evaluation:
        """Return the figures of all ranks, with ``count``; called on all ranks."""
        reduced = self.reduce()
        totals = reduced.totals
        count = totals["count"]
        values: dict[str, Any] = dict(reduced.means)
        if self.finish is not None:
            values |= self.finish(totals)
        else:
            values |= {name: totals[name] / count for name in totals if name not in values}
        figures = {name: figure(name, value) for name, value in values.items()}
        evaluation = Evaluation(figures | {"count": int(count)})
        if not self.recorded:
            evaluation.first_batches = self.first_batches
            evaluation.finish = self.finish
        return evaluation


def refuse_another_loss(loss: Value, metric: Value, caller: str) -> None:
    """Raise a `UserError` where a metric has the loss's name, and is not the loss."""
    if isinstance(loss, torch.Tensor) and isinstance(metric, torch.Tensor):
        is_same = loss.data_ptr() == metric.data_ptr() and loss.shape == metric.shape
    else:
        is_same = type(loss) is type(metric) and bool(loss == metric)
    if not is_same:
        raise UserError(
            f"{caller} got two values for 'loss', as the loss and as a metric: give the metric "
            "another name",
            every_rank=True,
        )


def added(name: str, before: Total | float | None, value: Value) -> Total | float:
    """Return the sum of two totals; a `UserError` if their shapes differ."""
    total = as_total(value) if isinstance(value, torch.Tensor) else value
    if before is None:
        return total
    shape_before = tuple(getattr(before, "shape", ()))
    shape = tuple(getattr(value, "shape", ()))
    if shape_before != shape:
        raise UserError(
            f"sums.add: {name!r} has shape {shape_before} for one batch and {shape} for another: "
            "a total has one shape, so add up over the batch first, as with .sum(0)",
            every_rank=True,
        )
    return total_with(total, before)


def sum_over_ranks(
    accelerator: Accelerator, local_sums: Mapping[tuple[str, str], Total | float]
) -> dict[tuple[str, str], torch.Tensor]:
    """Return the sums over all ranks, float64 on the host; a name that a rank lacks counts as 0.

    Raises:
        UserError: a value has different shapes on two ranks.
    """
    if devices.has_float64(accelerator.device):
        options: Any = {"device": accelerator.device, "dtype": torch.float64}
        values = {key: torch.as_tensor(value, **options) for key, value in local_sums.items()}
    else:
        options = {"dtype": torch.float64}
        values = on_host(local_sums)
    shapes = common_shapes(accelerator, {key: value.shape for key, value in values.items()})
    flat_values = [
        values.get(key, torch.zeros(shape, **options)).flatten() for key, shape in shapes.items()
    ]
    sizes = [len(flat) for flat in flat_values]
    sums = reduce_numbers(accelerator, torch.cat(flat_values), "sum").split(sizes)  # one collective
    shaped_sums = zip(shapes.items(), sums, strict=True)
    return {key: total.view(shape) for (key, shape), total in shaped_sums}


def common_shapes(
    accelerator: Accelerator, local_shapes: Mapping[tuple[str, str], torch.Size]
) -> dict[tuple[str, str], torch.Size]:
    """Return the shapes of the values that any rank has; a `UserError` if two ranks' differ."""
    shapes: dict[tuple[str, str], torch.Size] = {}
    for rank, shapes_of_rank in enumerate(gather_from_ranks(accelerator, local_shapes)):
        for key, shape in shapes_of_rank.items():
            first_shape = shapes.setdefault(key, shape)
            if first_shape != shape:
                raise UserError(
                    f"sums.add: {key[1]!r} has shape {tuple(shape)} on rank {rank} and "
                    f"{tuple(first_shape)} on another: add up over the batch first, so that the "
                    "shape is the same on all ranks"
                )
    return shapes


def of_all_ranks(accelerator: Accelerator, figures: Mapping[str, Any]) -> Evaluation:
    """Return figures that are the same on each rank; called on all ranks.

    The figures of `Sums` are so already. Others are averaged over the ranks that have them.
    """
    values = {name: figure(name, value) for name, value in figures.items()}
    if isinstance(figures, Evaluation) or accelerator.num_processes == 1:
        return Evaluation(values)
    names_of_ranks = gather_from_ranks(accelerator, [*values])
    names = [*dict.fromkeys(chain.from_iterable(names_of_ranks))]
    if all(names == list(names_of_rank) for names_of_rank in names_of_ranks):
        local_values = torch.tensor([values[name] for name in names], dtype=torch.float64)
        means = reduce_numbers(accelerator, local_values, "mean").tolist()
        return Evaluation(zip(names, means, strict=True))
    local_pairs = [(values.get(name, 0.0), float(name in values)) for name in names]
    local_values = torch.tensor(local_pairs, dtype=torch.float64)
    pairs = reduce_numbers(accelerator, local_values, "sum").tolist()
    totals = zip(names, pairs, strict=True)
    return Evaluation({name: total / count for name, (total, count) in totals})
