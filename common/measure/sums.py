"""Sums of what a recipe measures: kept on the device, over all ranks, each sample once."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from common.errors import UserError
from common.measure.values import Value, figure, measured_value

Metrics = Mapping[str, Any]  # tensors of any shape, or plain numbers, by name
Totals = dict[str, torch.Tensor]
Finish = Callable[[Totals], Mapping[str, Any]]  # of totals in float64 on the host, with "count"
Taken = dict[str, tuple[float, float]]  # by metric: the sum of its elements, and their number

# The share of a half by which a figure may miss it and still count as halved: bf16 is that inexact.
HALVED = {"loss": 0.01}
HALVED_OTHERS = 0.001


def gather_from_ranks(accelerator: Accelerator, value: Any) -> list[Any]:
    """Return the `value` of each rank, in the order of ranks."""
    return gather_object([value]) if accelerator.num_processes > 1 else [value]


class TrainingSums:
    """Sums of the loss and of a recipe's metrics since the last log line.

    Ranks may record different metrics. Each rank sends a row of numbers for the names that all
    ranks agreed on before, and says how many other names it has. Ranks exchange names only where
    one of them has others, which is mostly at the first log line.
    """

    FOLD_EVERY = 32  # micro-batches held before they are summed in one go: few, large operations

    def __init__(self, device: torch.device, accumulation: int) -> None:
        self.zero = torch.zeros(2, device=device, dtype=torch.float64)
        self.last_update: deque[Value] = deque(maxlen=accumulation)
        self.held: list[dict[str, Value]] = []
        # By metric, the sum of its elements and their number: of tensors, and of plain numbers.
        self.sums: Totals = {}
        self.numbers: Taken = {}
        self.agreed = ["loss"]  # the names of a row's columns, the same on all ranks

    def add(self, loss: Any, metrics: Metrics) -> None:
        """Take note of one micro-batch, without synchronising; all elements are averaged."""
        # Detached at once: what is held must not keep a graph of activations with it.
        mean_loss = measured_value("loss", loss, "run.record")
        values = {"loss": mean_loss}
        for name, value in metrics.items():
            values[name] = measured_value(name, value, "run.record")
        if "loss" in metrics:
            refuse_another_loss(mean_loss, values["loss"], "run.record")
        self.held.append(values)
        if isinstance(mean_loss, torch.Tensor) and mean_loss.ndim:
            mean_loss = mean_loss.double().mean()
        self.last_update.append(mean_loss)
        if len(self.held) >= self.FOLD_EVERY:
            self.fold()

    def fold(self) -> None:
        """Add what is held to the sums."""
        names = dict.fromkeys(chain.from_iterable(self.held))
        for name in names:
            values = [metrics[name] for metrics in self.held if name in metrics]
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            numbers = [value for value in values if not isinstance(value, torch.Tensor)]
            if tensors:
                self.fold_tensors(name, tensors)
            if numbers:
                total, count = self.numbers.get(name, (0.0, 0.0))
                self.numbers[name] = total + math.fsum(numbers), count + len(numbers)
        self.held.clear()

    def fold_tensors(self, name: str, tensors: list[torch.Tensor]) -> None:
        device = self.zero.device
        if len({tensor.dtype for tensor in tensors}) > 1:  # bf16 has no room for integers
            tensors = [tensor.double() for tensor in tensors]
        elements = torch.cat([tensor.flatten().to(device) for tensor in tensors])
        total = elements.sum(dtype=torch.float64)
        pair = torch.stack([total, torch.full_like(total, elements.numel())])
        self.sums[name] = self.sums.get(name, self.zero) + pair

    def take(self) -> Taken:
        """Return the sum and the number of elements of each metric of this rank; then reset."""
        self.fold()
        pairs = torch.stack([*self.sums.values()]).tolist() if self.sums else []
        taken: Taken = {
            name: (pair[0], pair[1]) for name, pair in zip(self.sums, pairs, strict=True)
        }
        for name, (total, count) in self.numbers.items():
            before = taken.get(name, (0.0, 0.0))
            taken[name] = before[0] + total, before[1] + count
        self.sums, self.numbers = {}, {}
        return taken

    def row(self, taken: Taken) -> list[float]:
        """Return [1 + 2 × agreed names]: how many other names there are, then sums and counts."""
        others = taken.keys() - set(self.agreed)
        pairs = [taken.get(name, (0.0, 0.0)) for name in self.agreed]
        return [float(len(others)), *chain.from_iterable(pairs)]

    def agree_on_names(self, accelerator: Accelerator, taken: Taken) -> None:
        """Let all ranks add the names that any of them has; called on all ranks."""
        ranks = gather_from_ranks(accelerator, [*taken])
        self.agreed = [*dict.fromkeys([*self.agreed, *chain.from_iterable(ranks)])]

    def means(self, rows: torch.Tensor) -> dict[str, float]:
        """Return ``train/`` metrics from the rows of all ranks, [world_size, 1 + 2 × names]."""
        pairs = rows[:, 1:].sum(0).view(-1, 2).tolist()
        named = zip(self.agreed, pairs, strict=True)
        return {f"train/{name}": total / count for name, (total, count) in named if count}

    def last_loss(self) -> float:
        """Return this rank's mean loss of the last update; NaN where there was none."""
        return float(torch.tensor([*self.last_update]).mean())

    def state_dict(self) -> dict[str, Any]:
        self.fold()
        return {
            "metrics": {name: pair.tolist() for name, pair in self.sums.items()},
            "numbers": {name: [*pair] for name, pair in self.numbers.items()},
            "last_update": [float(loss) for loss in self.last_update],
        }

    def load_from_ranks(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on with the sums of one rank, or of several if there are fewer ranks now."""
        for state in states:
            for name, pair in state["metrics"].items():
                self.sums[name] = self.sums.get(name, self.zero) + self.zero.new_tensor(pair)
            for name, (total, count) in state.get("numbers", {}).items():
                before = self.numbers.get(name, (0.0, 0.0))
                self.numbers[name] = before[0] + float(total), before[1] + float(count)
            losses = [*map(float, state["last_update"])]
            self.last_update.extend(torch.tensor(losses, device=self.zero.device))


@dataclass
class BatchTotals:
    """What `Sums.add` was given for one batch."""

    count: Value
    totals: dict[str, Value]

    def on_host(self) -> Totals:
        """Return the totals as `finish` gets them."""
        values = {"count": self.count, **self.totals}
        return {name: torch.as_tensor(value).double().cpu() for name, value in values.items()}


class Evaluation(dict[str, float]):
    """Figures of an evaluation by name, of all ranks and the same on each."""

    first_batches: Sequence[BatchTotals] = ()  # of this rank, at most two
    finish: Finish | None = None

    def evident_means(self) -> list[str]:
        """Return the figures that `Sums.add` evidently got as means, and not as totals.

        For a rehearsal alone, whose second batch holds the samples of the first one twice. A total
        doubles with them and its mean stays; what stays as it is makes a figure half as large.
        """
        if len(self.first_batches) < 2:
            return []
        once, twice = (batch.on_host() for batch in self.first_batches)
        if once.keys() != twice.keys() or float(twice["count"]) != 2 * float(once["count"]):
            return []
        if self.finish is None:
            figures = [
                {n: t / totals["count"] for n, t in totals.items()} for totals in (once, twice)
            ]
        else:  # which may divide by anything: only the loss has a name that says what it is
            figures = [
                {n: v for n, v in self.finish(totals).items() if n == "loss"}
                for totals in (once, twice)
            ]
        return [name for name in figures[0] if is_halved(name, *(f[name] for f in figures))]


def is_halved(name: str, before: Any, after: Any) -> bool:
    before, after = torch.as_tensor(before).double(), torch.as_tensor(after).double()
    if name == "count" or before.numel() != 1 or not float(before):
        return False
    return abs(float(after / before) / 0.5 - 1) <= HALVED.get(name, HALVED_OTHERS)


@dataclass
class Reduced:
    """The sums of all ranks, in float64 on the host."""

    totals: Totals  # of what was added or recorded, by name, with "count"
    means: dict[str, float]  # of what was recorded


class Sums:
    """Totals of an evaluation: added up on the device and over all ranks, each sample once.

    ``sums.record(loss, {"accuracy": logits.argmax(-1) == y}, len(y))`` for each batch takes what
    `run.record` takes, and ``sums.result()`` gives the means. For figures that are no means, add
    totals: ``sums.add(len(y), squares=errors.square().sum())``.
    """

    def __init__(self, accelerator: Accelerator, finish: Finish | None = None) -> None:
        """Divide each total by ``count``, the samples, unless `finish` makes other figures."""
        self.accelerator, self.finish = accelerator, finish
        self.count: Value = 0  # of the samples that were added
        self.totals: dict[str, Value] = {}
        self.recorded_count: Value = 0
        self.recorded: dict[str, Value] = {}  # by name, the sum of all elements
        self.elements: dict[str, Value] = {}  # by name, their number
        self.first_batches: list[BatchTotals] = []

    def add(self, count: Any, **values: Any) -> None:
        """Add the sums over a batch of `count` samples: tensors of any shape, or plain numbers.

        They are totals: of a mean loss give ``loss=loss * count``, or use `record`.
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
        """Record a batch of `count` samples as `run.record` does a micro-batch.

        Args:
            loss: the mean loss of the batch. Its mean over all samples becomes ``loss``.
            metrics: by name, tensors of any shape or plain numbers. The mean over all elements of
                all batches and ranks becomes the figure of that name.
            count: the number of samples, an int or a tensor of one element.
        """
        if not isinstance(metrics, Mapping | None):
            advice = "the order is record(loss, {name: values}, number of samples)"
            found = f"sums.record got a {type(metrics).__name__} in place of metrics"
            raise UserError(f"{found}: {advice}", every_rank=True)
        size = measured_value("count", count, "sums.record")
        mean_loss = measured_value("loss", loss, "sums.record")
        if isinstance(mean_loss, torch.Tensor):
            mean_loss = mean_loss.double().mean()
        self.recorded_count = self.recorded_count + size
        self.add_recorded("loss", mean_loss * size, size)
        for name, given in (metrics or {}).items():
            value = measured_value(name, given, "sums.record")
            if name == "loss":
                refuse_another_loss(
                    measured_value("loss", loss, "sums.record"), value, "sums.record"
                )
                continue
            if isinstance(value, torch.Tensor):
                self.add_recorded(name, value.sum(dtype=torch.float64), float(value.numel()))
            else:
                self.add_recorded(name, value, 1.0)

    def add_recorded(self, name: str, total: Value, elements: Value) -> None:
        self.refuse_if_taken(name, self.totals)
        self.recorded[name] = self.recorded.get(name, 0.0) + total
        self.elements[name] = self.elements.get(name, 0.0) + elements

    def refuse_if_taken(self, name: str, others: Mapping[str, Any]) -> None:
        if name in others or name == "count":
            both = (
                "the number of samples" if name == "count" else "given to sums.add and sums.record"
            )
            raise UserError(f"{name!r} is {both}: choose another name", every_rank=True)

    def reduce(self) -> Reduced:
        """Return the sums of all ranks; any of them may lack names, or have had no batch at all."""
        mine: dict[tuple[str, str], Value] = {
            ("count", "added"): self.count,
            ("count", "recorded"): self.recorded_count,
            **{("added", name): value for name, value in self.totals.items()},
            **{("recorded", name): value for name, value in self.recorded.items()},
            **{("elements", name): value for name, value in self.elements.items()},
        }
        sums = sum_over_ranks(self.accelerator, mine)
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
        """Return the totals of all ranks, float64, on the host."""
        return self.reduce().totals

    def result(self) -> Evaluation:
        """Return the figures of all ranks, with ``count``; called on all ranks."""
        reduced = self.reduce()
        totals, count = reduced.totals, reduced.totals["count"]
        figures: dict[str, Any] = dict(reduced.means)
        if self.finish is not None:
            figures |= self.finish(totals)
        else:
            figures |= {name: totals[name] / count for name in totals if name not in figures}
        named = {name: figure(name, value) for name, value in figures.items()}
        evaluation = Evaluation(named | {"count": int(count)})
        if not self.recorded:
            evaluation.first_batches, evaluation.finish = self.first_batches, self.finish
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


def added(name: str, before: Value | None, value: Value) -> Value:
    """Return the sum of two totals, in float64; a `UserError` where their shapes differ."""
    if isinstance(value, torch.Tensor):
        value = value.double()
    if before is None:
        return value
    shapes = [tuple(getattr(total, "shape", ())) for total in (before, value)]
    if shapes[0] != shapes[1]:
        both = f"shape {shapes[0]} for one batch and {shapes[1]} for another"
        advice = "a total has one shape, so add up over the batch first, as with .sum(0)"
        raise UserError(f"sums.add: {name!r} has {both}: {advice}", every_rank=True)
    return before + value


def sum_over_ranks(
    accelerator: Accelerator, mine: Mapping[tuple[str, str], Value]
) -> dict[tuple[str, str], torch.Tensor]:
    """Return the sums over all ranks, float64 on the host; a name that a rank lacks counts as 0."""
    kind: Any = {"device": accelerator.device, "dtype": torch.float64}
    values = {key: torch.as_tensor(value, **kind) for key, value in mine.items()}
    shapes: dict[tuple[str, str], torch.Size] = {}
    ranks = gather_from_ranks(accelerator, {key: value.shape for key, value in values.items()})
    for rank, named in enumerate(ranks):
        for key, shape in named.items():
            if shapes.setdefault(key, shape) != shape:
                both = f"shape {tuple(shape)} on rank {rank} and {tuple(shapes[key])} on another"
                advice = "add up over the batch first, so that it is the same on all ranks"
                raise UserError(f"sums.add: {key[1]!r} has {both}: {advice}")
    parts = [values.get(key, torch.zeros(shape, **kind)).flatten() for key, shape in shapes.items()]
    sums = accelerator.reduce(torch.cat(parts), "sum").cpu().split([*map(len, parts)])
    named_sums = zip(shapes.items(), sums, strict=True)
    return {key: total.view(shape) for (key, shape), total in named_sums}


def of_all_ranks(accelerator: Accelerator, figures: Mapping[str, Any]) -> Evaluation:
    """Return figures that are the same on each rank: those not of `Sums` are averaged.

    A figure that only some ranks have is averaged over these.
    """
    values = {name: figure(name, value) for name, value in figures.items()}
    if isinstance(figures, Evaluation) or accelerator.num_processes == 1:
        return Evaluation(values)
    ranks = gather_from_ranks(accelerator, [*values])
    names = [*dict.fromkeys(chain.from_iterable(ranks))]
    kind: Any = {"device": accelerator.device, "dtype": torch.float64}
    if all(names == list(others) for others in ranks):
        mean = accelerator.reduce(torch.tensor([values[n] for n in names], **kind), "mean")
        return Evaluation(zip(names, mean.tolist(), strict=True))
    pairs = [(values.get(name, 0.0), float(name in values)) for name in names]
    totals = accelerator.reduce(torch.tensor(pairs, **kind), "sum").tolist()
    return Evaluation({n: total / count for n, (total, count) in zip(names, totals, strict=True)})
