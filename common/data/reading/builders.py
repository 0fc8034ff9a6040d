"""Reads Hub data sets, local folders and files with `datasets`, and reports what it leaves out.

`datasets` skips links and files without a warning, and does not name a damaged file.
"""

import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NotRequired, TypedDict

from common.data.labelled_data.guess import Feature
from common.data.mistakes import empty_split_error, other_columns_error
from common.data.reading.csv_files import DEFAULT, RAGGED_ADVICE, SEPARATORS, Dialect, find_dialect
from common.data.sources import DataSource
from common.data.versions.local_files import (
    FILE_BUILDERS,
    LocalFiles,
    dangling_error,
    find_files,
    following,
    notes_on_dangling_links,
    suffix_of,
)
from common.errors import UserError
from common.failures.sentences import reading
from common.system.wording import counted

if TYPE_CHECKING:
    from datasets import DatasetBuilder, DatasetDict

KINDS_ADVICE = (
    f"put files of a known kind there: tables ({', '.join(FILE_BUILDERS)}), or images in a folder "
    "for each class"
)
TABLE_BUILDERS = {*FILE_BUILDERS.values()}


class LoadArguments(TypedDict):
    """The arguments with which `datasets` loads one data set."""

    path: str  # the Hub id, the folder, or the name of a builder for single files
    name: str | None  # the configuration
    cache_dir: NotRequired[str]
    data_files: NotRequired[dict[str, list[str]]]  # their paths, by split


class CsvOptions(TypedDict, total=False):
    """The arguments with which `datasets`, and pandas within it, read a CSV file."""

    keep_default_na: bool
    na_values: list[str]
    sep: str
    encoding: str


def is_local(location: str) -> bool:
    """Whether a location is a local folder or file, and not a Hub id."""
    return os.path.isabs(location)


def advice_on_files(location: str) -> str:
    """Return what to do if `datasets` can't read a data set, and no single file is to blame."""
    if is_local(location):
        return "check the data set's files"
    return "check --dataset-config and the connection, or the files of the data set on the Hub"


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
        UserError: the files can't be listed, the folder has no data, a file is in two splits, or a
            link that leads nowhere stands for a whole class, table or split.
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


def glob_pattern(path: str) -> str:
    """Return a pattern for `datasets` that matches this path alone, even if it has *, ? or [."""
    return re.sub(r"([*?[])", r"[\1]", path)


def refuse_only_links(local_files: LocalFiles) -> None:
    """Raise a `UserError` if a folder has links that lead nowhere, but no files to read.

    Without this check, `datasets` would report that it finds no file, and not mention the links.
    """
    has_files = any(not local_files.is_hidden(path) for path in local_files.files)
    links = local_files.visible_links()
    if links and not has_files:
        raise dangling_error(local_files, links[0], "a class or split")


def notes_on_files(builder: "DatasetBuilder", local_files: LocalFiles) -> list[str]:
    """Return notes on files that are not read: links that lead nowhere, and files in no split.

    Raises:
        UserError: a file is in two splits, for example because its class is called test; or a link
            that leads nowhere stands for a whole class, table or split.
    """
    data_files = builder.config.data_files or {}
    files_in_splits = [str(file) for file in chain(*data_files.values())]
    refuse_file_in_two_splits(files_in_splits, local_files.folder)
    files_read = set(files_in_splits)
    suffixes = {suffix_of(file) for file in files_read}
    are_tables = builder.name in TABLE_BUILDERS
    # This call refuses a link that stands for a whole class, table or split.
    notes = notes_on_dangling_links(local_files, suffixes, are_tables=are_tables)
    # A file with another suffix, such as a README.md, is not meant to be read.
    unread = [
        path
        for path in local_files.files
        if path not in files_read
        and suffix_of(path) in suffixes
        and not local_files.is_hidden(path)
    ]
    if unread:
        example = repr(local_files.relative(unread[0]))
        files = counted(len(unread), "file is", "files are")
        notes.append(f"{files} in no split and not read, such as {example}")
    return notes


