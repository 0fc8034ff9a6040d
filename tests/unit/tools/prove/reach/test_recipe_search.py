"""The search for values that a recipe's loop can reach."""

from __future__ import annotations

import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TextIO

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from common.data.dataset import Data, DatasetSamples
from common.data.stored_samples import TensorSamples
from common.tools.prove.reach.reachable_values import ReachableValues
from common.tools.prove.reach.recipe_search import RecipeSearch


class Average:
    """An object with a state that a checkpoint could hold."""

    def __init__(self) -> None:
        self.value = torch.zeros(2)
        self.updates = 0

    def update(self) -> None:
        self.value += 1
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Lookahead(torch.optim.Adam):
    """An optimizer with slow weights, which its state_dict does not have."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1)
        self.count = 0
        self._slow = {p: p.detach().clone() for p in self.param_groups[0]["params"]}

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for slow in self._slow.values():
            slow.add_(1)
        return super().step(closure)


class WarmUp(torch.optim.lr_scheduler.LambdaLR):
    """A scheduler with a counter, which its state_dict does not have."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls = 0
        super().__init__(optimizer, lambda step: 1.0)

    def step(self, epoch: Any = None) -> None:
        self.calls += 1
        super().step(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}


class Counting(nn.Module):
    """A network with a counter and a buffer that its state_dict does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(1), persistent=False)


class Lines:
    """A data set that reads the next line of a file for each sample."""

    def __init__(self, file: TextIO) -> None:
        self.file = file

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> str:
        return next(self.file)


class Centre:
    """A hook with a mean that its module does not have."""

    def __init__(self) -> None:
        self.mean = 0.0

    def __call__(self, *arguments: Any) -> None:
        self.mean += 1.0


def layers() -> nn.Sequential:
    """Return a network of torch's own modules alone."""
    return nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))


def with_hooks() -> nn.Sequential:
    """Return a network with a hook of torch, and a hook of the recipe on a module."""
    network = layers()
    network[0].register_forward_hook(nullcontext().__exit__)  # a function of a library
    network[0].register_forward_hook(Centre())
    return network


def with_parameter_hook() -> nn.Sequential:
    network = layers()
    network[0].weight.register_hook(Centre())
    return network


def with_step_hook() -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(layers().parameters(), 0.1)
    optimizer.register_step_post_hook(Centre())
    return optimizer


def lookahead() -> Lookahead:
    """Return an optimizer that has made an update, so that it has all its attributes."""
    optimizer = Lookahead(layers().parameters())
    optimizer.step()
    return optimizer


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(8)))


def forever() -> Iterator[Any]:
    """Yield batches without end. The iterator of the loader is in no variable."""
    while True:
        for _ in loader():
            yield None


def remember(values: list[int] = []) -> list[int]:  # noqa: B006
    """Keep a state in a default."""
    return values


def counting() -> Callable[[], int]:
    """Return a function that keeps a state in its closure."""
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return count

    return step


def numbers() -> Iterator[int]:
    """Yield the numbers from 1 on."""
    position = 0
    while True:
        position += 1
        yield position


class SearchOfExample(RecipeSearch):
    """The search, without the global variables of all modules of these tests."""

    def own_modules(self) -> dict[str, ModuleType]:
        return {"example": sys.modules["example"]}


def look(
    kept: dict[str, object] | None = None,
    search_class: type[RecipeSearch] = SearchOfExample,
    **variables: Any,
) -> ReachableValues:
    """Search from a function in a user's module that has these local variables."""
    module = ModuleType("example")
    module.__file__ = "example.py"
    lines = [f"    {name} = given[{name!r}]" for name in variables]
    code = "\n".join(["def loop(given, look):", *lines, "    del given", "    return look()"])
    exec(code, vars(module))
    search = search_class(kept or {}, None)
    sys.modules["example"] = module
    try:
        return module.loop(variables, lambda: search.reachable_values(sys._getframe(1)))
    finally:
        del sys.modules["example"]


