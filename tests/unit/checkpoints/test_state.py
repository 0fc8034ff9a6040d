"""Named parts of a training run: saved and restored bit for bit, and refused where they differ."""

from __future__ import annotations

import copy
import random
import re
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from common.checkpoints.adapters import RandomState
from common.checkpoints.folders import read_manifest
from common.checkpoints.newest import restore_newest
from common.checkpoints.same_run import excerpts, require_same_facts
from common.checkpoints.state import Parts
from common.checkpoints.tensors import read_tensors, write_tensors
from common.errors import UserError
from common.storage.value_digests import digest_of_state
from tests.ranks import on_ranks
from tests.unit.checkpoint_store import RUN_ID, checkpoints_in, newest_whole
from tests.unit.manifest_facts import identity_at

CPU = torch.device("cpu")
DATA = {"name": "tiny", "sizes": {"train": 8}, "fingerprint": "a", "class_names": ["b", "c"]}


class Counts:
    """A part with a state of its own, such as early stopping's."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


class Sums(Counts):
    """A part that each rank has, and whose states are added up for another number of ranks."""

    def load_from_ranks(self, states: list[dict[str, Any]]) -> None:
        self.values = {"total": sum(state["total"] for state in states)}


class Tied(nn.Module):
    """A model with tied weights and batch norm."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.2))
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens)))


class Training:
    """Two networks with optimizers and schedules, an average of one, and a few counts."""

    def __init__(self, seed: int, optimizer: str = "adamw") -> None:
        torch.manual_seed(seed)
        self.model = Tied()
        self.critic = nn.Sequential(nn.Conv2d(2, 3, 3), nn.PReLU())
        self.critic = self.critic.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer_makers: dict[str, Any] = {
            "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
            "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, fused=True),
            "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, foreach=True),
            "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
            "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
            "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
        }
        self.optimizer = optimizer_makers[optimizer](self.model.parameters())
        self.critic_optimizer = optimizer_makers[optimizer](self.critic.parameters())
        self.scheduler = lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.critic_scheduler = lr_scheduler.ReduceLROnPlateau(self.critic_optimizer, patience=0)
        self.counts = Counts(best=float("-inf"), history=[], mean=torch.zeros(2))
        self.parts = Parts(rank=0, mesh=None)
        for name, part in vars(self).items():
            if name != "parts":
                self.parts.add(name, part)
        self.parts.add("random", RandomState(CPU), shared=False)

    def step(self) -> tuple[float, float]:
        loss = self.model(torch.randint(5, (8,))).square().mean() * (1 + random.random())
        critic_loss = self.critic(torch.randn(2, 2, 5, 5)).square().mean() + np.random.rand()
        (loss + critic_loss).backward()
        for optimizer in (self.optimizer, self.critic_optimizer):
            optimizer.step()
            optimizer.zero_grad()
        self.scheduler.step()
        self.critic_scheduler.step(critic_loss.item())
        self.ema.update_parameters(self.model)
        self.counts.values["history"].append(loss.item())
        self.counts.values["mean"] += loss.item()
        return loss.item(), critic_loss.item()


def save(folder: Path, step: int, *ranks: Parts, after: Path | None = None) -> Path:
    """Write a checkpoint of all ranks, resumed from the one at `after` if stated."""
    checkpoints = [
        checkpoints_in(folder, rank, len(ranks), timeout=60) for rank in range(len(ranks))
    ]
    for writer, parts in zip(checkpoints, ranks, strict=True):
        if after is not None:
            writer.resume_from(after, read_manifest(after), best_is_damaged=False)
        writer.save(step, parts.collect(), identity_at(step))
    for writer in checkpoints:
        writer.wait()
        assert writer.failure is None
    return folder / f"step-{step:08d}"


def restore(path: Path, parts: Parts, world_size: int = 1) -> None:
    assert newest_whole(path.parent, path.name) == (path, [])
    parts.restore(path, read_manifest(path), world_size)