def refuse_file_in_two_splits(files_in_splits: list[str], folder: str) -> None:
    """Raise a `UserError` if a file is in two splits of a data set.

    Without this check, a model could be evaluated on samples on which it was trained.

    Args:
        files_in_splits: the paths of the files of all splits; a file in two splits is here twice.
        folder: the folder of the data set, for the message.
    """
    counts = Counter(files_in_splits)
    repeated = [file for file, count in counts.items() if count > 1]
    if repeated:
        raise UserError(
            f"{repeated[0]} is in two splits of data set {folder}, because its path "
            "contains the names of two splits, or because README.md lists it in both",
            advice="rename the file or its folder, or correct data_files in README.md",
        )


def load_splits(source: DataSource) -> tuple["DatasetDict", list[str]]:
    """Return all splits of a data set that is not built in, and notes for the user.

    Raises:
        UserError: a file can't be read, or has different columns from the others; a split is empty.
            See also `open_builder` and `find_dialects`.
    """
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    # The libraries log nothing, because `reading` reports a failure in one sentence.
    for library in (datasets, huggingface_hub):
        library.logging.set_verbosity(datasets.logging.CRITICAL)
    description = f"data set {source.location}"
    opened = open_builder(source)
    dialects = find_dialects(opened.builder)
    notes = [*opened.notes, *dialect_notes(dialects, source)]
    with reading(description, advice_on_files(source.location)):
        try:
            splits = load_in_dialects(opened, dialects)
        except Exception:
            refuse_damaged_table(opened.builder, dialects, description)
            raise  # no single table is damaged
    for name, split in splits.items():
        if not len(split):
            raise empty_split_error(source.location, str(name))
    return splits, notes


def find_dialects(builder: "DatasetBuilder") -> dict[str, Dialect]:
    """Return the dialect of each local CSV file by its path.

    The result is empty if the builder reads all files correctly without stated dialects. This is
    so if the files are not CSV, if the data set's README states the dialect, or if all files are
    written as the builder expects.

    Raises:
        UserError: `find_dialect` refuses a file, or a `metadata.csv` beside images is not in UTF-8
            with commas.
    """
    data_files = builder.config.data_files or {}
    files = [str(file) for file in chain(*data_files.values())]
    paths = [file for file in files if os.path.isfile(file)]  # without files on the Hub
    if builder.name != "csv":
        check_metadata_files(paths)
        return {}
    if builder.config.encoding is not None or builder.config.sep not in SEPARATORS:
        return {}  # the README of the data set states the dialect
    tables = [file for file in paths if file.lower().endswith((".csv", ".tsv"))]
    dialects = {file: find_dialect(file) for file in tables}
    expected = Dialect(builder.config.sep, "utf-8")
    are_as_expected = all(dialect == expected for dialect in dialects.values())
    return {} if are_as_expected else dialects


def check_metadata_files(paths: list[str]) -> None:
    """Raise a `UserError` if a `metadata.csv` beside images is not in UTF-8 with commas.

    `datasets` reads these files without options, so a dialect can't be stated for them.

    Args:
        paths: the local files of the data set.
    """
    for path in paths:
        if os.path.basename(path) != "metadata.csv":
            continue
        dialect = find_dialect(path)
        if dialect != DEFAULT:
            raise UserError(
                f"{path} can't be read, because it is {dialect}",
                advice="save the file in UTF-8, with commas between the columns",
            )


def dialect_notes(dialects: dict[str, Dialect], source: DataSource) -> list[str]:
    """Return a note on each unusual dialect, with the first file that is written in it.

    The user can see from it whether the dialect was inferred correctly.
    """
    # Later entries replace earlier ones, so the files are reversed to keep the first of a dialect.
    first_files = {dialect: file for file, dialect in reversed(dialects.items())}
    return [
        f"{os.path.relpath(file, Path(source.location).parent)} is {dialect}"
        for dialect, file in first_files.items()
        if dialect != DEFAULT
    ]


