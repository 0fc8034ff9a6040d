"""Refuses a recipe's `Config` whose attributes would silently be no flags."""

import inspect
from dataclasses import fields, is_dataclass

from common.errors import UserError


def refuse_attributes_without_flags(config_class: type) -> None:
    """Raise a `UserError` if a class of the recipe has a value that was meant as a flag.

    A dataclass makes fields of annotated names only. A value without an annotation would change
    nothing on the command line, and for a flag of `TrainingConfig` not even the default. Methods,
    properties, nested classes, private names and constants in capitals are no flags.
    """
    for owner in config_class.__mro__:
        # The library's classes are right, and a mixin that is not a dataclass has no flags.
        if owner.__module__.startswith("common.") or not is_dataclass(owner):
            continue
        annotations = inspect.get_annotations(owner)
        if annotations and "__dataclass_fields__" not in vars(owner):
            raise UserError(
                f"{owner.__name__} is no dataclass, so {', '.join(annotations)} would be no flag",
                advice=f"write @dataclass(kw_only=True) above class {owner.__name__}",
            )
        for name, value in vars(owner).items():
            is_no_flag = name.startswith("_") or name.isupper() or name in annotations
            if not (is_no_flag or hasattr(value, "__get__") or isinstance(value, type)):
                annotation = annotation_for(config_class, name, value)
                raise UserError(
                    f"{name} = {value!r:.50} in {owner.__name__} is no flag, because it has no "
                    "type",
                    advice=f"write {name}: {annotation} = {value!r:.50}",
                )


def annotation_for(config_class: type, name: str, value: object) -> str:
    """Return the annotation to write: that of a flag with this name, or the type of the value."""
    for field in fields(config_class):  # type: ignore[arg-type]
        if field.name == name:
            return inspect.formatannotation(field.type).strip("'")
    return type(value).__name__
