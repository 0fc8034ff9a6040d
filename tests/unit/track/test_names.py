"""Names, formats and meanings of metrics."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

from common import metric_names
from common.track.names import MEANINGS, METRICS, PEAK, is_proportion, metric_named
from common.training.rates import learning_rates
from tests.launch import REPOSITORY


@pytest.mark.parametrize(
    ("name", "heading", "value", "text"),
    [
        ("val/accuracy", "accuracy", 0.5, "0.5000"),
        ("test/f1", "F1", 1, "1.0000"),
        ("val/best_accuracy", "best accuracy", 0.25, "0.2500"),
        ("perf/samples_per_second", "throughput, samples/s", 1234.5, "1,234"),
        ("perf/mfu", "MFU", 0.123, "12.3%"),
        ("time/train_seconds", "training time", 1200.0, "20.0 min"),
        ("time/total_seconds", "total time", 0.0, "0.0 s"),
        ("val/macro_recall", "macro recall", -1, "-1.0000"),
        ("loss", "loss", None, "–"),
    ],
)
def test_metrics_have_a_heading_and_a_format(
    name: str, heading: str, value: float | None, text: str
) -> None:
    """A metric of the table has its full name or lacks the split. A recipe's own has its name."""
    assert (metric_named(name).heading, metric_named(name).text(value)) == (heading, text)


def test_learning_rate_is_logged_under_the_name_that_is_described() -> None:
    """The name also is the beginning of the names of further rates."""
    optimizers = {
        "optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1),
        "other": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.2),
    }
    first, second = learning_rates(optimizers)
    assert first in MEANINGS
    assert metric_named(second).label == f"{metric_named(first).label}, other"


def test_names_of_metrics_are_stated_once() -> None:
    """Other modules of the library import them."""
    stated = {value for name, value in vars(metric_names).items() if name.isupper()}
    assert MEANINGS.keys() == stated
    for path in (REPOSITORY / "common").rglob("*.py"):
        if path == Path(metric_names.__file__):
            continue
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        constants = {node.value for node in nodes if isinstance(node, ast.Constant)}
        assert not constants & stated, path


def test_headings_tell_metrics_apart() -> None:
    """No two panels of a section have one title."""
    titles = [(metric.panel, metric.heading) for metric in METRICS.values()]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("accuracy", True),
        ("val/accuracy", True),
        ("top5_accuracy", True),
        ("balanced_accuracy", False),
        ("f1", False),
        ("inaccuracy", False),
        ("loss", False),
    ],
)
def test_proportions_are_known_by_name(name: str, expected: bool) -> None:
    """Only they have a standard error from the number of samples."""
    assert is_proportion(name) == expected


def test_page_lists_the_logged_names() -> None:
    """The table in `docs/metrics.md` is this one. A run logs all full names except `PEAK`."""
    assert {name for name in METRICS if "/" in name and name != PEAK} <= MEANINGS.keys()
    lines = ["| name | meaning | unit |", "|---|---|---|"]
    for name, meaning in MEANINGS.items():
        metric = metric_named(name)
        unit = "0 to 1" if metric.form.endswith("%") else metric.unit
        lines.append(f"| `{name}` | {meaning} | {unit or '–'} |")
    table = "\n".join(lines)
    page = (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert f"\n\n{table}\n" in page, f"put this table in the page:\n{table}"