def bytes_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "amsgrad", "adafactor", "nadam", "rprop"])
def test_resumed_training_gives_the_same_bits(tmp_path: Path, optimizer: str) -> None:
    """All parts count: two networks and optimizers, averaged weights, schedules, counts, random
    numbers.
    """
    unbroken = Training(0, optimizer)
    for _ in range(3):
        unbroken.step()
    path = save(tmp_path, 3, unbroken.parts)
    expected = [unbroken.step() for _ in range(4)]
    resumed = Training(1, optimizer)
    parameter_ids = {id(p) for group in resumed.optimizer.param_groups for p in group["params"]}
    # Draw from each generator, so that the restore must set it back.
    random.random()
    np.random.rand()
    torch.rand(1)
    restore(path, resumed.parts)
    assert {id(p) for p in resumed.model.parameters()} == parameter_ids
    assert {
        id(p) for group in resumed.optimizer.param_groups for p in group["params"]
    } == parameter_ids
    assert resumed.model.head.weight is resumed.model.embedding.weight
    assert [resumed.step() for _ in range(4)] == expected
    for name in ("model", "critic", "ema"):
        assert_equal(weights_of(getattr(resumed, name)), weights_of(getattr(unbroken, name)))
    assert resumed.ema.n_averaged == 7
    assert resumed.counts.values["history"] == unbroken.counts.values["history"]
    assert torch.equal(resumed.counts.values["mean"], unbroken.counts.values["mean"])
    assert resumed.counts.values["best"] == float("-inf")
    assert resumed.scheduler.state_dict() == unbroken.scheduler.state_dict()
    assert resumed.critic_scheduler.state_dict() == unbroken.critic_scheduler.state_dict()


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    """The file holds tied weights under their first name, as safetensors that any program reads."""
    training = Training(0)
    path = save(tmp_path, 1, training.parts)
    stored = read_tensors(path / "model.safetensors")
    assert stored.keys() == dict(training.model.named_parameters()).keys()
    assert "head.weight" not in stored
    assert torch.equal(stored["embedding.weight"], training.model.embedding.weight)


def test_fused_optimizers_get_the_strides_of_their_parameters(tmp_path: Path) -> None:
    """Files store tensors row by row, but a fused kernel needs state laid out as its parameter."""
    training = Training(0)
    training.step()
    path = save(tmp_path, 1, training.parts)
    resumed = Training(1)
    restore(path, resumed.parts)
    kernel = resumed.critic[0].weight
    assert not kernel.is_contiguous()
    for name in ("exp_avg", "exp_avg_sq"):
        assert resumed.critic_optimizer.state[kernel][name].stride() == kernel.stride()


def test_optimizer_state_keeps_its_precision(tmp_path: Path) -> None:
    """`load_state_dict` alone would round the moments to the data type of the weights."""
    parameter = nn.Parameter(torch.randn(3, 3, dtype=torch.bfloat16))
    moments = torch.randn(3, 3)
    optimizers = [torch.optim.AdamW([parameter]) for _ in range(2)]
    optimizers[0].state[parameter] = {"step": torch.tensor(3.0), "exp_avg": moments.clone()}
    parts = [Parts(0, mesh=None), Parts(0, mesh=None)]
    for named_parts, optimizer in zip(parts, optimizers, strict=True):
        named_parts.add("optimizer", optimizer)
    restore(save(tmp_path, 1, parts[0]), parts[1])
    assert torch.equal(optimizers[1].state[parameter]["exp_avg"], moments)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, 20),
        lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, scale_fn=lambda x: 0.5 * x),
        lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5]),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
        lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.LambdaLR(o, lambda step: 0.9**step)]
        ),
        lambda o: lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.LambdaLR(o, lambda e: 0.1 * e), lr_scheduler.MultiStepLR(o, [2, 3])],
            [4],
        ),
    ],
)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_schedules_continue_after_a_resume(tmp_path: Path, make: Any, is_wrapped: bool) -> None:
    """torch's schedules continue, even those with functions, which the recipe states again."""

    def started() -> tuple[Any, Any, Parts]:
        optimizer: Any = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        scheduler = make(optimizer)
        if is_wrapped:
            accelerator = Accelerator(cpu=True)
            optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
        parts = Parts(0, mesh=None)
        parts.add("optimizer", optimizer)
        parts.add("scheduler", scheduler)
        return optimizer, scheduler, parts

    def rates(optimizer: Any, scheduler: Any, steps: int) -> list[float]:
        values = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            values.append(optimizer.param_groups[0]["lr"])
        return values

    optimizer, scheduler, parts = started()
    rates(optimizer, scheduler, 3)
    path = save(tmp_path, 3, parts)
    expected = rates(optimizer, scheduler, 6)
    optimizer, scheduler, parts = started()
    restore(path, parts)
    assert rates(optimizer, scheduler, 6) == expected


