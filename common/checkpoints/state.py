"""A run's state as a table of named parts: into a checkpoint, and back, bit for bit."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn

from common.checkpoints.description import describe, insist_on_same
from common.checkpoints.finished import choose, damaged_best, read_manifest
from common.checkpoints.kinds import Network, OptimizerState, RandomState
from common.checkpoints.pack import pack, unpack
from common.checkpoints.shards import is_sharded, parts_of, read_parts
from common.checkpoints.store import Checkpoints, Contents
from common.console import say, warn
from common.errors import UserError, ask_rank_zero
from common.files import has_moved, json_safe
from common.flags import spelled

# What a run keeps from its first start to its end, and what to do where it is another now.
SAME_DATA = "put the data back as they were, or start another run with --init-from"
KEPT = {
    "recipe": "start it with the recipe that it is of",
    # The best value so far means nothing for another one.
    "objective": "put OBJECTIVE back in the recipe, or start another run",
    "mixed_precision": "pass --mixed-precision as it was",
    "effective_batch_size": "put the run's config.json back as it was",
    "sizes": SAME_DATA,
    "class_names": SAME_DATA,
    "fingerprint": SAME_DATA,
}
OURS = ("common.", "torch.", "accelerate.")  # whose errors say nothing of a recipe's own code


class Parts:
    """What a checkpoint holds, by name: anything with `state_dict` and `load_state_dict`."""

    def __init__(self, rank: int, mesh: Any = None) -> None:
        self.rank, self.mesh = rank, mesh  # of the ranks that hold shards, where any do
        self.shared: dict[str, Any] = {}
        self.of_rank: dict[str, Any] = {}
        self.description: dict[str, Any] = {}

    def add(self, name: str, thing: Any, shared: bool = True) -> None:
        """Keep `thing` in each checkpoint from now on; a TypeError names what can't be kept.

        What all ranks share is written by rank 0; but of a shared module the buffers (batch norm's
        statistics) by each rank, and the parameters that are frozen now once. Of what is sharded
        each rank writes its rows, which any number of ranks can read. What is not shared is given
        back to its rank; on another number of processes, all ranks' states to its
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

    def freeze_description(self) -> None:
        """Describe the parts as they are now; manifests carry this description from now on."""
        self.description = describe({**self.shared, **self.of_rank})

    def collect(self) -> Contents:
        """Return this rank's state as it is now, its tensors not yet copied."""
        contents, ranks = Contents(), self.mesh.size() if self.mesh else 1
        for name, thing in self.shared.items() if self.rank == 0 or self.mesh else ():
            if isinstance(thing, Network):
                tensors, frozen = thing.take()
                contents.shared[name] = None
                contents.once |= parts_of(f"frozen-{name}", frozen, self.rank, ranks)
            else:
                tensors, rest = pack({name: thing.state_dict()})
                contents.shared |= rest
            contents.files |= parts_of(name, tensors, self.rank, ranks)
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

        tensors_of = partial(read_parts, path, files=manifest["files"])
        same = len(ranks) == world_size
        with fitting(path, "state"):
            states = [
                unpack(tensors_of(f"rank-{rank}"), ranks[rank])
                for rank in ([self.rank] if same else range(len(ranks)))
            ]
            for name in self.shared.keys() - self.of_rank.keys():
                states[0][name] = unpack(tensors_of(name), shared[name], self.mesh)
        for name, thing in self.shared.items():
            if isinstance(thing, Network):
                thing.put(path, name, tensors_of(f"../frozen-{name}"), tensors_of(name))
        for name, thing in {**self.shared, **self.of_rank}.items():
            if not same and name not in self.shared and hasattr(thing, "load_from_ranks"):
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
        kinds = torch.Tensor if is_sharded(now) else kinds
        if not isinstance(saved, kinds):
            raise TypeError(f"{saved!r:.50} instead of {now!r:.50}")


def restore_newest(
    checkpoints: Checkpoints, named: str | None, parts: Parts, present: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Restore all parts and return the manifest; None where no checkpoint is whole.

    Rank 0 chooses, the newest up to a `named` one such as ``step-00000120``, and passes over those
    that are damaged or of another run, naming them. What is `present`, of what is in `KEPT`, must
    be what it was, and so must the ``flags`` and the ``parts_described``. Where the best model so
    far is damaged, ``lost_best`` in the manifest is true, and the state of the part ``best`` is of
    no use.
    """

    def find() -> tuple[Path | None, str | None]:
        path = choose(checkpoints.folder, named, checkpoints.run_id)
        return path, None if path is None else damaged_best(path)

    path, problem = ask_rank_zero(find)
    if path is None:
        say(f"resuming {checkpoints.folder.parent} from its start: no whole checkpoint")
        return None
    say(f"resuming {path}")
    if problem is not None:
        warn(f"the best model so far is lost, and a later evaluation becomes the best: {problem}")
    manifest = read_manifest(path)
    insist_on_facts(path, manifest, present)
    insist_on_flags(path, manifest.get("flags"), present.get("flags"))
    insist_on_same(path, manifest.get("parts_described"), present.get("parts_described", {}))
    parts.restore(path, manifest, checkpoints.world_size)
    checkpoints.go_on_from(path, manifest, without_best=problem is not None)
    return manifest | {"lost_best": problem is not None}


def insist_on_facts(path: Path, manifest: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raise a `UserError` for the first fact of `KEPT` that is another now."""
    data, now = manifest.get("data"), {**present, **present["data"]}
    before = {**manifest, **data} if isinstance(data, dict) else manifest
    for name, advice in KEPT.items():
        if name in before and before[name] != now.get(name):
            was, is_now = f"{before[name]!s:.200}", f"{now.get(name)!s:.200}"
            words = f"{name.replace('_', ' ')} {was}, and now {is_now}"
            raise UserError(f"{path} was written with {words}: {advice}")


def insist_on_flags(path: Path, before: Any, now: Any) -> None:
    """Raise a `UserError` for flags that have other values now, as of an edited `config.json`.

    A local data set may have moved: it is known by its fingerprint.
    """
    if not isinstance(before, dict) or not isinstance(now, dict):
        return
    values = json_safe(now)
    changed = [
        f"{spelled(name)} {before[name]!s:.99} and now has {values[name]!s:.99}"
        for name in sorted(before.keys() & values.keys())
        if before[name] != values[name]
        and not (name == "dataset" and has_moved(before[name], values[name]))
    ]
    if changed:
        advice = "put these values back in the run's config.json, or start another run"
        raise UserError(f"{path} was trained with {', '.join(changed)}: {advice}")
