"""Checks that a run's `config.json` was not edited, and belongs to the files beside it."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from common.digests import SIGNATURE, is_as_signed, signed
from common.errors import UserError
from common.json_files import JsonObject, json_safe, parse, read_json_if_there
from common.run_directory.records import CONFIG, STATUS, Status, excerpt_of
from common.run_directory.saved_flags import differing_flags, in_words
from common.system.platforms import quoted
from common.system.printable import listed


class EditedConfigError(UserError):
    """A run's `config.json` is not what the run wrote, or is another run's."""


class Witness(NamedTuple):
    """A file beside `config.json` that also names its run."""

    path: Path
    run_id: str
    flags: Mapping[str, object]  # the flags that a resume can't change; empty if the file has none


def signed_config(facts: Mapping[str, object]) -> JsonObject:
    """Return the contents of `config.json` with their digest.

    The contents go through JSON first, so that the digest is that of the values that a reader gets.
    """
    return signed(parse(json.dumps(json_safe(facts))))


def is_status_of(run_id: str | None, status: Status) -> bool:
    """Whether a `status.json` belongs to the run with this id; True if one of them has no id.

    Older versions wrote no ids.
    """
    return run_id is None or status.run_id in (None, run_id)


def insist_on_written_config(directory: Path, saved: Mapping[str, object]) -> None:
    """Raise an `EditedConfigError` if a run's `config.json` was edited, or is another run's.

    An edit is noticed by the digest in the file. Another run's file has a digest that is right, so
    its id is compared with the ids in `status.json` and in the checkpoints. Files of older versions
    may have neither, and pass.

    Args:
        saved: the contents of `config.json`.
    """
    path = directory / CONFIG
    witnesses = find_witnesses(directory)
    if SIGNATURE in saved and not is_as_signed(saved):
        raise EditedConfigError(
            f"{path} is not as the run wrote it: {describe_edit(saved, witnesses)}",
            advice=(
                "put a copy of the file back, or start another run with its flags by --config "
                f"{quoted(path)}"
            ),
        )
    run_id = excerpt_of(saved).run_id
    if not isinstance(run_id, str) or not witnesses:
        return
    # One file of the same run is enough: another run's checkpoint may lie among this run's.
    if all(witness.run_id != run_id for witness in witnesses):
        witness = witnesses[0]
        raise EditedConfigError(
            f"{path} is of run {run_id:.50}, and {witness.path} is of run {witness.run_id:.50}",
            advice="put back the config.json of the run whose checkpoints these are",
        )


def find_witnesses(directory: Path) -> list[Witness]:
    """Return the files that name the run in a directory, as evidence of whose `config.json` it is.

    These are the undamaged manifests of checkpoints, newest first, and then `status.json`.
    """
    manifests = sorted(directory.glob("checkpoints/step-*/manifest.json"), reverse=True)
    witnesses = []
    for path in [*manifests, directory / STATUS]:
        try:
            contents = read_json_if_there(path) or {}
        except UserError:
            continue
        excerpt = excerpt_of(contents)
        run_id = excerpt.run_id
        # `status.json` has no digest that would show damage.
        is_whole = path.name == STATUS or is_as_signed(contents)
        if is_whole and isinstance(run_id, str) and run_id:
            witnesses.append(Witness(path, run_id, excerpt.flags or {}))
    return witnesses


def describe_edit(saved: Mapping[str, object], witnesses: Iterable[Witness]) -> str:
    """Return a phrase for how an edited `config.json` differs from the files beside it.

    If no witness shows the difference, only the digest does.
    """
    excerpt = excerpt_of(saved)
    run_id = excerpt.run_id
    config = excerpt.config or {}
    for witness in witnesses:
        if witness.run_id != run_id:
            return f"its run_id is {run_id!s:.50}, and that of {witness.path} is {witness.run_id}"
        changes = differing_flags(witness.flags, config)
        if changes:
            phrases = in_words(changes, "{flag} {saved} and now has {present}")
            return f"it was trained with {listed(phrases)}"
    return "its SHA-256 is another one"
