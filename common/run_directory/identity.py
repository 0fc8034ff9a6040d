"""Checks that a run's `config.json` was not edited, and belongs to the files beside it.

Without these checks, a resume could go on with other flags than the run has trained with.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from common.errors import UserError
from common.run_directory.excerpts import excerpt_of
from common.run_directory.records import CHECKPOINTS_FOLDER, CONFIG, MANIFEST, STATUS
from common.run_directory.saved_flags import differing_flags, flags_in_words
from common.storage.digests import SIGNATURE, is_as_signed, signed
from common.storage.json_files import JsonObject, json_safe, parse, read_json_if_there
from common.system.platforms.commands import quoted
from common.system.wording import listed


class RunIdFile(NamedTuple):
    """A JSON file in a run's directory that contains the id of its run."""

    path: Path
    run_id: str
    contents: JsonObject

    def is_undamaged(self) -> bool:
        """Whether the file is as the run wrote it; True for `status.json`, which has no digest."""
        return self.path.name == STATUS or is_as_signed(self.contents)

    def flags(self) -> JsonObject:
        """Return the flags that a resume can't change; empty if the file has none."""
        return excerpt_of(self.contents).manifest_flags or {}


def signed_config(facts: Mapping[str, object]) -> JsonObject:
    """Return the contents of `config.json` with their digest.

    The contents go through JSON first, so that the digest is that of the values that a reader gets.
    """
    return signed(parse(json.dumps(json_safe(facts))))


def may_be_of_run(id_in_file: str | None, run_id: str | None) -> bool:
    """Whether a file that names the run `id_in_file` may belong to the run `run_id`.

    If one of the ids is None, the answer is True, because a damaged or edited file may name no run.
    """
    return run_id is None or id_in_file in (None, run_id)


def edited_config_error(directory: Path, saved: Mapping[str, object]) -> UserError | None:
    """Return the error if a run's `config.json` was edited, or is another run's; None otherwise.

    A run writes a digest into the file, so an edited file has a wrong digest or none. Another run's
    file has a correct digest, so its id is compared with the ids in `status.json` and in the
    checkpoints.

    Args:
        saved: the contents of `config.json`.
    """
    path = directory / CONFIG
    # The newest checkpoint comes first, because it has flags and a digest, unlike `status.json`.
    files = [*manifest_files(directory), directory / STATUS]
    id_files = [id_file for id_file in find_run_id_files(files) if id_file.is_undamaged()]
    if not is_as_signed(saved):
        return UserError(
            f"{path} was edited after the run wrote it ({describe_edit(saved, id_files)})",
            advice=(
                "restore the file from a backup, or leave --resume out and start a new run in "
                f"another directory with its flags: --config {quoted(path)}"
            ),
        )
    run_id = excerpt_of(saved).run_id
    # One file of the same run is enough: another run's checkpoint may lie among this run's.
    if id_files and all(id_file.run_id != run_id for id_file in id_files):
        id_file = id_files[0]
        return UserError(
            f"{path} belongs to run {run_id!s:.50}, but {id_file.path} belongs to run "
            f"{id_file.run_id:.50}",
            advice=f"restore the config.json of the run that wrote {id_file.path}",
        )
    return None


def saved_run_id(directory: Path) -> str | None:
    """Return the id in a run's `config.json`; None if the file can't be read or has no id."""
    return next((id_file.run_id for id_file in find_run_id_files([directory / CONFIG])), None)


def manifest_files(directory: Path) -> list[Path]:
    """Return the manifests of a run's checkpoints, newest first."""
    return sorted((directory / CHECKPOINTS_FOLDER).glob(f"step-*/{MANIFEST}"), reverse=True)


def find_run_id_files(files: Iterable[Path]) -> Iterator[RunIdFile]:
    """Yield an entry for each JSON file that can be read and names a run, in the files' order."""
    for path in files:
        contents: JsonObject = {}
        with suppress(UserError):
            contents = read_json_if_there(path) or {}
        run_id = excerpt_of(contents).run_id
        if isinstance(run_id, str) and run_id:
            yield RunIdFile(path, run_id, contents)


def describe_edit(saved: Mapping[str, object], id_files: Iterable[RunIdFile]) -> str:
    """Return a phrase for how an edited `config.json` differs from the files beside it.

    If no file shows a difference, the phrase only says that the digest is wrong or missing.

    Args:
        saved: the contents of the edited file.
        id_files: the files beside it, whose flags the run wrote.
    """
    excerpt = excerpt_of(saved)
    run_id = excerpt.run_id
    edited_flags = excerpt.config_flags or {}
    for id_file in id_files:
        if id_file.run_id != run_id:
            return f"its run_id is {run_id!s:.50}, but that of {id_file.path} is {id_file.run_id}"
        changes = differing_flags(id_file.flags(), edited_flags)
        if changes:
            phrases = flags_in_words(changes, "{flag} was {saved} and is {current} now")
            return listed(phrases)
    return f"its SHA-256 {'has changed' if SIGNATURE in saved else 'is missing'}"
