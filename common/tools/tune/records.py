"""`search.json` in the directory of a search: its settings, with which `--study` continues it."""

from pathlib import Path

from common.run_directory.record_files import Record, read_record_if_there
from common.run_directory.records import Count
from common.storage.json_files import write_json
from common.tools.tune.settings import SearchSettings

SEARCH_FILE = "search.json"


class SearchRecord(Record):
    """The contents of `search.json`; see `SearchSettings`."""

    recipe: str
    flags: list[str]
    config_file: str | None
    trials: Count
    prune: bool


def read_settings(directory: Path) -> SearchSettings | None:
    """Return the settings of the search in a directory; None if there is no search.

    Raises:
        UserError: `search.json` is damaged, or no search wrote it.
    """
    advice = "restore it from a backup, or pass another --study to start a new search"
    record = read_record_if_there(directory / SEARCH_FILE, SearchRecord, advice)
    if record is None:
        return None
    return SearchSettings(
        recipe=record.recipe,
        flags=tuple(record.flags),
        config_file=record.config_file,
        trials=record.trials,
        prune=record.prune,
    )


def write_settings(directory: Path, settings: SearchSettings) -> None:
    """Write the settings of a search into its directory."""
    record = SearchRecord(
        recipe=settings.recipe,
        flags=[*settings.flags],
        config_file=settings.config_file,
        trials=settings.trials,
        prune=settings.prune,
    )
    write_json(directory / SEARCH_FILE, record.to_json())
