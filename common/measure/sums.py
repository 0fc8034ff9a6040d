"""Sums of an evaluation: kept on the device, and reduced over all ranks to its figures."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from accelerate import Accelerator

from common.errors import UserError
from common.measure.across_ranks import SumKey, sum_over_ranks
from common.measure.collected import CollectedRows, Rows
from common.measure.first_batches import Finish, FirstBatches, Totals
from common.measure.totals import Total, as_total, elements_total, mean_of, total_with
from common.measure.value_checks import (
    Measured,
    Metrics,
    Value,
    figure,
    measured_value,
    refuse_another_loss,
    require_loss_and_metrics,
)
from common.ranks.agreement import gather_from_ranks

# The relative error up to which a figure is the same on two ranks. A metric that all ranks compute
# from the same numbers differs by rounding at most.
SAME_ON_RANKS_ERROR = 1e-6


class Evaluation(dict[str, float]):
    """The figures of an evaluation by name, computed over all ranks and equal on all ranks."""

    def __init__(
        self,
        figures: Mapping[str, float],
        first_batches: FirstBatches | None = None,
        finish: Finish | None = None,
    ) -> None:
        """Keep the figures, and what a rehearsal checks.

        Args:
            first_batches: this rank's first batches. Without them, no mistake is found.
            finish: the argument of the same name of `Sums`.
        """
        super().__init__(figures)
        self.first_batches = first_batches or FirstBatches()
        self.finish = finish


@dataclass
class SumsOfAllRanks:
    """The sums of an evaluation over all ranks, float64 on the host."""

    totals: Totals  # totals of added and recorded values by name, with "count"
    means: dict[str, float]  # means of recorded values alone, by name


class Sums:
    """Sums of an evaluation: added up on the device, then reduced over all ranks.

    Call ``sums.record(loss, {"accuracy": logits.argmax(-1) == y}, len(y))`` for each batch, with
    the arguments of `run.record` and the number of samples; ``sums.result()`` returns the means.
    For figures that are not means, add totals: ``sums.add(len(y), squares=errors.square().sum())``.
    For figures that need all samples at once, collect rows: ``sums.collect(scores=s, labels=y)``.
    """

    def __init__(self, accelerator: Accelerator, finish: Finish | None = None) -> None:
        """Prepare empty sums.

        Args:
            finish: computes the figures from the totals. By default each total is divided by
                ``count``, the number of samples.
        """
        self.accelerator = accelerator
        self.finish = finish
        self.count: Value = 0  # samples given to `add`
        self.totals: dict[str, Total | float] = {}
        self.recorded_count: Value = 0  # samples given to `record`
        self.recorded: dict[str, Total | float] = {}  # the sum of all elements, by name
        self.element_counts: dict[str, Value] = {}  # the number of these elements, by name
        self.collected_rows = CollectedRows()
        self.first_batches = FirstBatches()  # for the checks of a rehearsal

    def add(self, count: Measured, **values: Measured) -> None:
        """Add totals over a batch of `count` samples: tensors of any shape, or plain numbers.

        For a mean loss, add ``loss=loss * count``, or use `record`.

        Raises:
            UserError: a value is not a number, its shape has changed, or its name is taken.
        """
        size = measured_value("count", count, "sums.add")
        batch = {name: measured_value(name, value, "sums.add") for name, value in values.items()}
        self.first_batches.note_added(size, batch)
        self.count = self.count + size
        for name, value in batch.items():
            self.refuse_if_taken(name, self.recorded)
            self.totals[name] = sum_of_totals(name, self.totals.get(name), value)

    def record(self, loss: Measured, metrics: Metrics | None, count: Measured) -> None:
        """Record a batch of `count` samples, as `run.record` records a micro-batch.

        Args:
            loss: the mean loss of the batch. Its mean over all samples becomes ``loss``.
            metrics: tensors of any shape or plain numbers, by name. The mean over all elements of
                all batches and ranks becomes the figure of that name. A single number is the mean
                of its batch, so it counts as often as the batch has samples.
            count: the number of samples, an int or a tensor of one element.

        Raises:
            UserError: an argument is of another type, or the name of a metric is taken.
        """
        call = "sums.record(loss, {name: values}, number_of_samples)"
        require_loss_and_metrics(loss, metrics, call)
        size = measured_value("count", count, "sums.record")
        measured_loss = measured_value("loss", loss, "sums.record")
        self.recorded_count = self.recorded_count + size
        self.record_mean("loss", measured_loss, size)
        measured = {"loss": measured_loss}
        for name, metric in (metrics or {}).items():
            value = measured_value(name, metric, "sums.record")
            measured[name] = value
            if name == "loss":
                refuse_another_loss(loss, metric, "sums.record")
            elif isinstance(value, torch.Tensor) and value.ndim > 0:
                self.add_recorded(name, elements_total(value), float(value.numel()))
            else:
                self.record_mean(name, value, size)
        self.first_batches.note_recorded(size, measured)

    def record_mean(self, name: str, value: Value, size: Value) -> None:
        """Add the mean of a batch, weighted by its number of samples.

        Args:
            value: the mean, or a tensor of any shape, of which the mean is taken.
            size: samples of the batch.
        """
        mean = mean_of(value) if isinstance(value, torch.Tensor) else value
        # This is a tensor if the mean or the size is a tensor.
        batch_total = mean * size
        if isinstance(batch_total, torch.Tensor):
            self.add_recorded(name, as_total(batch_total), size)
        else:
            self.add_recorded(name, batch_total, size)

    def collect(self, **rows: Rows) -> None:
        """Collect rows of a batch, for figures that need all samples at once, such as AUROC.

        `collected` returns them. They stay on their device until then.

        Args:
            rows: tensors or arrays of shape [samples, …], by name. Rows that only pad a batch must
                be left out.

        Raises:
            UserError: a value has no rows, or the numbers of rows differ.
        """
        self.collected_rows.add(rows)

    def collected(self) -> dict[str, torch.Tensor]:
        """Return the collected rows of all ranks by name, on the host; called on all ranks.

        They are the same on all ranks, and so is a figure that is computed from them. Their order
        depends on the number of processes. Floats are at least float32.

        Raises:
            UserError: the rows of a name have different shapes.
        """
        return self.collected_rows.of_all_ranks(self.accelerator)

    def add_recorded(self, name: str, total: Total | float, element_count: Value) -> None:
        """Add the sum and the number of the elements of a batch's metric."""
        self.refuse_if_taken(name, self.totals)
        self.recorded[name] = total_with(total, self.recorded.get(name))
        self.element_counts[name] = self.element_counts.get(name, 0.0) + element_count

    def refuse_if_taken(self, name: str, other_names: Collection[str]) -> None:
        """Raise a `UserError` if a name is "count", or is one of the `other_names`.

        Args:
            other_names: the names that the other one of `add` and `record` has used.
        """
        if name == "count":
            conflict = "reserved for the number of samples"
        elif name in other_names:
            conflict = "used in both sums.add and sums.record"
        else:
            return
        raise UserError(
            f"the name {name!r} is {conflict}",
            advice="give the metric another name",
            every_rank=True,
        )

    def over_all_ranks(self) -> SumsOfAllRanks:
        """Return the sums over all ranks; called on all ranks.

        A rank may lack some names, or have had no batch at all.
        """
        local_sums: dict[SumKey, Total | float] = {
            ("counts", "by add"): self.count,
            ("counts", "by record"): self.recorded_count,
        }
        for name, total in self.totals.items():
            local_sums["added", name] = total
        for name, total in self.recorded.items():
            local_sums["recorded", name] = total
        for name, element_count in self.element_counts.items():
            local_sums["elements", name] = element_count
        sums = sum_over_ranks(self.accelerator, local_sums)
        # A recipe that calls both `add` and `record` counts each sample twice, once in each method.
        # So one of the two counts is taken, and not their sum. Without a call of `add`, its count
        # is 0.
        count = sums["counts", "by add"] or sums["counts", "by record"]
        totals = {"count": count}
        means = {}
        for (group, name), value in sums.items():
            if group in ("added", "recorded"):
                totals[name] = value
            if group == "recorded":
                means[name] = float(value / sums["elements", name])
        return SumsOfAllRanks(totals, means)

    def reduced(self) -> Totals:
        """Return the totals of all ranks by name, for a recipe that computes other figures.

        They are float64 on the host, and include ``count``. All ranks must call this method.
        """
        return self.over_all_ranks().totals

    def result(self) -> Evaluation:
        """Return the figures over all ranks, with ``count``; called on all ranks.

        Raises:
            UserError: a figure that `finish` returned is not a single number.
        """
        sums = self.over_all_ranks()
        totals = sums.totals
        values: dict[str, Measured] = dict(sums.means)
        if self.finish is not None:
            values |= self.finish(totals)
        else:
            for name, total in totals.items():
                if name not in sums.means:
                    values[name] = total / totals["count"]
        figures = {name: figure(name, value) for name, value in values.items()}
        figures["count"] = int(totals["count"])
        return Evaluation(figures, self.first_batches, self.finish)


