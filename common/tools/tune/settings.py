"""The settings of a search, from the command line or from an earlier start of the same search."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchSettings:
    """What a search was asked to do; `search.json` in its directory keeps this."""

    recipe: str
    flags: tuple[str, ...]  # as typed: ranges, choices, and flags that all trials share
    config_file: str | None = None  # for `accelerate launch`
    trials: int = 20
    prune: bool = True
