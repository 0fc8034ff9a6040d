"""Saves a run's state as named parts in checkpoints, and restores it bit for bit."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn

from common.checkpoints.adapters import (
    MODEL_ADVICE,
    GeneratorState,
    LeftGradients,
    Network,
    OptimizerState,
    State,
)
from common.checkpoints.description import describe_parts
from common.checkpoints.pack import pack, unpack
from common.checkpoints.part_states import (
    LoadsFromRanks,
    Stateful,
    load,
    load_from_ranks,
    require_savable_state,
    restoring,
)
from common.checkpoints.publishing import LASTING_FOLDER
from common.checkpoints.shards import files_of_rank, is_sharded, read_files_of_ranks
from common.checkpoints.store import Contents
from common.errors import UserError
from common.ranks.agreement import differing_positions
from common.run_directory.records import Manifest, PartDescription
from common.storage.value_digests import digest_of_state
from common.system.wording import counted

if TYPE_CHECKING:  # importing it takes a second
    from accelerate import Accelerator
    from torch.distributed.device_mesh import DeviceMesh

# The part that has the gradients which an update has left. A checkpoint lacks it if there are none.
# A recipe can't give a part this name, because it is not a name in Python.
LEFT_GRADIENTS = "left-gradients"
# The name of the files with the rows of sharded tensors in parts of a rank. A part's name can't
# begin with "rank-", and the other files of a rank have its number there.
ROWS_OF_RANKS = "rank-rows"
# The digits of a digest that are compared between ranks. They are hexadecimal, and fit into int64.
COMPARED_DIGITS = 15


class Parts:
    """The named parts that make up a run's state, on one rank.

    A shared part, such as the model, is the same on all ranks. A part of a rank, such as the random
    generators, may differ between ranks. Before each save, the ranks compare the states of some
    shared parts, such as a replay buffer of the recipe. If they differ, the checkpoint has this
    part as a part of a rank: see `compare_over_ranks`.
    """

    def __init__(self, rank: int, mesh: "DeviceMesh | None") -> None:
        self.rank = rank
        self.mesh = mesh  # the ranks that the model is sharded over, if it is sharded
        self.shard_count = mesh.size() if mesh else 1
        self.shared: dict[str, Stateful] = {}
        self.of_rank: dict[str, Stateful] = {}
        self.left_gradients = LeftGradients({})  # `add_left_gradients` replaces it
        self.names_that_may_differ: set[str] = set()  # of shared parts
        self.differing_names: set[str] = set()  # of those whose states differed at the last save
        # The descriptions of the parts, by name; empty until training starts.
        self.parts_described: dict[str, PartDescription] = {}

    def add(
        self, name: str, part: Stateful, *, shared: bool = True, may_differ: bool = False
    ) -> None:
        """Save a part in each checkpoint from now on.

        A part is a module, an optimizer or any other `Stateful` object. Rank 0 writes a shared
        part, with three exceptions:

        - Each rank writes the buffers (batch norm's statistics) of a shared module.
        - The parameters that are frozen now go into a lasting file.
        - Each rank writes its rows of a sharded part. Any number of ranks can read them.

        Each rank writes a part that is not shared, and restores its own state. If the number of
        processes has changed, the part's `load_from_ranks` gets the states of all ranks. Without
        this method, each rank gets the state of rank 0.

        Args:
            may_differ: whether the ranks compare the states of a shared part before each save. If
                the states differ, each rank writes its own. Without `load_from_ranks`, they can
                then only be restored on the same number of processes. It has no effect on a module
                or an optimizer.

        Raises:
            UserError: the name is taken; it begins with "rank-" or "frozen-", or is "best-" and at
                least 8 digits, as files of a checkpoint are named; or it has a character that is
                not a letter, a digit, "-" or "_". Or the part has no state, or its state has a
                value that a checkpoint can't hold.
        """
        self.check_name(name)
        saved = adapted(part)
        if isinstance(saved, nn.Module) and shared:
            saved = Network(saved)
            self.of_rank[name] = saved  # for its buffers
        if may_differ and not isinstance(saved, (nn.Module, Network, OptimizerState)):
            self.names_that_may_differ.add(name)
        require_savable_state(name, saved)  # now rather than at the first save
        if shared:
            self.shared[name] = saved
        else:
            self.of_rank[name] = saved

    def networks(self) -> dict[str, nn.Module]:
        """Return the networks that were added, by name."""
        return {
            name: part.module for name, part in self.shared.items() if isinstance(part, Network)
        }

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters of all networks, by name, such as ``model.head.weight``.

        It is empty before `add_left_gradients` is called.
        """
        return self.left_gradients.parameters

    def add_left_gradients(self) -> None:
        """Save the gradients that updates leave in the networks which were added before."""
        self.left_gradients = LeftGradients(self.networks())
        self.shared[LEFT_GRADIENTS] = self.left_gradients
        self.names_that_may_differ.add(LEFT_GRADIENTS)

    def check_name(self, name: str) -> None:
        """Raise a `UserError` if a part's name is taken, or can't be used in names of files."""
        if name in self.shared or name in self.of_rank:
            raise UserError(
                f"run.keep(...) got a part named {name!r}, but the name is taken, by the run "
                "itself or by an earlier call",
                advice="choose another name, and pass all parts in one call of run.keep(...)",
            )
        if not re.fullmatch(r"(?!rank-|frozen-|best-\d{8})[\w-]+", name):
            raise UserError(
                f"run.keep(...) got a part named {name!r}, which can't be a name in a checkpoint",
                advice=(
                    "use only letters, digits, - and _, and do not begin with rank-, frozen-, or "
                    "best- and a number"
                ),
            )

    def freeze_description(self) -> None:
        """Describe the parts as they are now. All later manifests contain this description.

        Call it before the first update, because training may change an optimizer's options. A
        resume compares the description with its own parts before it restores them.
        """
        self.parts_described = describe_parts({**self.shared, **self.of_rank})

    def compare_over_ranks(self, accelerator: "Accelerator") -> None:
        """Find the shared parts whose states differ between ranks; called on all ranks.

        Each rank has its own rows of a sharded tensor, so such tensors are not compared.
        """
        if accelerator.num_processes == 1:
            return
        names = sorted(self.names_that_may_differ)
        numbers = []
        for name in names:
            digest = digest_of_state(without_shards(self.shared[name].state_dict()))
            numbers.append(int(digest[:COMPARED_DIGITS], base=16))
        positions = differing_positions(accelerator, numbers)
        self.differing_names = {names[position] for position in positions}

    def collect(self) -> Contents:
        """Return this rank's current state for a checkpoint; call `compare_over_ranks` before.

        The tensors are those in use, so they must be copied before training changes them.
        """
        contents = Contents()
        if self.rank == 0 or self.mesh:  # without sharding, the other ranks have equal shared parts
            self.collect_shared(contents)
        states = {name: part.state_dict() for name, part in self.of_rank.items()}
        states |= {name: self.shared[name].state_dict() for name in sorted(self.differing_names)}
        # The tensors go into files. The rest is JSON, which goes into the manifest.
        tensors, contents.of_rank = pack(states)
        rows = {name: value for name, value in tensors.items() if is_sharded(value)}
        whole_tensors = {name: value for name, value in tensors.items() if name not in rows}
        contents.files |= files_of_rank(ROWS_OF_RANKS, rows, self.rank, self.shard_count)
        contents.files[f"rank-{self.rank}.safetensors"] = whole_tensors
        return contents

    def collect_shared(self, contents: Contents) -> None:
        """Add the shared parts to a checkpoint's contents: whole on rank 0, or this rank's rows."""
        for name, part in self.shared.items():
            if name in self.differing_names:
                continue
            if isinstance(part, Network):
                tensors, frozen = part.split_parameters()
                # A network has only tensors, so nothing of it goes into the manifest. But a resume
                # looks for its name there.
                contents.shared[name] = None
                frozen_files = files_of_rank(f"frozen-{name}", frozen, self.rank, self.shard_count)
                contents.lasting_files |= frozen_files
            else:
                state = part.state_dict()
                if name == LEFT_GRADIENTS and not state:
                    continue
                tensors, json_values = pack({name: state})
                contents.shared |= json_values
            contents.files |= files_of_rank(name, tensors, self.rank, self.shard_count)

    def restore(self, path: Path, manifest: Manifest, world_size: int) -> None:
        """Restore all parts from the checkpoint in the folder `path`.

        Args:
            world_size: the number of ranks now, which may differ from that of the checkpoint.

        Raises:
            UserError: the checkpoint has other parts, or the state of one does not fit or can't be
                divided among another number of ranks.
        """
        self.require_same_names(path, manifest)
        saved_ranks = range(len(manifest.of_ranks))
        has_same_ranks = len(saved_ranks) == world_size
        # With another number of ranks, a part of a rank may need the states of all saved ranks.
        ranks_to_read = [self.rank] if has_same_ranks else saved_ranks
        states_of_ranks = self.read_states_of_ranks(path, manifest, ranks_to_read)
        shared_states = self.read_shared_states(path, manifest)
        self.restore_parameters(path, manifest)
        for name, part in self.shared.items():
            if name in shared_states:
                load(part, shared_states[name], path, name)
        for name, part in {**self.shared, **self.of_rank}.items():
            if name not in states_of_ranks[0]:
                continue
            states = [state[name] for state in states_of_ranks]
            # A network has only buffers here, and each rank may take those of rank 0.
            needs_all_states = not has_same_ranks and name not in manifest.shared
            if needs_all_states and isinstance(part, LoadsFromRanks):
                load_from_ranks(part, states, path, name)
            elif needs_all_states and name in self.names_that_may_differ:
                raise other_rank_count_error(path, name, len(states), world_size)
            else:  # the first state is this rank's, or rank 0's if the number of ranks has changed
                load(part, states[0], path, name)

    def restore_parameters(self, path: Path, manifest: Manifest) -> None:
        """Restore the parameters of all networks, the frozen ones included."""
        for name, part in self.shared.items():
            if isinstance(part, Network):
                lasting_name = f"{LASTING_FOLDER}frozen-{name}"
                frozen = read_files_of_ranks(path, lasting_name, manifest.files)
                trained = read_files_of_ranks(path, name, manifest.files)
                part.load_parameters(path, name, frozen, trained)

    def read_states_of_ranks(
        self, path: Path, manifest: Manifest, ranks: Iterable[int]
    ) -> list[State]:
        """Return the states that differ between ranks, by part's name: one dict for each rank."""
        states: list[State] = []
        with restoring(path, "state"):
            rows = read_files_of_ranks(path, ROWS_OF_RANKS, manifest.files)
            for rank in ranks:
                tensors = read_files_of_ranks(path, f"rank-{rank}", manifest.files)
                states.append(unpack({**rows, **tensors}, manifest.of_ranks[rank], self.mesh))
        return states

    def read_shared_states(self, path: Path, manifest: Manifest) -> State:
        """Return the states that all ranks have in common, by part's name, without networks.

        `restore_parameters` reads the parameters of networks, and `read_states_of_ranks` their
        buffers.
        """
        states: State = {}
        with restoring(path, "state"):
            for name in manifest.shared.keys() - self.of_rank.keys():
                tensors = read_files_of_ranks(path, name, manifest.files)
                states[name] = unpack(tensors, manifest.shared[name], self.mesh)
        return states

    def require_same_names(self, path: Path, manifest: Manifest) -> None:
        """Raise a `UserError` if the checkpoint or this run has a part that the other lacks."""
        # The compared parts that differed between ranks when the checkpoint was written.
        differing_names = self.names_that_may_differ & manifest.of_ranks[0].keys()
        different_names = self.shared.keys() ^ (manifest.shared.keys() | differing_names)
        for state in manifest.of_ranks:
            different_names |= self.of_rank.keys() ^ (state.keys() - differing_names)
        different_names.discard(LEFT_GRADIENTS)
        if different_names:
            names = ", ".join(sorted(different_names))
            raise UserError(
                f"{path} was written by another recipe, or by another version of this one, because "
                f"either the checkpoint or this run lacks {names}",
                advice=MODEL_ADVICE,
            )


def adapted(part: Stateful) -> Stateful:
    """Return the object whose state is saved for a part: an adapter, or the part itself."""
    if isinstance(part, torch.Generator):
        return GeneratorState(part)
    if isinstance(part, torch.optim.Optimizer):
        return OptimizerState(part)
    if isinstance(part, nn.Module):
        bare_module: nn.Module = extract_model_from_parallel(part)
        return bare_module
    return part


def without_shards(state: object) -> object:
    """Return a state with None in the place of each sharded tensor, of which each rank has rows."""
    if is_sharded(state):
        return None
    if isinstance(state, dict):
        return {key: without_shards(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [without_shards(value) for value in state]
    return state


def other_rank_count_error(path: Path, name: str, saved_count: int, world_size: int) -> UserError:
    """Return the error for a part that differs between ranks, on another number of ranks.

    Args:
        saved_count: the number of ranks that the checkpoint has.
        world_size: the number of ranks now.
    """
    processes = counted(saved_count, "process", "processes")
    if name == LEFT_GRADIENTS:
        reason = "gradients were left after the last update, and they differ between processes"
        further_advice = ""
    else:
        reason = f"the part {name!r} of run.keep(...) has a state of its own on each process"
        further_advice = (
            ", or give the class of this part a method load_from_ranks(states), which gets the "
            "list of all states"
        )
    return UserError(
        f"{path} can't go on with {counted(world_size, 'process', 'processes')}, because {reason}",
        advice=f"resume with {processes}{further_advice}",
    )
