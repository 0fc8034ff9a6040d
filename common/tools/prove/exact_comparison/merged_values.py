"""Merges and sorts values that differ between two runs, so that a mistake gets one cause.

A mistake often changes several values: an object and its attributes, the setting of each layer, or
the items of a list.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from common.tools.prove.records.run_records import ValueDescription, ValueType

MERGED_IN_CONTAINERS: tuple[ValueType, ...] = ("attribute", "other")
# Values of these types are the likeliest causes, the likeliest first.
LIKELIEST: tuple[ValueType, ...] = (
    "generator",
    "iterator",
    "buffer",
    "setting",
    "network",
    "stateful",
    "file",
)


def merged_values(descriptions: Mapping[str, ValueDescription]) -> dict[str, ValueDescription]:
    """Return values by path, merged as far as one cause covers several, the likeliest first."""
    outer = without_nested(descriptions)
    return sorted_by_likelihood(with_items_merged(with_settings_merged(outer)))


def without_nested(descriptions: Mapping[str, ValueDescription]) -> dict[str, ValueDescription]:
    """Leave out values that belong to another value, such as `ema.decay` if `ema` is there.

    The cause for the outer value covers them.
    """
    prefixes = tuple(f"{path}{separator}" for path in descriptions for separator in (".", "["))
    outer = {}
    for path, description in descriptions.items():
        if not path.startswith(prefixes):
            outer[path] = description
    return outer


def with_settings_merged(
    descriptions: Mapping[str, ValueDescription],
) -> dict[str, ValueDescription]:
    """Replace the settings of several modules, such as all layers, by one of the module around.

    So a recipe that freezes a network gets one cause, and not one for each layer. The settings of
    modules in one variable are merged if they have the same name.
    """
    groups: dict[tuple[str, str, str], list[str]] = {}
    merged = {}
    for path, description in descriptions.items():
        if description.type != "setting":
            merged[path] = description
            continue
        module_path, _, setting = path.rpartition(".")
        # The path of a global variable begins with its module.
        parts_of_variable = 2 if "global variable" in description.text else 1
        variable = ".".join(re.split(r"[.\[]", path)[:parts_of_variable])
        groups.setdefault((description.text, variable, setting), []).append(module_path)
    for (text, _, setting), module_paths in groups.items():
        path = f"{common_path(module_paths)}.{setting}"
        merged[path] = ValueDescription(type="setting", text=text)
    return merged


def with_items_merged(descriptions: Mapping[str, ValueDescription]) -> dict[str, ValueDescription]:
    """Replace several items of a container, such as `means[0]` and `means[1]`, by the container.

    Items with advice of their own, such as networks, are not merged.
    """
    item_counts: Counter[str] = Counter()
    for path, description in descriptions.items():
        if description.type in MERGED_IN_CONTAINERS:
            item_counts[container_of(path)] += 1
    merged = {}
    for path, description in descriptions.items():
        container = container_of(path)
        count = item_counts[container]
        if not container or count < 2 or description.type not in MERGED_IN_CONTAINERS:
            merged[path] = description
        elif container not in merged:
            text = f"{count} items, each a {description.text}"
            merged[container] = ValueDescription(type=description.type, text=text)
    return merged


def container_of(path: str) -> str:
    """Return the path of the container that has the item at a path; empty for other values."""
    return path[: path.rindex("[")] if path.endswith("]") else ""


def common_path(paths: Sequence[str]) -> str:
    """Return the longest path with which all these paths begin.

    It is `net.body` for `net.body[0]` and `net.body[1]`. For a single path, it is this path.
    """
    split_paths = [re.split(r"(?=[.\[])", path) for path in paths]
    common_parts = []
    for parts in zip(*split_paths, strict=False):
        if len(set(parts)) > 1:
            break
        common_parts.append(parts[0])
    return "".join(common_parts)


def sorted_by_likelihood(
    descriptions: Mapping[str, ValueDescription],
) -> dict[str, ValueDescription]:
    """Sort values by how likely they are the cause; see `LIKELIEST`."""

    def position(item: tuple[str, ValueDescription]) -> int:
        value_type = item[1].type
        return LIKELIEST.index(value_type) if value_type in LIKELIEST else len(LIKELIEST)

    return dict(sorted(descriptions.items(), key=position))