def frozen_model() -> nn.Sequential:
    """Return a model of which 99 % is frozen."""
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 2), nn.BatchNorm1d(2))
    model[0].requires_grad_(False)
    return model


def test_checkpoints_share_one_file_of_frozen_weights(tmp_path: Path) -> None:
    """Each checkpoint holds trained weights only.

    A shared file holds the frozen ones, verified too.
    """
    model = frozen_model()
    parts = Parts(0, mesh=None)
    parts.add("model", model)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    checkpoints = checkpoints_in(tmp_path, timeout=60)
    saved = []
    for step in (1, 2):
        nn.init.constant_(model[1].weight, step)
        model[2].running_mean.fill_(step)
        checkpoints.save(step, parts.collect(), identity_at(step))
        checkpoints.wait()
        assert checkpoints.failure is None
        saved.append(weights_of(model))
    frozen = tmp_path / "frozen-model.safetensors"
    assert read_tensors(frozen).keys() == {"0.weight", "0.bias"}
    assert frozen.stat().st_size > 0.99 * whole
    for step in (1, 2):
        path = tmp_path / f"step-{step:08d}"
        assert bytes_of(path) < 0.02 * whole
        assert "../frozen-model.safetensors" in read_manifest(path).files
        resumed = frozen_model()
        parts = Parts(0, mesh=None)
        parts.add("model", resumed)
        restore(path, parts)
        assert_equal(weights_of(resumed), saved[step - 1])
        # The resumed run does not write the frozen weights again.
        written = frozen.stat().st_mtime_ns
        later = save(tmp_path, 10 + step, parts, after=path)
        assert bytes_of(later) < 0.02 * whole
        assert frozen.stat().st_mtime_ns == written
        assert newest_whole(tmp_path) == (later, [])
        assert not parts.collect().files["model.safetensors"].keys() & {"0.weight", "0.bias"}


def test_restore_ignores_files_outside_the_manifest(tmp_path: Path) -> None:
    """Such a file may be damaged, or left by an earlier start that had frozen other weights."""
    model = frozen_model()
    parts = Parts(0, mesh=None)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    parts.add("model", model)
    checkpoints = checkpoints_in(tmp_path, timeout=60)
    checkpoints.save(1, parts.collect(), identity_at(1))
    checkpoints.wait()
    write_tensors(tmp_path / "frozen-model.safetensors", {"of another": torch.zeros(3)})
    with torch.no_grad():
        before = {name: value.clone() for name, value in weights_of(model).items()}
        for value in model.parameters():
            value.zero_()
    restore(tmp_path / "step-00000001", parts)
    assert_equal(weights_of(model), before)


