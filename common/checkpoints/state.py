"""A run's state as a table of named parts: into a checkpoint, and back, bit for bit."""

import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import extract_model_from_parallel
from torch import nn

from common.checkpoints import store
from common.checkpoints.pack import Tensors, pack, unpack
from common.console import say
from common.errors import UserError, ask_rank_zero
from common.files import read_tensors

# Integers as wide as an element, to look at its bits.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# What a run keeps from its first start to its end, and what to do where it is another now.
SAME_DATA = "put the data back as they were, or start another run with --init-from"
KEPT = {
    "recipe": "start it with the recipe that it is of",
    "mixed_precision": "pass --mixed-precision as it was",
    "sizes": SAME_DATA,
    "class_names": SAME_DATA,
}
# Whose parts raise nothing that a recipe would want to see when their state does not fit.
OURS = ("common.", "torch.", "accelerate.")


class Parts:
    """What a checkpoint holds, by name: anything with `state_dict` and `load_state_dict`."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.shared: dict[str, Any] = {}
        self.of_rank: dict[str, Any] = {}

    def add(self, name: str, thing: Any, shared: bool = True) -> None:
        """Keep `thing` in each checkpoint from now on; a TypeError names what can't be kept.

        What all ranks share is written by rank 0; but of a shared module the buffers (batch norm's
        statistics) by each rank, and the parameters that are frozen now once. What is not shared
        is given back to its rank; on another number of processes, all ranks' states to its
        `load_from_ranks` where it has that, else rank 0's to each.
        """
        is_taken = name in self.shared or name in self.of_rank
        if is_taken or not re.fullmatch(r"(?!rank-|frozen-)[\w-]+", name):
            raise ValueError(f"a part can't be named {name!r}: it is taken, or no word")
        if isinstance(thing, nn.Module):
            thing = extract_model_from_parallel(thing)
            if shared:
                thing = self.of_rank[name] = Network(thing)
        elif isinstance(thing, torch.optim.Optimizer):
            thing = OptimizerState(thing)
        pack({name: thing.state_dict()})
        (self.shared if shared else self.of_rank)[name] = thing

    def collect(self) -> store.Contents:
        """Return this rank's state as it is now, its tensors not yet copied."""
        contents = store.Contents()
        for name, thing in self.shared.items() if self.rank == 0 else ():
            if isinstance(thing, Network):
                tensors, frozen = thing.take()
                contents.shared[name] = None
                if frozen:
                    contents.once[f"frozen-{name}.safetensors"] = frozen
            else:
                tensors, rest = pack({name: thing.state_dict()})
                contents.shared |= rest
            if tensors:
                contents.files[f"{name}.safetensors"] = tensors
        states = {name: thing.state_dict() for name, thing in self.of_rank.items()}
        contents.files[f"rank-{self.rank}.safetensors"], contents.of_rank = pack(states)
        return contents

    def restore(self, path: Path, manifest: dict[str, Any], world_size: int) -> None:
        """Put all parts back; a `UserError` where the checkpoint's are others, or don't fit."""
        shared, ranks = manifest["parts"], manifest["ranks"]
        other = {*self.shared} ^ {*shared}
        if other := other.union(*({*self.of_rank} ^ {*state} for state in ranks)):
            what = f"it and this recipe differ in {', '.join(sorted(other))}"
            raise UserError(f"{path} is of another model: {what}")

        def tensors_of(file: str) -> Tensors:
            return read_tensors(path / file) if file in manifest["files"] else {}

        for name, thing in self.shared.items():
            tensors = tensors_of(f"{name}.safetensors")
            if isinstance(thing, Network):
                thing.put(path, name, tensors_of(f"../frozen-{name}.safetensors"), tensors)
            else:
                with fitting(path, name):
                    state = unpack(tensors, shared[name])
                load(thing, state, path, name)
        same = len(ranks) == world_size
        with fitting(path, "states of ranks"):
            states = [
                unpack(tensors_of(f"rank-{rank}.safetensors"), ranks[rank])
                for rank in ([self.rank] if same else range(len(ranks)))
            ]
        for name, thing in self.of_rank.items():
            if not same and hasattr(thing, "load_from_ranks"):
                load(thing, [state[name] for state in states], path, name, of_ranks=True)
            else:
                load(thing, states[0][name], path, name)


@contextmanager
def fitting(path: Path, name: str) -> Iterator[None]:
    """Turn whatever comes of a state that is another part's, or was edited, into a sentence."""
    try:
        yield
    except Exception as problem:
        found = " ".join(f"{type(problem).__name__}: {problem}".split())
        advice = "go on with the recipe and flags that wrote it, or from an older checkpoint"
        message = f"{path} is of another model: its {name} does not fit ({found:.150}): {advice}"
        raise UserError(message) from None


def load(thing: Any, state: Any, path: Path, name: str, of_ranks: bool = False) -> None:
    """Put a state back, or those of all ranks; what a recipe's own class raises keeps its trace."""
    put_back = thing.load_from_ranks if of_ranks else thing.load_state_dict
    if not isinstance(thing, nn.Module) and not type(thing).__module__.startswith(OURS):
        put_back(state)
        return
    with fitting(path, name):
        if not isinstance(thing, RandomState):  # which looks for itself
            now = thing.state_dict()
            check_kinds(state, [now] * len(state) if of_ranks else now)
        put_back(state)


