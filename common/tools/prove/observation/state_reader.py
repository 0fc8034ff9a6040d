"""Reads the state of a run in progress: its kept parts, and all values that the recipe can reach.

It draws no random numbers and changes no state.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType

from common.checkpoints.part_states import Stateful
from common.checkpoints.state import adapted
from common.lifecycle.stages import Context
from common.run import Run
from common.storage.value_digests import digest_of_state
from common.tools.prove.reach.recipe_search import RecipeSearch
from common.tools.prove.records.run_records import ValueDescription


@dataclass(frozen=True)
class StateChanges:
    """The changes of a state since it was last read. The fields are those of a `MicroBatch`."""

    part_digests: dict[str, str] = field(default_factory=dict)
    value_digests: dict[str, str] = field(default_factory=dict)
    unreachable_paths: list[str] = field(default_factory=list)
    descriptions: dict[str, ValueDescription] = field(default_factory=dict)


class StateReader:
    """Reads the state of one run, and remembers the digests that it has read last."""

    def __init__(self) -> None:
        self.kept_parts: dict[str, Stateful] = {}  # the parts that the recipe passed to `run.keep`
        self.search: RecipeSearch | None = None  # None until `run.start`
        self.last_value_digests: dict[str, str] = {}
        self.last_part_digests: dict[str, str] = {}

    def keep(self, parts: Mapping[str, Stateful | None]) -> None:
        """Note the parts that the recipe has passed to `run.keep`."""
        self.kept_parts = {name: part for name, part in parts.items() if part is not None}

    def start(self, run: Run) -> None:
        """Prepare to read the values that the recipe can reach."""
        self.search = RecipeSearch(self.kept_parts, run)

    def changes(self, context: Context, frame: FrameType) -> StateChanges:
        """Return what has changed since the last call.

        Args:
            frame: the frame of the loop, whose variables are read.
        """
        assert self.search is not None
        reached = self.search.reachable_values(frame)
        value_digests = reached.digests
        part_digests = self.digests_of_parts(context)
        descriptions = {}
        for path, description in reached.descriptions.items():
            if path not in self.last_value_digests:
                descriptions[path] = description
        unreachable_paths = [path for path in self.last_value_digests if path not in value_digests]
        changes = StateChanges(
            part_digests=changed_entries(self.last_part_digests, part_digests),
            value_digests=changed_entries(self.last_value_digests, value_digests),
            unreachable_paths=unreachable_paths,
            descriptions=descriptions,
        )
        self.last_value_digests = value_digests
        self.last_part_digests = part_digests
        return changes

    def digests_of_parts(self, context: Context) -> dict[str, str]:
        """Return a digest of each part that was passed to `run.keep`, and of `Best`.

        Checkpoints hold the best evaluation so far as well.
        """
        digests = {}
        for name, part in self.kept_parts.items():
            digests[name] = digest_of_state(adapted(part).state_dict())
        digests["best evaluation"] = digest_of_state(context.best.state_dict())
        return digests

    def learning_rates(self) -> list[float]:
        """Return the learning rate of each group of each kept optimizer."""
        rates = []
        for part in self.kept_parts.values():
            for group in getattr(part, "param_groups", ()):
                rates.append(float(group["lr"]))
        return rates


def changed_entries(previous: dict[str, str], current: dict[str, str]) -> dict[str, str]:
    """Return the entries that are new or have changed."""
    return {name: value for name, value in current.items() if previous.get(name) != value}