@pytest.mark.parametrize(
    ("count", "writer", "lack"),
    [
        (0, RUN_ID, "no checkpoint"),
        (1, RUN_ID, "no undamaged checkpoint"),
        (2, RUN_ID, "no undamaged checkpoint"),
        (1, "another run", "no checkpoint"),
    ],
)
def test_resume_from_the_start_says_what_is_lacking(
    count: int, writer: str, lack: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that failed before its first checkpoint has lost none."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    parts = Parts(0, mesh=None)
    parts.add("model", nn.Linear(2, 2))
    for step in range(1, count + 1):
        checkpoints = checkpoints_in(folder, timeout=60, run_id=writer)
        checkpoints.save(step, parts.collect(), identity_at(step, run_id=writer))
        checkpoints.wait()
        if writer == RUN_ID:
            (folder / f"step-{step:08d}" / "model.safetensors").write_bytes(b"")
    assert restore_newest(checkpoints_in(folder), None, parts, identity_at(0)) is None
    assert f"from its start, because it has {lack}\n" in capsys.readouterr().out


def test_weights_that_are_unfrozen_later_join_the_checkpoint(tmp_path: Path) -> None:
    """A restore takes them from the checkpoint, not from the file of frozen weights."""
    model = frozen_model()
    parts = Parts(0, mesh=None)
    parts.add("model", model)
    checkpoints = checkpoints_in(tmp_path, timeout=60)
    checkpoints.save(1, parts.collect(), identity_at(1))
    model[0].bias.requires_grad_(True)
    nn.init.constant_(model[0].bias, 7.0)
    checkpoints.save(2, parts.collect(), identity_at(2))
    checkpoints.wait()
    path = tmp_path / "step-00000002"
    assert "0.bias" in read_tensors(tmp_path / "frozen-model.safetensors")
    assert "0.bias" in read_tensors(path / "model.safetensors")
    assert "0.weight" not in read_tensors(path / "model.safetensors")
    # Whether or not the resumed run freezes it, the next checkpoint holds it.
    for is_frozen in (True, False):
        resumed = frozen_model()
        parts = Parts(0, mesh=None)
        resumed[0].bias.requires_grad_(not is_frozen)
        parts.add("model", resumed)
        restore(path, parts)
        assert_equal(weights_of(resumed), weights_of(model))
        assert "0.bias" in parts.collect().files["model.safetensors"]
        assert "0.weight" not in parts.collect().files["model.safetensors"]


@pytest.mark.parametrize("through_data", [False, True])
def test_averaged_weights_do_not_count_as_frozen(tmp_path: Path, through_data: bool) -> None:
    """An average has `requires_grad_(False)` but still changes, in place or through `.data`."""
    model = nn.Linear(4, 4)
    parts = Parts(0, mesh=None)
    average = copy.deepcopy(model).requires_grad_(False)
    parts.add("ema", average)

    def update() -> None:
        for mine, its in zip(average.parameters(), model.parameters(), strict=True):
            nn.init.normal_(its)
            (mine.data if through_data else mine).lerp_(its.detach(), 0.5)

    for step in range(1, 4):
        update()
        path = save(tmp_path, step, parts)
        resumed = nn.Linear(4, 4).requires_grad_(False)
        resumed_parts = Parts(0, mesh=None)
        resumed_parts.add("ema", resumed)
        restore(path, resumed_parts)
        assert_equal(weights_of(resumed), weights_of(average))
    # A resumed run recognises it as well.
    average = resumed
    parts = resumed_parts
    update()
    restored = nn.Linear(4, 4).requires_grad_(False)
    resumed_parts = Parts(0, mesh=None)
    resumed_parts.add("ema", restored)
    restore(save(tmp_path, 4, parts), resumed_parts)
    assert_equal(weights_of(restored), weights_of(average))


class RankState(NamedTuple):
    """The objects that one rank saves, and the `Parts` that holds them."""

    model: Tied
    sums: Sums
    guard: Counts
    parts: Parts


def ranks_of(count: int) -> list[RankState]:
    """Return the parts of each rank, with different statistics of batch norm."""
    ranks = []
    for rank in range(count):
        torch.manual_seed(0)
        model = Tied()
        sums = Sums(total=rank + 1)
        guard = Counts(seen=torch.tensor([rank]))
        model.body[1].running_mean.fill_(rank)
        parts = Parts(rank, mesh=None)
        parts.add("model", model)
        parts.add("sums", sums, shared=False)
        parts.add("guard", guard, shared=False)
        parts.add("random", RandomState(CPU), shared=False)
        ranks.append(RankState(model, sums, guard, parts))
    return ranks


def test_each_rank_gets_its_own_state_back(tmp_path: Path) -> None:
    """All ranks get the weights of rank 0, and each rank gets its own unshared state."""
    before = ranks_of(2)
    path = save(tmp_path, 1, *(rank.parts for rank in before))
    for rank, (model, sums, guard, parts) in enumerate(ranks_of(2)):
        model.body[1].running_mean.fill_(9)
        sums.values = {}
        guard.values = {}
        restore(path, parts, 2)
        assert model.body[1].running_mean.eq(rank).all()
        assert sums.values == {"total": rank + 1}
        assert guard.values["seen"].tolist() == [rank]
        assert torch.equal(model.head.weight, before[0].model.head.weight)


@pytest.mark.parametrize(("old", "new"), [(3, 1), (1, 2), (2, 3)])
def test_restore_on_another_number_of_processes(tmp_path: Path, old: int, new: int) -> None:
    """Sums add up over all ranks, buffers are those of rank 0, and generators stay as seeded."""
    path = save(tmp_path, 1, *(rank.parts for rank in ranks_of(old)))
    for model, sums, guard, parts in ranks_of(new):
        seeded = torch.get_rng_state()
        restore(path, parts, new)
        assert torch.equal(torch.get_rng_state(), seeded)
        assert model.body[1].running_mean.eq(0).all()
        assert sums.values == {"total": sum(range(1, old + 1))}
        assert guard.values["seen"].tolist() == [0]


STATES_OF_TWO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "equal": ({"a": [1, torch.ones(3)]}, {"a": [1, torch.ones(3)]}),
    "in another order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "another number": ({"a": [1, torch.ones(3)]}, {"a": [2, torch.ones(3)]}),
    "another tensor": ({"a": torch.ones(3)}, {"a": torch.zeros(3)}),
    "the same values in another order": ({"a": torch.tensor([1, 2])}, {"a": torch.tensor([2, 1])}),
    "another array": ({"a": np.arange(3)}, {"a": np.arange(3) + 1}),
    "another length": ({"rows": [1, 2, 3]}, {"rows": [1, 2]}),
    "other keys": ({"a": 1}, {"b": 1}),
    "a state on one rank only": ({}, {"a": torch.ones(2)}),
}


