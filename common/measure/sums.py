"""Sums of what a recipe measures: kept on the device, over all ranks, each sample once."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

Metrics = Mapping[str, torch.Tensor]
Totals = dict[str, torch.Tensor]
Finish = Callable[[Totals], Mapping[str, Any]]  # of totals in float64 on the host, with "count"


class TrainingSums:
    """Sums of the loss and of a recipe's metrics since the last log line."""

    FOLD_EVERY = 32  # micro-batches held before they are summed in one go: few, large operations

    def __init__(self, device: torch.device, accumulation: int) -> None:
        self.zero = torch.zeros(2, device=device, dtype=torch.float64)
        self.last_update: deque[torch.Tensor] = deque(maxlen=accumulation)
        self.held: list[Totals] = []
        self.sums: Totals = {"loss": self.zero}  # of each metric: sum, and number of elements

    def add(self, loss: torch.Tensor, metrics: Metrics) -> None:
        """Take note of one micro-batch, without synchronising; all elements are averaged."""
        # Detached at once: what is held must not keep a graph of activations with it.
        self.held.append({n: v.detach() for n, v in {"loss": loss, **metrics}.items()})
        self.last_update.append(loss.detach())
        if len(self.held) >= self.FOLD_EVERY:
            self.fold()

    def fold(self) -> None:
        for name in {name: None for metrics in self.held for name in metrics}:
            held = [metrics[name].flatten() for metrics in self.held if name in metrics]
            elements = torch.cat(held)
            total = elements.sum(dtype=torch.float64)
            pair = torch.stack([total, torch.full_like(total, elements.numel())])
            self.sums[name] = self.sums.get(name, self.zero) + pair.to(self.zero.device)
        self.held.clear()

    def take(self) -> torch.Tensor:
        """Return float64 [2 × metrics] on the host: each sum and its count; then reset."""
        self.fold()
        taken = torch.cat([*self.sums.values()]).cpu()
        self.sums = dict.fromkeys(self.sums, self.zero)  # the same metrics in the same order
        return taken

    def means(self, ranks: torch.Tensor) -> dict[str, float]:
        """Return ``train/`` metrics from what all ranks took, [world_size, 2 × metrics]."""
        pairs = ranks.sum(0).view(-1, 2).tolist()
        return {f"train/{n}": s / c for n, (s, c) in zip(self.sums, pairs, strict=True) if c}

    def last_loss(self) -> float:
        """Return this rank's mean loss of the last update; NaN where there was none."""
        return float(torch.tensor([*self.last_update]).mean())

    def state_dict(self) -> dict[str, Any]:
        self.fold()
        return {
            "metrics": {name: pair.tolist() for name, pair in self.sums.items()},
            "last_update": [float(loss) for loss in self.last_update],
        }

    def load_from_ranks(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on with the sums of one rank, or of several if there are fewer ranks now."""
        for state in states:
            for name, pair in state["metrics"].items():
                self.sums[name] = self.sums.get(name, self.zero) + self.zero.new_tensor(pair)
            losses = [*map(float, state["last_update"])]
            self.last_update.extend(torch.tensor(losses, device=self.zero.device))


class Evaluation(dict[str, float]):
    """Figures of an evaluation by name, of all ranks and the same on each."""


class Sums:
    """Totals of an evaluation: tensors of any shape, added up on the device and over all ranks.

    ``sums.add(len(y), hits=(y == z).sum())`` for each batch, and then ``sums.result()``.
    """

    def __init__(self, accelerator: Accelerator, finish: Finish | None = None) -> None:
        """Divide each total by ``count``, the samples, unless `finish` makes other figures."""
        self.accelerator, self.finish = accelerator, finish
        self.count, self.totals = 0, Totals()

    def add(self, count: int, **values: torch.Tensor) -> None:
        """Add the sums over a batch of `count` samples."""
        self.count += count
        for name, value in values.items():
            self.totals[name] = value.detach().double() + self.totals.get(name, 0.0)

    def reduced(self) -> Totals:
        """Return the totals of all ranks, float64, on the host."""
        kind: Any = {"device": self.accelerator.device, "dtype": torch.float64}
        mine = {"count": torch.tensor(self.count, **kind), **self.totals}
        shapes = {name: total.shape for name, total in mine.items()}
        if self.accelerator.num_processes > 1:  # one of the ranks may have had no batch at all
            shapes = max(gather_object([shapes]), key=len)
        parts = [mine.get(n, torch.zeros(shape, **kind)).flatten() for n, shape in shapes.items()]
        sums = self.accelerator.reduce(torch.cat(parts), "sum").cpu().split([*map(len, parts)])
        named = zip(shapes.items(), sums, strict=True)
        return {name: total.view(shape) for (name, shape), total in named}

    def result(self) -> Evaluation:
        totals = self.reduced()
        count = totals["count"]
        figures = self.finish(totals) if self.finish else {n: t / count for n, t in totals.items()}
        return Evaluation({n: float(v) for n, v in figures.items()} | {"count": int(count)})


def of_all_ranks(accelerator: Accelerator, figures: Mapping[str, Any]) -> Evaluation:
    """Return figures that are the same on each rank: those not of `Sums` are averaged."""
    values = {name: float(value) for name, value in figures.items()}
    if not isinstance(figures, Evaluation) and accelerator.num_processes > 1:
        mine = torch.tensor([*values.values()], device=accelerator.device, dtype=torch.float64)
        values = dict(zip(values, accelerator.reduce(mine, "mean").tolist(), strict=True))
    return Evaluation(values)