def check_kinds(saved: Any, now: Any) -> None:
    """Raise a TypeError where a saved value is of another kind than what it is to replace."""
    if isinstance(now, dict) and isinstance(saved, dict):
        for key in now.keys() & saved.keys():
            check_kinds(saved[key], now[key])
    elif isinstance(now, (list, tuple)) and isinstance(saved, (list, tuple)):
        for before, after in zip(saved, now, strict=False):
            check_kinds(before, after)
    elif now is not None and not isinstance(now, bool):
        kinds = (int, float, torch.Tensor) if isinstance(now, (int, float)) else type(now)
        if not isinstance(saved, kinds):
            raise TypeError(f"{saved!r:.50} instead of {now!r:.50}")


class Network:
    """A module: its parameters, of all ranks, and as its `state_dict` the rest, of each rank."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # By name of what was frozen from the start: the sum of its bits as written, None before.
        self.frozen: dict[str, int | None] = {
            name: None for name, value in module.named_parameters() if not value.requires_grad
        }

    def state_dict(self) -> dict[str, Any]:
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        state = self.module.state_dict()
        return {name: value for name, value in state.items() if name not in parameters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != self.state_dict().keys():
            raise ValueError("other buffers")
        self.module.load_state_dict(state, strict=False)

    def take(self) -> tuple[Tensors, Tensors]:
        """Return the parameters that may have changed, and those that are still frozen.

        What changes without a gradient, as an average of weights does, is known by its bits.
        """
        parameters: Tensors = dict(self.module.named_parameters())
        sums = sums_of_bits(
            {n: parameters[n] for n in self.frozen if not parameters[n].requires_grad}
        )
        self.frozen = {n: now for n, now in sums.items() if self.frozen[n] in (None, now)}
        frozen = {name: parameters.pop(name) for name in self.frozen}
        return parameters, frozen

    def put(self, path: Path, name: str, frozen: Tensors, trained: Tensors) -> None:
        """Copy what the checkpoint at `path` has over the parameters."""
        saved, parameters = frozen | trained, dict(self.module.named_parameters())
        for key in sorted(parameters.keys() | saved.keys()):
            kinds = [(t[key].shape, t[key].dtype) for t in (parameters, saved) if key in t]
            if len(kinds) != 2 or kinds[0] != kinds[1]:
                raise UserError(f"{path} is of another model: its {name}.{key} does not fit")
        with torch.no_grad():
            for key, parameter in parameters.items():
                parameter.copy_(saved[key])
        still = self.frozen.keys() & frozen.keys() - trained.keys()
        self.frozen = dict(sums_of_bits({key: parameters[key] for key in still}))


def sums_of_bits(tensors: Tensors) -> dict[str, int]:
    sums = [value.detach().view(BITS[value.element_size()]).sum() for value in tensors.values()]
    return dict(zip(tensors, torch.stack(sums).tolist(), strict=True)) if sums else {}


class OptimizerState:
    """An optimizer's state, each tensor as exact and laid out as its parameter is."""

    def __init__(self, optimizer: Any) -> None:
        is_wrapped = isinstance(optimizer, AcceleratedOptimizer)
        self.optimizer = optimizer.optimizer if is_wrapped else optimizer

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)
        groups = self.optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):  # as torch numbers them
            for name, value in state["state"].get(index, {}).items():
                # Fused kernels walk a parameter and its state side by side: same strides, then;
                # and `load_state_dict` gave it the parameter's type.
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape != ():
                    like = torch.empty_like(parameter, dtype=value.dtype)
                    self.optimizer.state[parameter][name] = like.copy_(value)


class RandomState:
    """The random generators of this rank: torch's, NumPy's, Python's and the device's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        state = {
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(legacy=False),
            "python": (version, np.array(words, np.uint32), gauss),
        }
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        if self.device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.device)

    def load_from_ranks(self, states: list[dict[str, Any]]) -> None:
        """Leave the generators alone: other ranks than these draw from the seed."""


def restore_newest(
    checkpoints: store.Checkpoints, named: str | None, parts: Parts, present: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Restore all parts and return the manifest; None where no checkpoint is whole.

    Rank 0 chooses, the newest up to a `named` one such as ``step-00000120``, and passes a damaged
    one over, naming it. What is `present`, of recipe, model and data, must be what it was.
    """
    path = ask_rank_zero(lambda: checkpoints.choose(named))
    if path is None:
        say(f"resuming {checkpoints.folder.parent} from its start: no whole checkpoint")
        return None
    say(f"resuming {path}")
    manifest = store.read_manifest(path)
    data = manifest.get("data")
    before, now = (
        manifest | (data if isinstance(data, dict) else {}),
        {**present, **present["data"]},
    )
    for what, advice in KEPT.items():
        if before.get(what) != now.get(what):
            changed = f"{what.replace('_', ' ')} {before.get(what)}, and now {now.get(what)}"
            raise UserError(f"{path} was written with {changed}: {advice}")
    parts.restore(path, manifest, checkpoints.world_size)
    checkpoints.go_on_from(path, manifest)
    return manifest