@pytest.mark.parametrize("states", STATES_OF_TWO.values(), ids=STATES_OF_TWO)
def test_each_rank_writes_a_part_that_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """If the states are equal, rank 0 writes them, and any number of ranks can read them."""

    def differing_positions(accelerator: Any, numbers: list[int]) -> list[int]:
        rows = accelerator.exchange.all_values(accelerator.process_index, numbers)
        return [position for position, column in enumerate(zip(*rows, strict=True))
                if len({*column}) > 1]  # fmt: skip

    monkeypatch.setattr("common.checkpoints.state.differing_positions", differing_positions)

    def parts_with(rank: int, state: dict[str, Any]) -> tuple[Parts, Counts]:
        parts = Parts(rank, mesh=None)
        replay = Counts(**state)
        parts.add("replay", replay, may_differ=True)
        return parts, replay

    def compared(accelerator: Any) -> Parts:
        parts, _ = parts_with(accelerator.process_index, states[accelerator.process_index])
        parts.compare_over_ranks(accelerator)
        return parts

    path = save(tmp_path, 1, *on_ranks(2, compared))
    for rank in range(2):
        parts, replay = parts_with(rank, {})
        restore(path, parts, 2)
        assert digest_of_state(replay.values) == digest_of_state(states[rank])
    are_equal = digest_of_state(states[0]) == digest_of_state(states[1])
    assert ("replay" in read_manifest(path).shared) == are_equal
    parts, replay = parts_with(0, {})
    if are_equal:
        restore(path, parts)
        assert digest_of_state(replay.values) == digest_of_state(states[0])
    else:
        with pytest.raises(UserError, match=r"'replay' .* has a state of its own on each process"):
            restore(path, parts)


