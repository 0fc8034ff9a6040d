"""A run's state as a table of named parts, saved to a checkpoint and restored bit for bit."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn

from common.agreement import ask_rank_zero
from common.checkpoints.description import describe, insist_on_same
from common.checkpoints.finished import choose, damaged_best, read_manifest
from common.checkpoints.kinds import Network, OptimizerState, RandomState
from common.checkpoints.pack import pack, unpack
from common.checkpoints.shards import is_sharded, parts_of, read_parts
from common.checkpoints.store import Checkpoints, Contents
from common.console import say, warn
from common.errors import UserError
from common.files import has_moved, json_safe
from common.flags import spelled

# The facts that a resume must not change, each with the advice for a resume that does.
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
# Errors of classes in these packages need no traceback: they do not come from a recipe's own code.
OURS = ("common.", "torch.", "accelerate.")


class Parts:
    """The parts of a checkpoint by name: objects with `state_dict` and `load_state_dict`."""

    def __init__(self, rank: int, mesh: Any = None) -> None:
        self.rank = rank
        self.mesh = mesh  # of the ranks that hold shards, if the model is sharded
        self.shared: dict[str, Any] = {}
        self.of_rank: dict[str, Any] = {}
        self.description: dict[str, Any] = {}

    def add(self, name: str, thing: Any, shared: bool = True) -> None:
        """Save `thing` in each checkpoint from now on.

        Rank 0 writes a shared part. There are three exceptions: each rank writes the buffers (batch
        norm's statistics) of a shared module; the parameters that are frozen now are written once;
        and of a sharded part each rank writes its rows, which any number of ranks can read.

        A part that is not shared is restored on its rank. If the number of processes has changed,
        its `load_from_ranks` gets the states of all ranks. Without such a method, each rank gets
        the state of rank 0.

        Raises:
            ValueError: the name is taken, or it is no word.
            TypeError: the state has a value that a checkpoint can't hold.
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
        """Describe the parts as they are now. All later manifests contain this description."""
        self.description = describe({**self.shared, **self.of_rank})

    def collect(self) -> Contents:
        """Return this rank's state as it is now, its tensors not yet copied."""
        contents = Contents()
        if self.rank == 0 or self.mesh:
            self.collect_shared(contents)
        states = {name: thing.state_dict() for name, thing in self.of_rank.items()}
        tensors, contents.of_rank = pack(states)
        contents.files[f"rank-{self.rank}.safetensors"] = tensors
        return contents

    def collect_shared(self, contents: Contents) -> None:
        """Add the shared parts to a checkpoint's contents; of sharded ones, this rank's rows."""
        shards = self.mesh.size() if self.mesh else 1
        for name, thing in self.shared.items():
            if isinstance(thing, Network):
                tensors, frozen = thing.take()
                contents.shared[name] = None
                contents.once |= parts_of(f"frozen-{name}", frozen, self.rank, shards)
            else:
                tensors, rest = pack({name: thing.state_dict()})
                contents.shared |= rest
            contents.files |= parts_of(name, tensors, self.rank, shards)

    def restore(self, path: Path, manifest: dict[str, Any], world_size: int) -> None:
        """Restore all parts.

        Raises:
            UserError: the checkpoint has other parts, or the state of one does not fit.
        """
        shared, ranks = manifest["parts"], manifest["ranks"]
        self.insist_on_same_names(path, manifest)
        tensors_of = partial(read_parts, path, files=manifest["files"])
        has_same_ranks = len(ranks) == world_size
        ranks_to_read = [self.rank] if has_same_ranks else range(len(ranks))
        with fitting(path, "state"):
            states = [unpack(tensors_of(f"rank-{rank}"), ranks[rank]) for rank in ranks_to_read]
            for name in self.shared.keys() - self.of_rank.keys():
                states[0][name] = unpack(tensors_of(name), shared[name], self.mesh)
        for name, thing in self.shared.items():
            if isinstance(thing, Network):
                thing.put(path, name, tensors_of(f"../frozen-{name}"), tensors_of(name))
        for name, thing in {**self.shared, **self.of_rank}.items():
            takes_all_ranks = name not in self.shared and hasattr(thing, "load_from_ranks")
            if takes_all_ranks and not has_same_ranks:
                load(thing, [state[name] for state in states], path, name, of_ranks=True)
            else:
                load(thing, states[0][name], path, name)

    def insist_on_same_names(self, path: Path, manifest: Mapping[str, Any]) -> None:
        """Raise a `UserError` if the checkpoint or this run has a part that the other lacks."""
        different_names = self.shared.keys() ^ manifest["parts"].keys()
        for state in manifest["ranks"]:
            different_names |= self.of_rank.keys() ^ state.keys()
        if different_names:
            names = ", ".join(sorted(different_names))
            raise UserError(f"{path} is of another model: it and this recipe differ in {names}")


@contextmanager
def fitting(path: Path, name: str) -> Iterator[None]:
    """Turn any error from a state that is of another part, or was edited, into a `UserError`."""
    try:
        yield
    except Exception as problem:
        cause = " ".join(f"{type(problem).__name__}: {problem}".split())
        advice = "go on with the recipe and flags that wrote it, or from an older checkpoint"
        message = f"{path} is of another model: its {name} does not fit ({cause:.150}): {advice}"
        raise UserError(message) from None


def load(thing: Any, state: Any, path: Path, name: str, of_ranks: bool = False) -> None:
    """Restore a part from its state, or from those of all ranks.

    Errors that a recipe's own class raises keep their traceback.
    """
    restore_part = thing.load_from_ranks if of_ranks else thing.load_state_dict
    if not isinstance(thing, nn.Module) and not type(thing).__module__.startswith(OURS):
        restore_part(state)
        return
    with fitting(path, name):
        if not isinstance(thing, RandomState):  # it checks its state itself
            now = thing.state_dict()
            check_kinds(state, [now] * len(state) if of_ranks else now)
        restore_part(state)


def check_kinds(saved: Any, now: Any) -> None:
    """Raise a TypeError if a saved value has another type than the value that it replaces."""
    if isinstance(now, dict) and isinstance(saved, dict):
        for key in now.keys() & saved.keys():
            check_kinds(saved[key], now[key])
    elif isinstance(now, (list, tuple)) and isinstance(saved, (list, tuple)):
        for before, after in zip(saved, now, strict=False):
            check_kinds(before, after)
    elif now is not None and not isinstance(now, bool):
        expected: Any = type(now)
        if isinstance(now, (int, float)):
            expected = (int, float, torch.Tensor)
        elif is_sharded(now):
            expected = torch.Tensor
        if not isinstance(saved, expected):
            raise TypeError(f"{saved!r:.50} instead of {now!r:.50}")


def restore_newest(
    checkpoints: Checkpoints,
    named: str | None,
    parts: Parts,
    present: Mapping[str, Any],
    saved_objective: str | None = None,
) -> dict[str, Any] | None:
    """Restore all parts from the newest whole checkpoint and return its manifest.

    Rank 0 chooses the checkpoint. It names those that it passes over, because they are damaged or
    of another run.

    Args:
        named: the last checkpoint to consider, such as ``step-00000120``; None for the newest.
        present: the facts of this run. Those in `KEPT`, the ``flags`` and the ``parts_described``
            must be the same as in the checkpoint.
        saved_objective: the one in the run's `config.json`. Checkpoints of older versions do not
            name theirs.

    Returns:
        The manifest, or None if no checkpoint is whole. Its ``lost_best`` is true if the best model
        so far is damaged; the restored part ``best`` is of no use then.

    Raises:
        UserError: a fact differs, or a part does not fit.
    """

    def choose_checkpoint() -> tuple[Path | None, str | None]:
        path = choose(checkpoints.folder, named, checkpoints.run_id)
        return path, None if path is None else damaged_best(path)

    path, problem = ask_rank_zero(choose_checkpoint)
    if path is None:
        say(f"resuming {checkpoints.folder.parent} from its start: no whole checkpoint")
        return None
    say(f"resuming {path}")
    if problem is not None:
        warn(f"the best model so far is lost, and a later evaluation becomes the best: {problem}")
    manifest = read_manifest(path)
    fallback = {} if saved_objective is None else {"objective": saved_objective}
    insist_on_facts(path, {**fallback, **manifest}, present)
    insist_on_flags(path, manifest.get("flags"), present.get("flags"))
    insist_on_same(path, manifest.get("parts_described"), present.get("parts_described", {}))
    parts.restore(path, manifest, checkpoints.world_size)
    checkpoints.go_on_from(path, manifest, without_best=problem is not None)
    return manifest | {"lost_best": problem is not None}


def insist_on_facts(path: Path, manifest: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raise a `UserError` for the first fact of `KEPT` that differs from the manifest's."""
    data_before = manifest.get("data")
    before = {**manifest, **data_before} if isinstance(data_before, dict) else manifest
    now = {**present, **present["data"]}
    for name, advice in KEPT.items():
        if name in before and before[name] != now.get(name):
            raise UserError(
                f"{path} was written with {name.replace('_', ' ')} {before[name]!s:.200}, "
                f"and now {now.get(name)!s:.200}: {advice}"
            )


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
