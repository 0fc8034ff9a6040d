"""Freezes the flags of a run while it trains, so that `config.json` has the values in use."""

from typing import Self

from common.errors import UserError


class Freezable:
    """Attributes that can't be changed between `freeze` and `unfreeze`.

    The mark is in a slot, so that `vars(config)` has only the flags.
    """

    __slots__ = ("_is_frozen",)
    _is_frozen: bool

    def __new__(cls, *args: object, **values: object) -> Self:
        """Mark a new object as not frozen, because `__init__` sets attributes by `__setattr__`."""
        attributes = super().__new__(cls)
        attributes.unfreeze()
        return attributes

    def __getstate__(self) -> dict[str, object]:
        """Return the state for a copy, which is not frozen."""
        return dict(vars(self))

    def freeze(self) -> None:
        object.__setattr__(self, "_is_frozen", True)

    def unfreeze(self) -> None:
        object.__setattr__(self, "_is_frozen", False)

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute.

        Raises:
            UserError: the attributes are frozen.
        """
        if self._is_frozen:
            raise UserError(
                f"the recipe changes config.{name} after run.start(...), so config.json would have "
                "another value",
                advice="change it before run.start(...), or use a variable of your own",
            )
        object.__setattr__(self, name, value)
