"""The check of waits: its verdict on made-up notes, and its instrument."""

from __future__ import annotations

import linecache
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from common.tools.prove.checks.waits import verdict_of
from common.tools.prove.instruments.waits import WaitObserver
from common.tools.prove.observation.session import Session
from common.tools.prove.records.instrument_records import Wait
from tests.unit.tools.prove.made_up_records import run_with


def wait_note(step: int, *, is_logged: bool = False) -> Wait:
    return Wait(
        step=step,
        file=__file__,
        line=1,
        operation=".tolist()",
        caller_file=__file__,
        caller_line=1,
        is_in_installed_package=False,
        is_update_logged=is_logged,
    )


def test_a_line_that_waits_is_named_with_its_text() -> None:
    verdict = verdict_of(run_with([wait_note(step) for step in (2, 4, 5)]))
    assert verdict.passed is False
    (cause,) = verdict.causes
    assert "test_waits.py, line 1, waits for the device by .tolist(), in 3 of 7" in cause
    assert cause.endswith(Path(__file__).read_text().splitlines()[0])
    assert "reinforcement learning, pass --skip waits" in verdict.advice


def test_first_updates_and_log_lines_may_wait() -> None:
    notes = [wait_note(0), wait_note(1), wait_note(3, is_logged=True)]
    assert verdict_of(run_with(notes)).passed is True


def test_the_line_that_called_is_named_as_well() -> None:
    note = wait_note(2).model_copy(update={"caller_line": 3})
    (cause,) = verdict_of(run_with([note])).causes
    assert "line 1, waits for the device" in cause
    assert "(called by test_waits.py, line 3: from __future__" in cause


def test_a_wait_in_an_installed_package_is_reported() -> None:
    note = wait_note(2).model_copy(update={"is_in_installed_package": True, "caller_line": 3})
    verdict = verdict_of(run_with([note]))
    assert verdict.passed is True
    assert "installed packages wait as well: test_waits.py, line 1" in verdict.compared


class Notes:
    """A session that keeps the notes of an instrument."""

    def __init__(self) -> None:
        self.step = 0
        self.operations: list[str] = []
        self.waits: list[Wait] = []
        device = torch.device("cpu")
        self.run = SimpleNamespace(
            device=device,
            accelerator=SimpleNamespace(device=device),
            context=SimpleNamespace(recipe_file=Path(__file__)),
            plan=SimpleNamespace(logs=lambda step: False),
        )

    def write(self, wait: Wait) -> None:
        self.operations.append(wait.operation)
        self.waits.append(wait)


def operations_of(body: Callable[[torch.Tensor], object]) -> list[str]:
    """Return the operations that wait in a loop's body, which gets a tensor of the device."""
    return notes_of(body).operations


def notes_of(body: Callable[[torch.Tensor], object]) -> Notes:
    """Return the notes on a loop's body, which gets a tensor of the device."""
    session = Notes()
    observer = WaitObserver(session)  # type: ignore[arg-type]

    def batches(run: object, loader: object) -> Iterator[torch.Tensor]:
        yield torch.arange(4.0)

    for values in observer.around_batches(batches, session.run, None):  # type: ignore[arg-type]
        body(values)
    return session


@pytest.mark.parametrize(
    ("folder", "is_installed"), [("sub", False), ("lib/site-packages/package", True)]
)
def test_a_helper_in_another_folder_is_seen(
    folder: str, is_installed: bool, tmp_path: Path
) -> None:
    """Both its own line and the recipe's are noted."""
    helper = tmp_path / folder / "helper.py"
    helper.parent.mkdir(parents=True)
    helper.write_text("def total(values):\n    return values.sum().item()\n")
    total = runpy.run_path(str(helper))["total"]
    (wait,) = notes_of(lambda values: total(values)).waits[:1]
    assert (wait.file, wait.line) == (str(helper), 2)
    assert wait.caller_file == __file__
    assert "notes_of(lambda values: total(values))" in linecache.getline(__file__, wait.caller_line)
    assert wait.is_in_installed_package is is_installed


def plateau() -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def schedule() -> torch.optim.lr_scheduler.LRScheduler:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    optimizer.step()
    return scheduler


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda values: values.sum().item(),
    "float": lambda values: float(values[0]),
    "int": lambda values: int(values[0]),
    "bool": lambda values: bool(values.sum() > 1),
    "if": lambda values: 1 if values.sum() > 1 else 0,
    "index": lambda values: [10, 20, 30][values.long()[1]],
    "format": lambda values: f"{values[1]:.2f}",
    "text": lambda values: str(values),
    "print of several": lambda values: repr({"loss": values}),
    "tolist": lambda values: values.tolist(),
    "numpy": lambda values: values.numpy(),
    "asarray": lambda values: np.asarray(values),
    "cpu": lambda values: values.cpu(),
    "to cpu": lambda values: values.to("cpu"),
    "mean of Python": lambda values: sum(float(value) for value in values) / 4,
    "max of Python": lambda values: max(values),
    "nonzero": lambda values: values.nonzero(),
    "where": lambda values: torch.where(values > 1),
    "unique": lambda values: values.unique(),
    "mask": lambda values: values[values > 1],
    "masked_select": lambda values: values.masked_select(values > 1),
    "assignment of several": lambda values: values.__setitem__(values > 1, values[:2].clone()),
    "equal": lambda values: torch.equal(values, values + 1),
    "allclose": lambda values: torch.allclose(values, values + 1),
    "contains": lambda values: 3 in values,
    "bincount": lambda values: torch.bincount(values.long()),
    "one_hot": lambda values: F.one_hot(values.long()),
    "plateau": lambda values: plateau().step(values.sum()),
    "one_hot of as many classes as needed": lambda values: F.one_hot(values.long(), -1),
}


