"""The choices from which Hypothesis draws a generated copy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from tests.generated.notes import PLACES

# The values that a copy may record for a metric, as source code; `number` counts micro-batches.
VALUES = {
    "constant": "100",
    "integer": "number",
    "number": "0.1 * number",
    "truth": "number % 3 == 0",
    "of numpy": "np.float64(0.25 * number)",
    "scalar": "logits.detach().mean()",
    "scalar with its graph": "logits.square().mean()",
    "matrix": "logits",
    "hits": "logits.argmax(-1) == labels",
    "of some samples": "logits.argmax(-1)[labels == 0]",
    "float64": "logits.double().abs()",
    "float16": "logits.half()",
    "bfloat16": "logits.bfloat16()",
}
# The totals that an evaluation may add, as source code: sums over a batch.
TOTALS = {
    "hits": "(logits.argmax(-1) == labels).sum()",
    "hits as a number": "int((logits.argmax(-1) == labels).sum())",
    "constant": "3",
    "sum": "logits.double().sum()",
    "sum as a number": "float(logits.abs().sum())",
    "by class": "torch.bincount(labels, minlength=3)",
    "of some samples": "logits[labels == 0].sum()",
}
RANKS = {"all": "", "first": "rank == 0", "last": "rank == ranks - 1"}
BATCHES = {
    "all": "",
    "every second": "number % 2 == 1",
    "every third": "number % 3 == 2",
    "by label": "bool((labels == 0).any())",
    "alternating with ranks": "(number + rank) % 2 == 0",
}
FREEZING = (
    "nothing",
    "before prepare",
    "before prepare, until an update",
    "after prepare",
    "after prepare, until an update",
    "by epoch",
)
OPTIMIZERS = {
    "SGD": "torch.optim.SGD(parameters, lr=config.learning_rate)",
    "momentum": "torch.optim.SGD(parameters, lr=config.learning_rate, momentum=0.9, fused=True)",
    "AdamW": "torch.optim.AdamW(parameters, lr=config.learning_rate, fused=True)",
    "AMSGrad": "torch.optim.Adam(parameters, lr=config.learning_rate, amsgrad=True)",
    "RMSprop": "torch.optim.RMSprop(parameters, lr=config.learning_rate)",
    "Adagrad": "torch.optim.Adagrad(parameters, lr=config.learning_rate)",
    "own": "SignDescent(parameters, lr=config.learning_rate)",
}
SCHEDULERS = ("warm-up", "none", "StepLR", "own", "by hand")
LOSSES = ("plain", "heads in turns", "heads by rank", "gathered", "own collective")
PARTS = ("average", "own state", "teacher that is not kept")
MISTAKES = ("forgotten part", "unknown objective", "unread flag")


@dataclass(frozen=True)
class Metric:
    """A metric of a copy: its values in turn, and the ranks and batches that record it."""

    name: str
    values: tuple[str, ...]
    ranks: str = "all"
    batches: str = "all"

    @property
    def is_uneven(self) -> bool:
        """Whether some ranks or batches do not record it."""
        return (self.ranks, self.batches) != ("all", "all")


@dataclass(frozen=True)
class Case:
    """The choices of one copy; each default is the simplest choice."""

    processes: int = 1
    accumulation: int = 1
    batch_size: int = 4
    updates_per_epoch: int = 3
    spare_samples: int = 0  # of the training split, beyond whole updates
    epochs: int = 2
    validation: int | None = 5  # samples; None: there is only a test split
    test: int | None = 5
    metrics: tuple[Metric, ...] = ()
    loss_is_number: bool = False  # whether `run.record` gets a plain number as the loss
    totals: tuple[Metric, ...] = ()  # of the evaluation
    evaluation_records: bool = False  # by `sums.record` instead of `sums.add`
    evaluation_draws: bool = False
    freezing: str = "nothing"
    optimizer: str = "SGD"
    scheduler: str = "warm-up"
    loss: str = "plain"
    parts: tuple[str, ...] = ()
    max_grad_norm: float = 1.0
    gradient_noise: bool = False  # after clipping
    dropout: bool = False
    batch_norm: bool = False
    counts_flops: bool = True  # whether `run.start` gets the loss
    log_every: int = 2
    eval_every: int = 2
    checkpoint_every: int = 2
    keep: str = "best"
    early_stopping: int | None = None
    seed: int = 0
    mistake: str | None = None
    # Where the job is killed: a rank, a share of the micro-batches, and a place in the loop.
    kill: tuple[int, float, str] = (0, 0.5, "batch")

    @property
    def total_updates(self) -> int:
        """The number of updates of the run, unless it stops early."""
        return self.updates_per_epoch * self.epochs

    @property
    def kill_words(self) -> str:
        """The place of the kill, as the copy reads it from its environment."""
        rank, share, place = self.kill
        micro_batches = self.total_updates * self.accumulation
        number = min(int(share * micro_batches), micro_batches - 1)
        if place in ("step", "save"):  # only the last micro-batch of an update reaches them
            number += self.accumulation - 1 - number % self.accumulation
        return f"{rank % self.processes}:{number}:{place}"

    def features(self) -> list[str]:
        """Return the features of this copy, for counts."""
        if self.mistake is not None:  # the run ends before it uses the other features
            return [f"mistake: {self.mistake}"]
        features = [f"{self.processes} processes", f"freezes {self.freezing}", f"loss {self.loss}"]
        features += [f"scheduler {self.scheduler}", f"optimizer {self.optimizer}", *self.parts]
        features += ["sums.record" if self.evaluation_records else "sums.add"]
        if self.evaluation_draws:
            features.append("evaluation draws")
        if self.gradient_noise:
            features.append("gradient noise")
        if self.early_stopping is not None:
            features.append("early stopping")
        if any(metric.is_uneven for metric in self.metrics):
            features.append("names by rank or batch")
        return features


def metrics(names: str, choices: dict[str, str], most: int) -> st.SearchStrategy[Any]:
    """Return a strategy of up to `most` metrics, each with one or two values in turn."""
    metric = st.builds(
        Metric,
        name=st.sampled_from([*names]),
        values=st.lists(st.sampled_from([*choices]), min_size=1, max_size=2).map(tuple),
        ranks=st.sampled_from([*RANKS]),
        batches=st.sampled_from([*BATCHES]),
    )
    return st.lists(metric, max_size=most, unique_by=lambda metric: metric.name).map(tuple)


def single_totals(drawn: tuple[Metric, ...]) -> tuple[Metric, ...]:
    """Keep only the first value of each metric, because totals of one name have one shape."""
    return tuple(replace(total, values=total.values[:1]) for total in drawn)


def sizes(draw: st.DrawFn) -> dict[str, Any]:
    """Draw how much is trained."""
    return {
        "accumulation": draw(st.integers(1, 3)),
        "batch_size": draw(st.integers(2, 5)),
        "updates_per_epoch": draw(st.integers(2, 4)),
        "spare_samples": draw(st.integers(0, 3)),
        "epochs": draw(st.integers(2, 3)),
    }


def figures(draw: st.DrawFn) -> dict[str, Any]:
    """Draw what training records and what an evaluation adds up."""
    return {
        "metrics": draw(metrics("abcd", VALUES, 4)),
        "loss_is_number": draw(st.booleans()),
        "totals": single_totals(draw(metrics("pqr", TOTALS, 3))),
        "evaluation_records": draw(st.booleans()),
        "evaluation_draws": draw(st.booleans()),
    }


def updates(draw: st.DrawFn, losses: tuple[str, ...]) -> dict[str, Any]:
    """Draw the parts of an update."""
    return {
        "freezing": draw(st.sampled_from(FREEZING)),
        "optimizer": draw(st.sampled_from([*OPTIMIZERS])),
        "loss": draw(st.sampled_from(losses)),
        "parts": tuple(part for part in PARTS if draw(st.integers(0, 2)) == 2),
        "max_grad_norm": draw(st.sampled_from((1.0, 0.05, 0.0))),
        "gradient_noise": draw(st.booleans()),
        "dropout": draw(st.booleans()),
        "batch_norm": draw(st.booleans()),
        "counts_flops": draw(st.booleans()),
    }


def intervals(draw: st.DrawFn) -> dict[str, Any]:
    """Draw how often a run logs, evaluates and saves, and what it keeps."""
    return {
        "log_every": draw(st.integers(1, 5)),
        "eval_every": draw(st.integers(1, 4)),
        "checkpoint_every": draw(st.integers(1, 4)),
        "keep": draw(st.sampled_from(("best", "last"))),
    }


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a copy that must run; only a `mistake` may make the run refuse it.

    Another order of the draws would give other cases for the same seed.
    """
    processes = draw(st.sampled_from((1, 2)))
    validation = draw(st.one_of(st.none(), st.integers(1, 13)))
    test = draw(st.integers(1, 13) if validation is None else st.none() | st.integers(1, 13))
    losses = LOSSES if processes > 1 else LOSSES[:4]
    early = st.none() | st.integers(1, 2) if validation is not None else st.none()
    scheduler = draw(st.sampled_from(SCHEDULERS))
    mistake = draw(st.sampled_from((*(None,) * 15, *MISTAKES)))
    if mistake == "unread flag":
        scheduler = "StepLR"
    return Case(
        processes=processes,
        validation=validation,
        test=test,
        scheduler=scheduler,
        mistake=mistake,
        **sizes(draw),
        **figures(draw),
        **updates(draw, losses),
        **intervals(draw),
        early_stopping=draw(early),
        seed=draw(st.integers(0, 3)),
        kill=draw(st.tuples(st.integers(0, 1), st.floats(0.2, 0.99), st.sampled_from(PLACES))),
    )
