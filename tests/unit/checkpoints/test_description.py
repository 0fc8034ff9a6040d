"""The description of parts in a checkpoint: an edit that it reveals is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from common.checkpoints.description import describe_parts, require_same_parts
from common.checkpoints.newest import restore_newest
from common.checkpoints.state import Parts
from common.errors import UserError
from common.run_directory.records import PartDescription, RunIdentity
from tests.unit.checkpoint_store import checkpoints_in
from tests.unit.manifest_facts import identity_at


class Net(nn.Module):
    """Two layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 3)


class OtherNet(Net):
    """Another class with the same parameters."""


def split(model: Any) -> list[dict[str, Any]]:
    return [{"params": [*model.body.parameters()]}, {"params": [*model.head.parameters()]}]


def adamw(groups: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, **{"lr": 0.1, **options})


def linear(optimizer: Any) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def chained(*rates: float) -> Callable[[Any], Any]:
    """Return a function that makes a schedule of other schedules, one for each rate."""

    def schedule(optimizer: Any) -> Any:
        inner = [lr_scheduler.ExponentialLR(optimizer, rate) for rate in rates]
        return lr_scheduler.ChainedScheduler(inner)

    return schedule


def parts_of(
    network: type[nn.Module] = Net,
    groups: Callable[[Any], Any] = split,
    optimizer: Callable[..., Any] = adamw,
    schedule: Callable[[Any], Any] = linear,
) -> Parts:
    """Return the parts of a training run after one update."""
    model = network()
    parts = Parts(0, mesh=None)
    trained_optimizer = optimizer(groups(model))
    scheduler = schedule(trained_optimizer)
    for name, part in {
        "model": model,
        "optimizer": trained_optimizer,
        "scheduler": scheduler,
    }.items():
        parts.add(name, part)
    parts.freeze_description()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    trained_optimizer.step()
    scheduler.step()
    return parts


def saved(folder: Path, parts: Parts) -> None:
    """Write a checkpoint."""
    checkpoints = checkpoints_in(folder, keep=2)
    checkpoints.save(1, parts.collect(), identity(parts))
    checkpoints.wait()
    assert checkpoints.failure is None


def identity(parts: Parts) -> RunIdentity:
    return identity_at(1, parts_described=parts.parts_described)


def resumed(folder: Path, parts: Parts) -> None:
    """Restore the newest checkpoint into the parts."""
    restore_newest(checkpoints_in(folder, keep=2), None, parts, identity(parts))