@pytest.mark.parametrize("left", [(), ("head.weight",), ("body.0.bias", "head.weight")])
def test_gradients_that_are_left_come_back(tmp_path: Path, left: tuple[str, ...]) -> None:
    """A parameter without a gradient has none after the restore, and not zeros."""

    def model_and_parts() -> tuple[Tied, Parts]:
        model = Tied()
        parts = Parts(0, mesh=None)
        parts.add("model", model)
        parts.add_left_gradients()
        return model, parts

    model, parts = model_and_parts()
    for name in left:
        parameter = model.get_parameter(name)
        parameter.grad = torch.randn_like(parameter)
    path = save(tmp_path, 1, parts)
    resumed, resumed_parts = model_and_parts()
    restore(path, resumed_parts)
    for (name, parameter), before in zip(
        resumed.named_parameters(), model.parameters(), strict=True
    ):
        assert (parameter.grad is None) == (before.grad is None), name
        assert before.grad is None or torch.equal(before.grad, parameter.grad)


def test_random_numbers_continue_after_a_restore(tmp_path: Path) -> None:
    """The generators of torch, NumPy and Python continue, even between two normal draws."""

    def draw() -> list[float]:
        return [torch.rand(()).item(), np.random.randn(), random.gauss(), random.random()]

    parts = Parts(0, mesh=None)
    parts.add("random", RandomState(CPU), shared=False)
    draw()
    path = save(tmp_path, 1, parts)
    expected = [draw() for _ in range(3)]
    restore(path, parts)
    assert [draw() for _ in range(3)] == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_resumed_training_on_cuda_gives_the_same_results(tmp_path: Path) -> None:
    """The device's generator and optimizer state are restored, with frozen weights in the model."""
    device = torch.device("cuda")

    def started() -> tuple[nn.Module, torch.optim.Optimizer, Parts]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)).to(device)
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(model[2].parameters(), fused=True)
        parts = Parts(0, mesh=None)
        parts.add("model", model)
        parts.add("optimizer", optimizer)
        parts.add("random", RandomState(device), shared=False)
        return model, optimizer, parts

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        loss = model(torch.ones(3, 4, device=device)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    model, optimizer, parts = started()
    step(model, optimizer)
    path = save(tmp_path, 1, parts)
    expected = [step(model, optimizer) for _ in range(5)]
    model, optimizer, parts = started()
    restore(path, parts)
    assert [step(model, optimizer) for _ in range(5)] == expected
    assert all(p.is_cuda for p in model.parameters())


def test_accelerate_wrappers_are_unwrapped(tmp_path: Path) -> None:
    """A checkpoint holds prepared models and optimizers under their plain names."""
    accelerator = Accelerator(cpu=True)
    bare = nn.Linear(3, 3)
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), 0.1, 0.9))
    parts = Parts(0, mesh=None)
    parts.add("model", model)
    parts.add("optimizer", optimizer)
    parts.add("own", nn.Linear(2, 2), shared=False)
    bare(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    path = save(tmp_path, 1, parts)
    assert sorted(read_tensors(path / "model.safetensors")) == ["bias", "weight"]
    assert sorted(read_tensors(path / "rank-0.safetensors")) == ["own.bias", "own.weight"]
    buffer = optimizer.optimizer.state[bare.weight]["momentum_buffer"].clone()
    optimizer.optimizer.state[bare.weight]["momentum_buffer"].zero_()
    restore(path, parts)
    assert torch.equal(optimizer.optimizer.state[bare.weight]["momentum_buffer"], buffer)


def test_part_with_unsupported_state_is_refused_when_added() -> None:
    """The error comes at the start of a run, not at its first checkpoint, and names the place."""
    unsuitable = ((lambda step: 0.9, "function"), (deque([1]), "deque"), ({1}, "set"))
    for value, type_name in unsuitable:
        with pytest.raises(UserError) as error:
            Parts(0, mesh=None).add("ema", Counts(decay=[value]))
        place = f"(ema.decay.0: a value of type {type_name} can't be kept)"
        assert f"got a part 'ema' whose state does not fit into a checkpoint {place}" in str(
            error.value
        )


class OnlySaves:
    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (3, "of type int, which lacks state_dict and load_state_dict"),
        ([torch.ones(1)], "of type list, which lacks state_dict and load_state_dict"),
        (torch.ones(1), "of type Tensor, which lacks state_dict and load_state_dict"),
        (OnlySaves(), "of type OnlySaves, which lacks load_state_dict"),
        (Counts, "that is the class Counts and no object of it, which lacks state_dict and load_"),
    ],
)
def test_part_without_a_state_is_refused(part: Any, problem: str) -> None:
    """The message names the part and the methods that it lacks."""
    with pytest.raises(UserError) as error:
        Parts(0, mesh=None).add("extra", part)
    assert f"run.keep(...) got a part 'extra' {problem}" in str(error.value)


