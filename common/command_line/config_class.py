"""Refuses a recipe's `Config` whose attributes would silently be no flags."""

import inspect
from dataclasses import fields, is_dataclass
from typing import ClassVar, get_origin

from common.errors import UserError


def refuse_attributes_without_flags(config_class: type) -> None:
    """Raise a `UserError` if a class of the recipe has a value that was meant as a flag.

    A dataclass makes fields of annotated names only. A value without an annotation would change
    nothing on the command line, and for a flag of `TrainingConfig` not even the default. Methods,
    properties, nested classes, aliases of types, private names, class variables and constants in
    capitals are no flags.
    """
    for owner in config_class.__mro__:
        # The library's classes are right, and a mixin that is not a dataclass has no flags.
        if owner.__module__.startswith("common.") or not is_dataclass(owner):
            continue
        annotations = inspect.get_annotations(owner)
        unused_names = [name for name, hint in annotations.items() if is_flag(name, hint)]
        if unused_names and "__dataclass_fields__" not in vars(owner):
            raise UserError(
                f"{owner.__name__} is no dataclass, so {', '.join(unused_names)} would be no flag",
                advice=f"write @dataclass(kw_only=True) above class {owner.__name__}",
            )
        for name, value in vars(owner).items():
            is_no_flag = name.startswith("_") or name.isupper() or name in annotations
            if not (is_no_flag or hasattr(value, "__get__") or is_type_or_function(value)):
                raise UserError(
                    f"{name} = {value!r:.50} in {owner.__name__} is no flag, because it has no "
                    "type",
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