@pytest.mark.parametrize("body", WAITS.values(), ids=WAITS)
def test_waits_are_seen(body: Callable[[torch.Tensor], object]) -> None:
    """Operations that read values, or whose result has a size that depends on values, are noted."""
    assert operations_of(body)


def update(optimizer_class: type[torch.optim.Optimizer]) -> Callable[[torch.Tensor], object]:
    """Return a loop's body that makes an update with an optimizer, and averages the weights."""
    model = torch.nn.Linear(4, 2)
    optimizer = optimizer_class(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    average = torch.optim.swa_utils.AveragedModel(model)

    def body(values: torch.Tensor) -> None:
        for _ in range(2):
            model(values).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)

    return body


HARMLESS: dict[str, Callable[[torch.Tensor], object]] = {
    "arithmetic": lambda values: (values * 2 + 1).mean(),
    "detach": lambda values: values.detach().clone(),
    "fill by a mask": lambda values: values.__setitem__(values > 1, 0.0),
    "where of three": lambda values: torch.where(values > 1, values, 0),
    "indexing by positions": lambda values: values[torch.tensor([0, 2])],
    "slices": lambda values: values[1:3],
    "shape": lambda values: (len(values), values.shape, values.dtype),
    "iteration": lambda values: [value + 1 for value in values],
    "one_hot of known classes": lambda values: F.one_hot(values.long(), 4),
    "one_hot of named classes": lambda values: F.one_hot(values.long(), num_classes=4),
    "cross entropy": lambda values: F.cross_entropy(values[None], torch.tensor([1])),
    "dropout": lambda values: F.dropout(values, 0.5),
    "vmap": lambda values: torch.vmap(torch.sin)(values),
    "gradients of samples": lambda values: torch.vmap(torch.func.grad(torch.sin))(values),
    "choice of a function": lambda values: torch.cond(
        values.sum() > 0, torch.sin, torch.cos, (values,)
    ),
    "numbers of the host": lambda values: torch.tensor([1, 2]).tolist(),
    "draws on the host": lambda values: float(torch.rand(2).sum()),
    "Adam": update(torch.optim.Adam),
    "SGD": update(torch.optim.SGD),
    "schedule": lambda values: schedule().step(),
    "plateau of a number": lambda values: plateau().step(0.5),
    "gradients": lambda values: torch.autograd.grad(
        values.requires_grad_().square().sum(), [values]
    ),
}


@pytest.mark.parametrize("body", HARMLESS.values(), ids=HARMLESS)
def test_other_operations_do_not_wait(body: Callable[[torch.Tensor], object]) -> None:
    """Operations that a GPU only queues, or that concern only the host, are not noted."""
    assert operations_of(body) == []


def test_code_after_the_record_belongs_to_the_recorded_update() -> None:
    """At the log line of the second update, a value is read after `run.record`."""
    session = Notes()
    session.run.plan.logs = lambda step: step == 2
    observer = WaitObserver(session)  # type: ignore[arg-type]

    def batches(run: object, loader: object) -> Iterator[torch.Tensor]:
        for _ in range(3):
            yield torch.arange(4.0)

    for values in observer.around_batches(batches, session.run, None):  # type: ignore[arg-type]
        session.step += 1  # as `run.record` does
        if session.step == 2:
            values.sum().item()
    (wait,) = session.waits
    assert wait.step == 1  # the number of updates before the recorded one
    assert wait.is_update_logged


def test_synchronising_in_the_loop_is_a_wait(tmp_path: Path) -> None:
    """Before and after the loop, it is none. The wrapper is that of a real session."""
    session = Notes()
    observer = WaitObserver(session)  # type: ignore[arg-type]
    device = ModuleType("device")
    device.synchronize = lambda: None  # type: ignore[attr-defined]
    wrap = Session(folder=tmp_path, launch=0, rank=0).wrap
    wrap(device, "synchronize", observer.around_synchronize)

    def batches(run: object, loader: object) -> Iterator[torch.Tensor]:
        yield torch.arange(4.0)

    device.synchronize()
    for _ in observer.around_batches(batches, session.run, None):  # type: ignore[arg-type]
        device.synchronize()
    device.synchronize()
    assert session.operations == ["synchronize()"]
