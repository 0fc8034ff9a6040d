"""The settings of a search, from the command line or from an earlier start of the same search."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchSettings:
    """The task of a search, which `search.json` in its directory keeps."""

    recipe: str
    flags: tuple[str, ...]  # the words as typed: ranges, choices, and flags that all trials share
    config_file: str | None  # the config file for `accelerate launch`
    trials: int = 20  # the number of trials in all, with those of earlier starts
    # Whether to stop a trial that is worse than the median of the finished trials at its epoch.
    prune: bool = True
