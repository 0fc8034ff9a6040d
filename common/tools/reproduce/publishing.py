"""Publishes a run: copies what a reproduction needs, without weights and without paths.

A published run can be committed to a repository, and reproduced from a clone on another machine.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from common.console import warn
from common.errors import UserError
from common.failures.sentences import writing
from common.run_directory.identity import signed_config
from common.run_directory.records import (
    ATTEMPTS,
    CHECKPOINT_DIGESTS,
    CHECKPOINTS_FOLDER,
    CONFIG,
    METRICS_FILE,
    MODEL_FOLDER,
    MODEL_JSON,
    PROVENANCE,
    STATUS,
    SUMMARY,
)
from common.storage.json_files import read_json, write_json
from common.tools.reproduce.compared_run import NO_FOLDER, ComparedRun, read_old_run
from common.tools.reproduce.receipt import RECEIPT, Reproduction, default_output, read_receipt

COPIED_FILES = (SUMMARY, METRICS_FILE, CHECKPOINT_DIGESTS)  # they have only figures and digests
REWRITTEN_FILES = (STATUS, ATTEMPTS, f"{MODEL_FOLDER}/{MODEL_JSON}")
# An absolute path of POSIX or of Windows in a text. A slash within a word does not begin a path, as
# in the name of a repository on the Hub, and neither do the slashes of a web address.
ABSOLUTE_PATH = re.compile(r"""(?<![^\s"'=(:,])(?:/[\w.]|[A-Za-z]:[\\/])[^\s"',;)]*""")


def publish_run(directory: Path, folder: Path) -> None:
    """Copy the records of a run that a reproduction needs to a folder.

    If the run was reproduced, the receipt is copied as well.

    `config.json` gets a new digest, because its paths are replaced: the path of the data by the
    name of the data set, and other paths by their last part. Patches of the code are not changed.

    Args:
        directory: the directory of the run.
        folder: a new folder, or one that contains an earlier published run.

    Raises:
        UserError: the run can't be reproduced, its `config.json` was edited, or the folder can't
            be used.
    """
    run = read_old_run(directory)
    refuse_to_publish(run, folder)
    names = names_of_paths(run)
    with writing(str(folder)):
        shutil.rmtree(folder / PROVENANCE, ignore_errors=True)
        (folder / PROVENANCE).mkdir(parents=True)
        (folder / MODEL_FOLDER).mkdir(exist_ok=True)
        for name in (*COPIED_FILES, *REWRITTEN_FILES):
            if not (directory / name).exists():
                (folder / name).unlink(missing_ok=True)  # an earlier published run may have left it
        for name in COPIED_FILES:
            if (directory / name).exists():
                shutil.copyfile(directory / name, folder / name)
        for patch in patches_of(run):
            shutil.copyfile(patch, folder / PROVENANCE / patch.name)
        for name in REWRITTEN_FILES:
            if (directory / name).exists():
                write_json(folder / name, without_paths(read_json(directory / name), names))
        config = without_paths(run.stored.config_contents, names)
        assert isinstance(config, dict)
        write_json(folder / CONFIG, signed_config(config))
    publish_receipt(run, folder)


def publish_receipt(run: ComparedRun, folder: Path) -> None:
    """Copy the receipt of a run's reproduction to a folder, without paths.

    If there is no receipt of this run, or its reproduction goes on, remove the one that an earlier
    published run left there.
    """
    reproduction_folder = default_output(run.directory)
    receipt = read_receipt(reproduction_folder)
    if receipt is None or not is_finished_receipt_of(run, receipt):
        (folder / RECEIPT).unlink(missing_ok=True)
        return
    contents = without_paths(receipt.model_dump(mode="json"), names={})
    with writing(str(folder)):
        write_json(folder / RECEIPT, contents)


def is_finished_receipt_of(run: ComparedRun, receipt: Reproduction) -> bool:
    """Whether a receipt is of a reproduction of this run that has ended."""
    return receipt.original_run_id == run.saved_config.run_id and receipt.result != "running"


def publish_if_possible(directory: Path, folder: Path) -> None:
    """Publish a run, or warn if that is impossible.

    Benchmarks call this after a run. An error would lose the results of a long measurement.
    """
    try:
        publish_run(directory, folder)
    except UserError as error:
        warn(f"the run is not published: {error.problem}")


def refuse_to_publish(run: ComparedRun, folder: Path) -> None:
    """Raise a `UserError` if a run must not be published, or not into this folder."""
    edited_config_error = run.stored.edited_config_error
    if edited_config_error is not None:
        raise UserError(
            edited_config_error.problem,
            advice="restore the original file from a backup, or publish another run",
        )
    if not run.attempts:
        raise UserError(
            f"{run.directory} does not say which code it used, so no one could reproduce it",
            advice="publish another run",
        )
    # Only the directory of a run has checkpoints, and a published run has none.
    if folder.resolve() == run.directory.resolve() or (folder / CHECKPOINTS_FOLDER).exists():
        raise UserError(
            f"--publish {folder} would overwrite a run in that folder",
            advice="pass another folder",
        )
    for patch in patches_of(run):
        if not patch.is_file():
            raise UserError(
                f"{patch} is missing", advice="restore it from a backup, or publish another run"
            )


def patches_of(run: ComparedRun) -> list[Path]:
    """Return the files with the uncommitted changes that a run saved."""
    trees = [tree for attempt in run.attempts for tree in attempt.trees]
    names = dict.fromkeys(tree.patch for tree in trees if tree.patch is not None)
    return [run.directory / PROVENANCE / name for name in names]


def names_of_paths(run: ComparedRun) -> dict[str, str]:
    """Return the replacements for this machine's paths in a run's records, by path."""
    names = {str(Path.home()): "~"}
    for attempt in run.attempts:
        names |= {tree.folder: NO_FOLDER for tree in attempt.trees}
    dataset = run.saved_config.flags.get("dataset")
    if isinstance(dataset, str) and Path(dataset).is_absolute():
        names[dataset] = run.saved_config.data.name
    return names


def without_paths(value: JsonValue, names: Mapping[str, str]) -> JsonValue:
    """Return a copy of a JSON value, with names instead of absolute paths.

    Args:
        names: the replacements, by path. Any other path is replaced by its last part.
    """
    if isinstance(value, dict):
        return {name: without_paths(entry, names) for name, entry in value.items()}
    if isinstance(value, list):
        return [without_paths(entry, names) for entry in value]
    if not isinstance(value, str):
        return value
    if value in names:
        return names[value]
    return ABSOLUTE_PATH.sub(lambda match: name_of_path(match[0], names), value)


def name_of_path(path: str, names: Mapping[str, str]) -> str:
    """Return the replacement for a path, by default its last part."""
    return names.get(path) or re.split(r"[\\/]", path.rstrip("\\/"))[-1]