# By name: a value, a function that changes it, and the path that shows the change.
CASES: dict[str, tuple[Any, Callable[[Any], object], str]] = {
    "list": ([1], lambda value: value.append(2), "value"),
    "dict": ({"a": 1}, lambda value: value.update(a=2), "value"),
    "nested dict": ({"a": {"b": [1]}}, lambda value: value["a"]["b"].append(1), "value['a']['b']"),
    "deque": (deque([1]), lambda value: value.append(2), "value"),
    "set": ({1}, lambda value: value.add(2), "value"),
    "tensor": (torch.zeros(2), lambda value: value.add_(1), "value"),
    "array": (np.zeros(2), lambda value: value.fill(1), "value"),
    "large tensor": (torch.zeros(5_000_000), lambda value: value.add_(1), "value"),
    "list of tensors": ([torch.zeros(2)], lambda value: value[0].add_(1), "value[0]"),
    "bf16": (torch.zeros(2, dtype=torch.bfloat16), lambda value: value.add_(1), "value"),
    "torch generator": (torch.Generator(), lambda g: torch.rand(1, generator=g), "value"),
    "numpy generator": (np.random.default_rng(0), lambda value: value.random(), "value"),
    "numpy state": (np.random.RandomState(0), lambda value: value.rand(), "value"),
    "python generator": (random.Random(0), lambda value: value.random(), "value"),
    "stateful": (Average(), lambda value: value.update(), "value"),
    "attribute beside the state": (Average(), lambda value: value.update(), "value.updates"),
    "attribute of a network": (
        Counting(),
        lambda value: setattr(value, "calls", 1),
        "value.calls",
    ),
    "buffer of a network": (Counting(), lambda value: value.seen.add_(1), "value.seen"),
    "weights": (nn.Linear(2, 2), lambda value: value.weight.data.add_(1), "value"),
    "namespace": (SimpleNamespace(a=1), lambda value: setattr(value, "a", 2), "value.a"),
    "default": (remember, lambda value: value().append(1), "value.__defaults__[0]"),
    "closure": (counting(), lambda value: value(), "value.count"),
    "generator function": (numbers(), next, "value.position"),
    "dropout": (layers(), lambda value: setattr(value[1], "p", 0.4), "value[1].p"),
    "frozen layer": (
        layers(),
        lambda value: value[0].requires_grad_(False),
        "value[0].requires_grad",
    ),
    "mode of a layer": (layers(), lambda value: value[1].eval(), "value[1].training"),
    "hook": (
        with_hooks(),
        lambda value: value(torch.zeros(2)),
        "value[0]._forward_hooks[0].mean",
    ),
    "hook of a parameter": (
        with_parameter_hook(),
        lambda value: value(torch.zeros(2)).sum().backward(),
        "value[0].weight._backward_hooks[0].mean",
    ),
    "hook of an optimizer": (
        with_step_hook(),
        lambda value: value.step(),
        "value._optimizer_step_post_hooks[0].mean",
    ),
    "attribute of an optimizer": (lookahead(), lambda value: value.step(), "value.count"),
    "tensor of a parameter": (
        lookahead(),
        lambda value: value.step(),
        "value._slow[Parameter 1]",
    ),
    "dict with tuples as keys": (
        {("a", 1): torch.zeros(1)},
        lambda value: value[("a", 1)].add_(1),
        "value[('a', 1)]",
    ),
    "cycle": (itertools.cycle(loader()), next, "value"),
    "zip": (zip(loader(), loader(), strict=True), next, "value"),
    "count": (itertools.count(), next, "value"),
    "iterator of a list": (iter([1, 2, 3]), next, "value"),
    "iterator of a loader": (iter(loader()), next, "value"),
    "loader in a generator function": (forever(), next, "value"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_change_shows(case: str) -> None:
    """A change gives the path a different digest. Without a change, the digest stays the same."""
    value, change, path = CASES[case]
    if "generator function" in case:
        next(value)
    before = look(value=value)
    assert look(value=value).digests == before.digests
    change(value)
    after = look(value=value)
    assert path in before.digests, before.digests
    assert before.digests[path] != after.digests[path]


def test_a_plain_variable_shows() -> None:
    assert look(count=1).digests["count"] != look(count=2).digests["count"]
    reached = look(count=1, search_class=RecipeSearch)
    assert "local variable of loop()" in reached.descriptions["count"].text
    assert "global variable of tests.unit.tools.prove.reach.test_recipe_search.py" in {
        description.text.rpartition(", ")[2] for description in reached.descriptions.values()
    }


TYPES = {
    "list": "other",
    "tensor": "other",
    "torch generator": "generator",
    "numpy state": "generator",
    "python generator": "generator",
    "stateful": "stateful",
    "buffer of a network": "buffer",
    "weights": "network",
    "frozen layer": "setting",
    "cycle": "iterator",
}


@pytest.mark.parametrize("case", TYPES)
def test_the_type_of_a_value_is_stated(case: str) -> None:
    value, _, path = CASES[case]
    assert look(value=value).descriptions[path].type == TYPES[case]


def test_a_text_and_an_open_file_have_types_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("line\n")
    with path.open() as file:
        reached = look(name="a text", file=file)
    assert reached.descriptions["name"].type == "text"
    assert reached.descriptions["file"].type == "file"


@pytest.mark.parametrize("reads_by_line", [False, True])
def test_the_position_of_a_file_of_the_data_shows(tmp_path: Path, reads_by_line: bool) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("line\n" * 100_000)
    with path.open() as file:
        lines = Lines(file)
        splits = {"train": DatasetSamples(lines), "test": TensorSamples(x=torch.zeros(2))}
        data = Data("lines", splits)
        before = look(data=data)
        for _ in range(50_000):  # more than a buffer
            next(file) if reads_by_line else file.readline()
        after = look(data=data)
    name = "data.splits['train'].dataset.file"
    assert before.digests[name] != after.digests[name]


def test_what_the_library_notes_of_a_split_is_left_out() -> None:
    """It notes the writes to a split in each launch, so a resume restores nothing."""
    split = TensorSamples(x=torch.zeros(2))
    data = Data("mine", {"train": split, "test": TensorSamples(x=torch.ones(2))})
    before = look(data=data)
    split.refuse_changes()
    after = look(data=data)
    assert before.digests == after.digests
    split.tensors["x"].add_(1)
    assert look(data=data).digests != before.digests


def test_the_state_of_kept_parts_is_left_out() -> None:
    """The search lists only attributes of kept parts that their state_dict lacks."""
    average = Average()
    network = Counting()
    reached = look({"ema": average, "model": network}, ema=average, model=network)
    assert "ema" not in reached.digests
    assert "model" not in reached.digests
    assert {"ema.updates", "model.calls", "model.seen"} <= reached.digests.keys()


def test_wrappers_of_accelerate_are_looked_into() -> None:
    accelerator = Accelerator(cpu=True)
    own_optimizer = lookahead()
    optimizer, scheduler = accelerator.prepare(own_optimizer, WarmUp(own_optimizer))
    kept = {"optimizer": optimizer, "scheduler": scheduler}
    reached = look(kept, optimizer=optimizer, scheduler=scheduler)
    assert {"optimizer", "optimizer.optimizer", "scheduler"}.isdisjoint(reached.digests)
    for path in ("optimizer.optimizer.count", "scheduler.scheduler.calls"):
        assert reached.descriptions[path].type == "attribute"


def test_an_attribute_of_a_kept_object_has_a_type_of_its_own() -> None:
    """Its advice is about state_dict. A random generator needs the same advice everywhere."""
    average = Average()
    average.noise = torch.Generator()
    described = look({"ema": average}, ema=average).descriptions
    assert described["ema.updates"].type == "attribute"
    assert described["ema.noise"].type == "generator"
    assert look(ema=average).descriptions["ema.updates"].type == "other"


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.LBFGS])
def test_attributes_of_torch_optimizers_are_left_out(optimizer_class: Any) -> None:
    """A subclass has them as well. Some change in the first update, such as a cached size."""

    class Own(optimizer_class):  # type: ignore[misc]
        pass

    network = layers()
    optimizer = Own(network.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step(lambda: network(torch.ones(2)).sum())
    paths = look({"optimizer": optimizer}, optimizer=optimizer).digests
    assert not [path for path in paths if path.startswith("optimizer")]


def test_wrappers_and_private_attributes_of_libraries_are_left_out() -> None:
    """Libraries change them in each pass, so they would be named for nothing."""
    network = layers()
    network[1]._calls = 1
    reached = look(value=nn.DataParallel(network))
    assert "value.module[1].p" in reached.digests
    assert "value.device_ids" not in reached.digests
    assert not [path for path in reached.digests if "_calls" in path]


def test_hooks_of_libraries_are_left_out() -> None:
    network = layers()
    network[0].register_forward_hook(nn.Identity())
    network[0].register_forward_hook(nn.Dropout(0.5).forward)
    assert not [path for path in look(value=network).digests if "hook" in path]


def test_a_batch_of_a_frozen_iterator_is_not_taken() -> None:
    """The search leaves each iterator where it is."""
    iterators = {"cycle": itertools.cycle([1, 2]), "zip": zip([1, 2], [3, 4], strict=True)}
    look(**iterators)
    assert next(iterators["cycle"]) == 1
    assert next(iterators["zip"]) == (1, 3)


def test_a_submodule_in_a_variable_is_listed_once() -> None:
    network = layers()
    paths = look(value=network, layer=network[1]).digests
    assert "value[1].p" in paths
    assert "layer.p" not in paths


def test_a_search_draws_no_random_numbers() -> None:
    torch_state = torch.get_rng_state()
    python_state = random.getstate()
    look(**{name.replace(" ", "_"): case[0] for name, case in CASES.items()})
    assert torch_state.equal(torch.get_rng_state())
    assert python_state == random.getstate()


def test_values_that_hold_themselves_end_the_search() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert "value" in look(value=loop).digests