def csv_options(dialect: Dialect | None) -> CsvOptions:
    """Return the arguments with which `datasets` reads a CSV file.

    Only an empty cell is a missing value. A cell that reads NA, null or None is a class or a text.

    Args:
        dialect: None if `datasets` reads the file correctly without stated separator and encoding.
    """
    options: CsvOptions = {"keep_default_na": False, "na_values": [""]}
    if dialect is not None:
        options["sep"] = dialect.separator
        options["encoding"] = dialect.encoding
    return options


def load_in_dialects(opened: OpenedBuilder, dialects: dict[str, Dialect]) -> "DatasetDict":
    """Read all splits of a data set, each CSV file in its dialect.

    Args:
        dialects: the dialects of CSV files, by path; the files of each dialect are read with their
            own options. If it is empty, the builder reads all files in the same way.
    """
    import datasets
    from datasets.packaged_modules.csv.csv import CsvConfig

    builder = opened.builder
    if not dialects:
        options = csv_options(None) if isinstance(builder.config, CsvConfig) else {}
        with following(opened.linked_folders):
            return datasets.load_dataset(**opened.arguments, **options)
    splits = datasets.DatasetDict()
    # All parts get the column types that the README states, or else those of the first part.
    features = builder.config.features
    for name, files in builder.config.data_files.items():
        parts = []
        # Only neighbouring files are read together, so that the rows keep their order.
        for dialect, group in groupby(map(str, files), key=dialects.get):
            part = datasets.load_dataset(
                "csv",
                data_files={"train": [glob_pattern(file) for file in group]},
                split="train",
                # Only local files have dialects, and for these `open_builder` sets a cache.
                cache_dir=opened.arguments["cache_dir"],
                features=features,
                **csv_options(dialect),
            )
            features = features or part.features
            parts.append(part.cast(features))
        splits[str(name)] = datasets.concatenate_datasets(parts)
    return splits


def refuse_damaged_table(
    builder: "DatasetBuilder", dialects: dict[str, Dialect], description: str
) -> None:
    """Raise a `UserError` that names the damaged table, if there is one.

    `datasets` does not name a damaged file, so this function reads each table alone. It returns
    normally if the data set is not made of tables, or if all tables can be read and fit together.

    Raises:
        UserError: a table can't be read, or its columns differ from those of the first table.
    """
    if builder.name not in TABLE_BUILDERS:
        return
    first_file = ""
    expected: dict[str, Feature] = {}
    remedy = (
        RAGGED_ADVICE
        if builder.name == "csv"
        else "copy the file again from where it came, or remove it"
    )
    for file in chain(*builder.config.data_files.values()):
        options = csv_options(dialects.get(str(file))) if builder.name == "csv" else {}
        where = f"file {file} of {description}"
        # On Windows, files that `datasets` has mapped can't be removed. They stay in the system's
        # folder of temporary files.
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        with folder as cache, reading(where, remedy):
            features = features_of(builder.name, file, cache, options)
        first_file = first_file or str(file)
        expected = expected or features
        if features != expected:
            raise other_columns_error(where, features, first_file, expected)


def features_of(
    builder_name: str, file: str, cache: str, options: CsvOptions
) -> dict[str, Feature]:
    """Read one table alone, and return the type of each column by the column's name.

    Args:
        options: the options of a CSV file; empty for a table of another format.

    Raises:
        UserError: the table has no rows.
        Exception: an error of `datasets` of any class, if the table can't be read.
    """
    import datasets

    try:
        table = datasets.load_dataset(
            builder_name, data_files=[glob_pattern(file)], split="train", cache_dir=cache, **options
        )
    except ValueError as problem:
        if "corresponds to no data" in str(problem):
            raise UserError(
                f"{file} has no rows", advice="add rows to this file, or remove it"
            ) from None
        raise
    return table.features
