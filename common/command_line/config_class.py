"""Refuses a recipe's `Config` with a value that looks like a flag but is none."""

import inspect
from dataclasses import fields, is_dataclass
from typing import ClassVar, get_origin

from common.errors import UserError


def refuse_attributes_without_flags(config_class: type) -> None:
    """Raise a `UserError` if a class of the recipe has a value that was meant as a flag."""
    for owner in config_class.__mro__:
        # The library's classes are right, and a mixin that is not a dataclass has no flags.
        if owner.__module__.startswith("common.") or not is_dataclass(owner):
            continue
        refuse_missing_decorator(owner)
        refuse_values_without_type(config_class, owner)


def refuse_missing_decorator(owner: type) -> None:
    """Raise a `UserError` if a class has annotated flags but is not a dataclass."""
    annotations = inspect.get_annotations(owner)
    unused_names = [name for name, hint in annotations.items() if is_flag(name, hint)]
    # A class without the decorator inherits the fields of its base class, and has none of its own.
    has_decorator = "__dataclass_fields__" in vars(owner)
    if unused_names and not has_decorator:
        raise UserError(
            f"{owner.__name__} is no dataclass, so {', '.join(unused_names)} would be no flag",
            advice=f"write @dataclass(kw_only=True) above class {owner.__name__}",
        )


def refuse_values_without_type(config_class: type, owner: type) -> None:
    """Raise a `UserError` if a class has a value without a type.

    A dataclass makes flags of annotated names only. Without a type, the value adds no flag, and
    does not change the default of an inherited flag. Methods, properties, nested classes, aliases
    of types, private names and constants in capitals are not meant as flags.

    Args:
        config_class: the recipe's `Config`, whose flags the advice uses.
        owner: the class whose values are checked: `config_class` or a base class of it.
    """
    annotations = inspect.get_annotations(owner)
    for name, value in vars(owner).items():
        is_private = name.startswith("_")
        is_constant = name.isupper()
        is_annotated = name in annotations
        is_code = hasattr(value, "__get__") or is_type_or_function(value)
        if is_private or is_constant or is_annotated or is_code:
            continue
        raise UserError(
            f"{name} = {value!r:.50} in {owner.__name__} is no flag, because it has no type",
            advice=advice_for(config_class, name, value),
        )


def is_flag(name: str, annotation: object) -> bool:
    """Whether an annotated name would be a flag in a dataclass; the annotation may be a text."""
    origin = annotation if annotation is ClassVar else get_origin(annotation)
    is_class_variable = origin is ClassVar or "ClassVar" in str(annotation).partition("[")[0]
    return not (name.startswith("_") or is_class_variable)


def is_type_or_function(value: object) -> bool:
    """Whether a value is a class, a function, or an alias such as `int | None`."""
    return callable(value) or get_origin(value) is not None


def advice_for(config_class: type, name: str, value: object) -> str:
    """Return what to write instead of a value without a type."""
    for field in fields(config_class):  # type: ignore[arg-type]
        if field.name == name:
            annotation = inspect.formatannotation(field.type).strip("'")
            return f"write {name}: {annotation} = {value!r:.50}"
    return (
        f"write {name}: {type(value).__name__} = {value!r:.50}, or if no flag may change it, "
        f"{name}: ClassVar = {value!r:.50}"
    )
