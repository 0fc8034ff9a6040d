"""The values that a search has found, and the place of each in the recipe's variables."""

from collections.abc import Collection
from dataclasses import dataclass, field

from common.storage.value_digests import digest_of_state
from common.tools.prove.records.run_records import ValueDescription, ValueType


@dataclass(frozen=True)
class Place:
    """The place of a value: the variable where the search began, and the way from there."""

    path: str  # such as ``ema.decay``
    variable_text: str  # the variable in words, such as "local variable of main()"
    depth: int = 0  # the number of steps from the variable to the value

    def attribute(self, name: str) -> "Place":
        """Return the place of an attribute; variables of a function count as its attributes."""
        return Place(f"{self.path}.{name}", self.variable_text, self.depth + 1)

    def item(self, key: str) -> "Place":
        """Return the place of an item of a container.

        Args:
            key: the text of its key in the path.
        """
        return Place(f"{self.path}[{key}]", self.variable_text, self.depth + 1)

    def hook(self, path: str) -> "Place":
        """Return the place of a hook, which has this path."""
        return Place(path, f"in a hook, {self.variable_text}", self.depth + 1)


@dataclass
class ReachableValues:
    """The values that a search has found, by path."""

    digests: dict[str, str] = field(default_factory=dict)
    descriptions: dict[str, ValueDescription] = field(default_factory=dict)

    def add(self, place: Place, value_type: ValueType, words: str, value: object) -> None:
        """Add a value under its path, unless the path is taken.

        Args:
            words: the value in words, such as its class. The description's text begins with them.
            value: the value of which the digest is taken. It may be only a part of the value at the
                place, such as its state.
        """
        path = place.path
        if path not in self.digests:
            self.digests[path] = digest_of_state(value)
            text = f"{words}, {place.variable_text}"
            self.descriptions[path] = ValueDescription(type=value_type, text=text)

    def mark_attributes(self, known_paths: Collection[str]) -> None:
        """Note that all new values belong to a kept object, whose state_dict lacks them.

        Args:
            known_paths: the paths of the other values. Values of special types keep their types.
        """
        for path, description in self.descriptions.items():
            if path not in known_paths and description.type == "other":
                self.descriptions[path] = ValueDescription(type="attribute", text=description.text)