@pytest.mark.parametrize("seeds", [[1, 1], [1, 2]])
@pytest.mark.parametrize("new", [1, 2, 3])
def test_generators_of_a_recipe_continue(tmp_path: Path, seeds: list[int], new: int) -> None:
    """Each rank has its own. Another number of ranks can only continue equal ones."""

    def parts_with(seed: int, rank: int) -> tuple[torch.Generator, Parts]:
        generator = torch.Generator().manual_seed(seed)
        parts = Parts(rank, mesh=None)
        parts.add("noise", generator, shared=False)
        return generator, parts

    saved = [parts_with(seed, rank) for rank, seed in enumerate(seeds)]
    for generator, _ in saved:
        torch.rand(3, generator=generator)
    path = save(tmp_path, 1, *(parts for _, parts in saved))
    expected = [torch.rand(2, generator=generator) for generator, _ in saved]
    seeded = torch.rand(2, generator=torch.Generator().manual_seed(9))
    for rank in range(new):
        generator, parts = parts_with(9, rank)
        restore(path, parts, new)
        continues = new == 2 or seeds[0] == seeds[1]
        wanted = expected[rank % 2] if continues else seeded
        assert torch.equal(torch.rand(2, generator=generator), wanted)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model", "got a part named 'model', but the name is taken"),
        *(
            (name, f"got a part named {name!r}, which can't be a name in a checkpoint")
            for name in ("", "a/b", "rank-0", "frozen-model", "best-00000008", "a b", "..")
        ),
    ],
)
def test_invalid_part_names_are_refused(name: str, message: str) -> None:
    """A name may be taken already, or unusable as a file name."""
    parts = Parts(0, mesh=None)
    parts.add("model", nn.Linear(1, 1))
    with pytest.raises(UserError, match=re.escape(message)):
        parts.add(name, Counts())


def parts_of(**keywords: Any) -> Parts:
    parts = Parts(0, mesh=None)
    for name, part in keywords.items():
        parts.add(name, part)
    return parts


def with_buffer(size: int, name: str = "mean") -> nn.Module:
    module = nn.Linear(1, 1)
    module.register_buffer(name, torch.zeros(size))
    return module


def optimizer_of(*sizes: int) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(size))]} for size in sizes]
    return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (
            {"net": nn.Linear(2, 3)},
            {"net": nn.Linear(2, 4)},
            "model, because net.bias is [3] float32 in the checkpoint, "
            "but is [4] float32 in this run",
        ),
        (
            {"net": Tied(6)},
            {"net": Tied(7)},
            "model, because net.body.0.bias is [6] float32 in the checkpoint, "
            "but is [7] float32 in this run",
        ),
        (
            {"net": nn.Linear(2, 3)},
            {"net": nn.Linear(2, 3, bias=False)},
            "model, because net.bias is [3] float32 in the checkpoint, "
            "but does not exist in this run",
        ),
        (
            {"net": nn.Linear(2, 3, bias=False)},
            {"net": nn.Linear(2, 3)},
            "model, because net.bias does not exist in the checkpoint, "
            "but is [3] float32 in this run",
        ),
        (
            {"net": nn.Linear(2, 3)},
            {"net": nn.Linear(2, 3).double()},
            "model, because net.bias is [3] float32 in the checkpoint, "
            "but is [3] float64 in this run",
        ),
        (
            {"net": with_buffer(2)},
            {"net": with_buffer(3)},
            "model, recipe or version of this library, because its net does not fit",
        ),
        (
            {"net": with_buffer(2)},
            {"net": with_buffer(2, "other")},
            "model, recipe or version of this library, because its net does not fit",
        ),
        (
            {"opt": optimizer_of(1, 1)},
            {"opt": optimizer_of(1)},
            "model, recipe or version of this library, because its opt does not fit",
        ),
        (
            {"net": nn.Linear(1, 1)},
            {"critic": nn.Linear(1, 1)},
            "recipe, or by another version of this one, because either the checkpoint or this run "
            "lacks critic, net",
        ),
        (
            {"net": nn.Linear(1, 1)},
            {"net": Counts()},
            "recipe, or by another version of this one, because either the checkpoint or this run "
            "lacks net",
        ),
        (
            {"ema": nn.Linear(1, 1), "a": Counts()},
            {"a": Counts()},
            "recipe, or by another version of this one, because either the checkpoint or this run "
            "lacks ema",
        ),
    ],
)
def test_checkpoint_of_another_model_is_refused(
    tmp_path: Path, before: dict[str, Any], now: dict[str, Any], message: str
) -> None:
    """The message names the path and the first part that does not fit."""
    path = save(tmp_path, 1, parts_of(**before))
    with pytest.raises(UserError) as error:
        restore(path, parts_of(**now))
    assert f"{path} was written by another {message}" in error.value.message


