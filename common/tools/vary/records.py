"""`vary.json` in the directory of variants: the command that the directory belongs to.

Only the same command continues in the directory, so runs of different commands never mix there.
"""

from pathlib import Path

from common.run_directory.record_files import Record, read_record_if_there
from common.storage.json_files import write_json

VARY_FILE = "vary.json"


class VaryRecord(Record):
    """The contents of `vary.json`."""

    command: list[str]  # the words of the recipe, its flags and the numbers of processes


def read_command(directory: Path) -> list[str] | None:
    """Return the command that a directory belongs to; None if there is no `vary.json`.

    Raises:
        UserError: `vary.json` is damaged, or this tool did not write it.
    """
    advice = "restore it from a backup, or pass another --output-dir"
    record = read_record_if_there(directory / VARY_FILE, VaryRecord, advice)
    return None if record is None else record.command


def write_command(directory: Path, command: list[str]) -> None:
    """Write the command that a directory belongs to."""
    write_json(directory / VARY_FILE, VaryRecord(command=command).to_json())
