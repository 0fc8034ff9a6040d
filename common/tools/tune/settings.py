"""The settings of a search, from the command line and from the `search.json` that keeps them."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

from common.errors import UserError
from common.flags import from_json
from common.json_files import PUT_BACK, read_json_if_there


@dataclass(frozen=True)
class SearchSettings:
    """What a search was asked to do; `search.json` in its directory keeps this."""

    recipe: str
    flags: tuple[str, ...]  # as typed: ranges, choices, and flags that all trials share
    config_file: str | None = None  # for `accelerate launch`
    trials: int = 20
    prune: bool = True

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """Read the settings of the search in a directory; None if there is no search.

        Raises:
            UserError: `search.json` is damaged or not one that a search wrote.
        """
        path = directory / "search.json"
        saved = read_json_if_there(path)
        if saved is None:
            return None
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in saved]
        if missing:
            raise UserError(
                f"{path} is not what a search wrote: it lacks {', '.join(missing)}", advice=PUT_BACK
            )
        return cls(**from_json(cls, {name: saved[name] for name in names}, str(path)))