def assert_same_tensors(first: Parts, second: Parts) -> None:
    """Check that a checkpoint of either would have the same tensors."""
    files = first.collect().files
    others = second.collect().files
    assert files.keys() == others.keys()
    for file, tensors in files.items():
        assert tensors.keys() == others[file].keys()
        for name, value in tensors.items():
            assert torch.equal(value, others[file][name]), f"{name} in {file}"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"network": OtherNet}, "the class of model was Net, and is OtherNet now"),
        ({"optimizer": torch.optim.Adam}, "the class of optimizer was AdamW, and is Adam now"),
        (
            {"optimizer": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9)},
            "the class of optimizer was AdamW, and is SGD now",
        ),
        ({"optimizer": lambda g: adamw(g, amsgrad=True)}, "amsgrad in parameter group 0"),
        ({"optimizer": lambda g: adamw(g, betas=(0.9, 0.9))}, "betas in parameter group 0"),
        ({"optimizer": lambda g: adamw(g, weight_decay=0.5)}, "weight_decay in parameter group"),
        ({"groups": lambda model: split(model)[::-1]}, "model.head.weight at position 0 instead"),
        ({"groups": lambda model: model.parameters()}, "has 1 parameter group (of 6 parameters)"),
        ({"groups": lambda model: split(model)[:1]}, "but had 2 (of 2+2)"),
        (
            {"groups": lambda m: [{"params": [m.body.weight, m.head.bias]},
                                  {"params": [m.head.weight, m.body.bias]}]},
            "has model.head.bias at position 1 instead of model.body.bias",
        ),
        (
            {"schedule": lambda optimizer: lr_scheduler.StepLR(optimizer, 3)},
            "the class of scheduler was LambdaLR, and is StepLR now",
        ),
        ({"optimizer": lambda g: adamw(g, lr=0.2)}, "optimizer is 0.2 but was 0.1"),
    ],
)  # fmt: skip
def test_edited_part_is_refused_with_the_difference(
    tmp_path: Path, edit: dict[str, Any], words: str
) -> None:
    """One sentence names the edited part before anything is restored. Other parts are restored."""
    saved(tmp_path, parts_of())
    with pytest.raises(UserError) as refused:
        resumed(tmp_path, parts_of(**edit))
    assert words in refused.value.message
    assert "\n" not in refused.value.message
    resumed(tmp_path, parts_of())


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, 20),
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer),
        lambda optimizer: lr_scheduler.ChainedScheduler(
            [linear(optimizer), lr_scheduler.StepLR(optimizer, 2)]
        ),
    ],
)
def test_values_that_a_schedule_changes_are_no_difference(tmp_path: Path, schedule: Any) -> None:
    """A momentum may follow the learning rate, and the same update may be computed another way."""

    class Plateau:
        """A schedule whose step needs no metric from the caller."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner
            self.state_dict = inner.state_dict
            self.load_state_dict = inner.load_state_dict

        def step(self) -> None:
            """Pass a metric to a schedule that needs one."""
            is_plateau = isinstance(self.inner, lr_scheduler.ReduceLROnPlateau)
            self.inner.step(*[1.0] * is_plateau)

    first = parts_of(schedule=lambda optimizer: Plateau(schedule(optimizer)))
    saved(tmp_path, first)
    again = parts_of(
        schedule=lambda optimizer: Plateau(schedule(optimizer)),
        optimizer=lambda groups: adamw(groups, foreach=True),
    )
    resumed(tmp_path, again)
    assert_same_tensors(again, first)


@pytest.mark.parametrize("is_added", [False, True], ids=["removed", "added"])
def test_part_that_only_one_side_has_is_named(tmp_path: Path, is_added: bool) -> None:
    """It has no description to compare with, so the comparison of names refuses it."""
    before = parts_of()
    now = parts_of()
    (now if is_added else before).add("critic", nn.Linear(1, 1))
    for parts in (before, now):
        parts.freeze_description()
    saved(tmp_path, before)
    with pytest.raises(UserError, match="either the checkpoint or this run lacks critic"):
        resumed(tmp_path, now)


def test_changed_inner_schedule_is_refused(tmp_path: Path) -> None:
    """The message shows the schedules as the manifest has them."""
    saved(tmp_path, parts_of(schedule=chained(0.9, 0.8)))
    message = (
        "the inner schedules of scheduler are [{'class': 'ExponentialLR', 'rates': [0.1, 0.1]}] "
        "but were [{'class': 'ExponentialLR', 'rates': [0.1, 0.1]}, {'class': 'ExponentialLR', "
    )
    with pytest.raises(UserError, match=re.escape(message)):
        resumed(tmp_path, parts_of(schedule=chained(0.9)))
    resumed(tmp_path, parts_of(schedule=chained(0.9, 0.8)))


def described(**attributes: Any) -> dict[str, PartDescription]:
    """Return the description of a part that is a user's own and has these attributes."""
    return describe_parts({"scheduler": SimpleNamespace(**attributes)})


def test_manifest_has_the_keys_of_earlier_ones() -> None:
    """What JSON can't express is left out, and a part without rates states None."""
    descriptions = parts_of(schedule=chained(0.9)).parts_described
    written = {name: part.to_json() for name, part in descriptions.items()}
    optimizer = written.pop("optimizer")
    schedule = {"class": "ExponentialLR", "rates": [0.1, 0.1]}
    assert written == {
        "model": {"class": "Net"},
        "scheduler": {"class": "ChainedScheduler", "rates": None, "schedules": [schedule]},
    }
    assert [*optimizer] == ["class", "groups"]
    assert [[*group] for group in optimizer["groups"]] == [["parameters", "options"]] * 2
    for rates, fields in (
        (torch.tensor(0.5), {"rates": 0.5}),
        ((0.5, float("nan")), {"rates": [0.5, None]}),  # JSON has no NaN
        (np.array([0.5]), {}),
    ):
        assert described(base_lrs=rates)["scheduler"].to_json() == {
            "class": "SimpleNamespace",
            **fields,
        }


def test_rates_that_were_not_stated_are_not_compared() -> None:
    """JSON could not express them. Without rates, a part states None, which is compared."""
    path = Path("step-1")
    require_same_parts(path, described(base_lrs=np.array([0.5])), described(base_lrs=[0.5]))
    with pytest.raises(UserError, match=r"rates of scheduler are \[0\.5\] but were None"):
        require_same_parts(path, described(), described(base_lrs=[0.5]))
