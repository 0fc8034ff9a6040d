"""Walks through nested samples and batches, and says where each value is."""

from collections.abc import Iterator, Mapping


def values_with_places(value: object, place: str = "") -> Iterator[tuple[str, object]]:
    """Yield a value and all that it contains, each after its place, such as ``batch['images']``.

    A dict, list or tuple comes before what it contains.

    Args:
        place: where the value itself is.
    """
    yield place, value
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from values_with_places(item, f"{place}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from values_with_places(item, f"{place}[{index}]")


def attributes_of(value: object) -> list[object]:
    """Return the values of an object's attributes, also of a class with `__slots__`."""
    names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
    return [getattr(value, name, None) for name in names]