@given(st.text("ab", max_size=600), st.text("ab", max_size=400), st.text("ab", max_size=400))
def test_excerpts_show_where_values_differ(prefix: str, before: str, now: str) -> None:
    """Excerpts show the difference even if long lists of class names begin with the same names."""
    shown_before, shown_now = excerpts(prefix + before, prefix + now)
    assert (shown_before != shown_now) == (before != now)
    assert max(len(shown_before), len(shown_now)) <= 202  # with an ellipsis at both ends


CHANGE_BACK = (
    "change the data back, or start a new run, which may begin from the weights of a finished one "
    "with --init-from runs/NAME"
)


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"mixed_precision": "bf16"}, "restore the run's config.json from a backup"),
        ({"effective_batch_size": 8}, "restore the run's config.json from a backup"),
        ({"recipe": "other"}, "resume it with its own recipe, or start another run"),
        (
            {"objective": "loss:min"},
            "change OBJECTIVE back in the recipe, or start another run",
        ),
        *(
            ({"data": DATA | change}, CHANGE_BACK)
            for change in (
                {"sizes": {"train": 9}},
                {"class_names": ["c", "b"]},
                {"class_names": None},
                {"fingerprint": "b"},
            )
        ),
    ],
)
def test_advice_on_a_changed_fact_names_no_flag_that_a_resume_refuses(
    changes: dict[str, Any], advice: str
) -> None:
    """Flags that a resume can't change are only for a new run."""
    saved = identity_at(1, data=DATA)
    require_same_facts(Path("step-1"), saved, saved)
    changed = identity_at(1, **{"data": DATA, **changes})
    with pytest.raises(UserError, match="step-1 can't be resumed, because the ") as refused:
        require_same_facts(Path("step-1"), saved, changed)
    assert refused.value.advice == advice


def test_data_may_get_a_fingerprint_but_not_lose_it() -> None:
    """A user may provide the fingerprint of data whose contents were unknown before."""
    known = identity_at(1, data=DATA)
    unknown = identity_at(1, data={**DATA, "fingerprint": None})
    missing = identity_at(1, data={key: DATA[key] for key in DATA if key != "fingerprint"})
    for without in (unknown, missing):
        require_same_facts(Path("step-1"), without, known)
        with pytest.raises(UserError, match="the fingerprint of the data changed from a to None"):
            require_same_facts(Path("step-1"), known, without)


def test_errors_raised_by_a_part_keep_their_traceback(tmp_path: Path) -> None:
    """An exception from a recipe's own `load_state_dict` is a programming error."""

    class Broken(Counts):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise RuntimeError("of my own")

    path = save(tmp_path, 1, parts_of(mine=Counts()))
    with pytest.raises(RuntimeError, match="of my own"):
        restore(path, parts_of(mine=Broken()))
