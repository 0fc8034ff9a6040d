"""Finds the files of a Hub data set, a local folder or a single file with `datasets`."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NotRequired, TypedDict

from common.data.reading.left_out_files import notes_on_files, refuse_only_links
from common.data.sources import DataSource
from common.data.versions.local_files import FILE_BUILDERS, LocalFiles, find_files, following
from common.errors import UserError
from common.failures.sentences import reading
from common.system.wording import counted, listed

if TYPE_CHECKING:
    from datasets import DatasetBuilder

KINDS_ADVICE = (
    f"put files of a known kind there: tables ({', '.join(FILE_BUILDERS)}), or images in a folder "
    "for each class"
)
# The name that `datasets` gives to the data of a folder whose README lists no configurations.
UNNAMED_CONFIGURATION = "default"


class LoadArguments(TypedDict):
    """The arguments with which `datasets` loads one data set."""

    path: str  # the Hub id, the folder, or the name of a builder for single files
    name: str | None  # the configuration
    cache_dir: NotRequired[str]
    data_files: NotRequired[dict[str, list[str]]]  # their paths, by split


class OpenedBuilder(NamedTuple):
    """A builder of `datasets`, which knows the files of a data set, and notes on these files."""

    builder: "DatasetBuilder"
    arguments: LoadArguments  # for `load_dataset`, to read the same data
    linked_folders: set[str]  # paths of links to folders; with `following`, `datasets` enters them
    notes: list[str]  # printed for the user


def open_builder(source: DataSource) -> OpenedBuilder:
    """Find the files of a data set that is not built in.

    `datasets` only lists them here; their contents are read later.

    Raises:
        UserError: the files can't be listed, the folder has no data or not the configuration, a
            file is in two splits, or a link that leads nowhere stands for a whole class, table or
            split.
    """
    import datasets

    arguments = load_arguments(source)
    local_files = files_of_folder(source)
    linked_folders = set() if local_files is None else local_files.linked_folders
    advice = advice_on_files(source.location)
    with (
        reading(f"data set {source.location}", advice),
        following(linked_folders),
        naming_absent_data(local_files),
        naming_configurations(source),
    ):
        builder = datasets.load_dataset_builder(**arguments)
    notes = [] if local_files is None else notes_on_files(builder, local_files)
    return OpenedBuilder(builder, arguments, linked_folders, notes)


def load_arguments(source: DataSource) -> LoadArguments:
    """Return the arguments with which `datasets` loads a data set that is not built in."""
    import datasets

    arguments: LoadArguments = {"path": source.location, "name": source.configuration}
    if is_local(source.location):
        # `datasets` notices a changed file by its time alone, and might use an outdated cache. The
        # fingerprint notices more changes, so `datasets` gets another cache for each fingerprint.
        cache = Path(datasets.config.HF_DATASETS_CACHE, f"local-{source.fingerprint}")
        arguments["cache_dir"] = str(cache)
    if os.path.isfile(source.location):
        arguments["path"] = FILE_BUILDERS[Path(source.location).suffix.lower()]
        arguments["data_files"] = {"train": [glob_pattern(source.location)]}
    return arguments


def files_of_folder(source: DataSource) -> LocalFiles | None:
    """Return the files of a local folder; None for a single file, or for a data set of the Hub.

    Raises:
        UserError: the files can't be listed, or all of them are links that lead nowhere.
    """
    if not os.path.isdir(source.location):
        return None
    with reading(f"data set {source.location}", advice_on_files(source.location)):
        local_files = find_files(Path(source.location))
    refuse_only_links(local_files)
    return local_files


@contextmanager
def naming_absent_data(local_files: LocalFiles | None) -> Iterator[None]:
    """Turn the errors of `datasets` for a local folder without data into a `UserError`.

    Args:
        local_files: the files of the folder; None for other data sets, whose errors pass.
    """
    from datasets.data_files import EmptyDatasetError
    from datasets.exceptions import DataFilesNotFoundError

    try:
        yield
    except (EmptyDatasetError, DataFilesNotFoundError):
        if local_files is None:
            raise
        problem = f"data set {local_files.folder} has no files"
        visible = [path for path in local_files.files if not local_files.is_hidden(path)]
        if visible:
            example = repr(local_files.relative(visible[0]))
            problem = (
                f"data set {local_files.folder} has no file of a known kind, only "
                f"{counted(len(visible), 'file')} such as {example}"
            )
        raise UserError(problem, advice=KINDS_ADVICE) from None


@contextmanager
def naming_configurations(source: DataSource) -> Iterator[None]:
    """Turn the errors of `datasets` for a wrong configuration of a local folder into a `UserError`.

    A single file has no configurations, and other errors pass.
    """
    try:
        yield
    except ValueError:
        if os.path.isdir(source.location):
            refuse_configuration(source)
        raise


def refuse_configuration(source: DataSource) -> None:
    """Raise a `UserError` if `--dataset-config` names none of a folder's configurations.

    Without the flag, the same holds for a folder with several configurations.
    """
    import datasets

    names: list[str] = []
    with suppress(Exception):  # the configurations can't be read, so they are not the mistake
        names = datasets.get_dataset_config_names(source.location)
    if not names or source.configuration in names:
        return
    description = f"data set {source.location}"
    if source.configuration is None and len(names) > 1:
        raise UserError(
            f"{description} has several configurations ({listed(names)})",
            advice="choose one of them with --dataset-config",
        )
    if source.configuration is None:
        return
    if names == [UNNAMED_CONFIGURATION]:
        raise UserError(
            f"{description} has no configurations, but --dataset-config is {source.configuration}",
            advice="leave out --dataset-config",
        )
    raise UserError(
        f"{description} has no configuration {source.configuration}, only {listed(names)}",
        advice="name one of these with --dataset-config",
    )


def is_local(location: str) -> bool:
    """Whether a location is a local folder or file, and not a Hub id."""
    return os.path.isabs(location)


def advice_on_files(location: str) -> str:
    """Return what to do if `datasets` can't read a data set, and no single file is to blame."""
    if is_local(location):
        return "check the data set's files"
    return "check --dataset-config and the connection, or the files of the data set on the Hub"


def glob_pattern(path: str) -> str:
    """Return a pattern for `datasets` that matches this path alone, even if it has *, ? or [."""
    return re.sub(r"([*?[])", r"[\1]", path)