def sum_of_totals(name: str, before: Total | float | None, value: Value) -> Total | float:
    """Return the sum of an earlier total, if any, and a batch's value of the same name.

    Raises:
        UserError: the two shapes differ.
    """
    total = as_total(value) if isinstance(value, torch.Tensor) else value
    if before is None:
        return total
    # A plain number has no shape, and counts as a tensor without dimensions.
    shape_before = () if isinstance(before, (int, float)) else tuple(before.shape)
    shape = () if isinstance(value, (int, float)) else tuple(value.shape)
    if shape_before != shape:
        raise UserError(
            f"sums.add got {name!r} with shape {shape_before} for one batch, but {shape} for "
            "another",
            advice=("sum over the dimensions whose sizes differ between batches, as with .sum(0)"),
            every_rank=True,
        )
    return total_with(total, before)


def of_all_ranks(accelerator: Accelerator, figures: Mapping[str, Measured]) -> Evaluation:
    """Return the figures of an evaluation, the same on all ranks; called on all ranks.

    A recipe's evaluation may return the result of `Sums`, or a plain dict of figures that it
    computed itself. A rank may lack figures that another rank has.

    Raises:
        UserError: a figure is not a single number, or two ranks have different values of it.
    """
    local_figures = {name: figure(name, value) for name, value in figures.items()}
    if accelerator.num_processes == 1:
        return Evaluation(local_figures)
    agreed: dict[str, float] = {}
    for rank, figures_of_rank in enumerate(gather_from_ranks(accelerator, local_figures)):
        for name, value in figures_of_rank.items():
            agreed_value = agreed.setdefault(name, value)
            if not is_same_figure(agreed_value, value):
                raise differing_figure_error(name, agreed_value, value, rank)
    return Evaluation(agreed)


def differing_figure_error(name: str, value: float, other: float, rank: int) -> UserError:
    """Return the error for a figure that is not the same on all ranks.

    Args:
        rank: the rank that has the `other` value.
    """
    return UserError(
        f"the processes have different values of {name!r} ({value:.9g}, and {other:.9g} on rank "
        f"{rank}), probably because each has computed it from its own samples",
        advice=(
            "return a figure of all samples: pass means or totals to Sums, or get all samples with "
            "sums.collect(...); return a time or a random figure on one process only (if "
            "run.accelerator.is_main_process)"
        ),
    )


def is_same_figure(value: float, other: float) -> bool:
    """Whether two ranks have the same figure, up to rounding. NaN is the same as NaN."""
    if math.isnan(value) or math.isnan(other):
        return math.isnan(value) and math.isnan(other)
    return math.isclose(value, other, rel_tol=SAME_ON_RANKS_ERROR, abs_tol=SAME_ON_RANKS_ERROR**2)
