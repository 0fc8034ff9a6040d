"""What `datasets` reads of a Hub data set, a local folder or a file: builders and their splits."""

import os
import re
import tempfile
from collections import Counter
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.data.csv_files import DEFAULT, SEPARATORS, Dialect, find_dialect
from common.data.local_files import LocalFiles, dangling_note, find_files, following
from common.data.sources import DataSource
from common.errors import UserError
from common.files import reading

if TYPE_CHECKING:
    from datasets import DatasetDict

FILE_BUILDERS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json"}
FILE_BUILDERS |= {".parquet": "parquet"}
TABLE_BUILDERS = ("csv", "json", "parquet")


class Builder(NamedTuple):
    """A builder of `datasets`, and what is known of the data before they are read."""

    builder: Any
    arguments: dict[str, Any]  # of `load_dataset`, for the same data
    linked_folders: set[str]  # that it is to look into
    notes: list[str]  # for the person at the terminal


def open_builder(source: DataSource) -> Builder:
    """Find the files of a data set that is not built in; a `UserError` says what is wrong."""
    import datasets

    what = f"data set {source.location}"
    arguments: dict[str, Any] = {"path": source.location, "name": source.configuration}
    found = None
    if os.path.isabs(source.location):
        # `datasets` knows changed files by their time alone, and this by the fingerprint.
        folder = Path(datasets.config.HF_DATASETS_CACHE, f"local-{source.fingerprint}")
        arguments["cache_dir"] = str(folder)
    if os.path.isfile(source.location):
        arguments["path"] = FILE_BUILDERS[Path(source.location).suffix.lower()]
        arguments["data_files"] = {"train": [escaped(source.location)]}
    elif os.path.isdir(source.location):
        with reading(what):
            found = find_files(Path(source.location))
        refuse_only_links(found)
    linked_folders = set() if found is None else found.linked_folders
    with reading(what), following(linked_folders):
        builder = datasets.load_dataset_builder(**arguments)
    notes = [] if found is None else notes_on_files(builder, found)
    return Builder(builder, arguments, linked_folders, notes)


def escaped(path: str) -> str:
    """Return a path as a pattern of `datasets` that matches it alone."""
    return re.sub(r"([*?[])", r"[\1]", path)


def refuse_only_links(found: LocalFiles) -> None:
    if found.dangling and not any(not found.is_hidden(path) for path in found.files):
        dangling_note(found, set(), are_tables=False)


def notes_on_files(builder: Any, found: LocalFiles) -> list[str]:
    """Say which of a folder's files are not read: links that lead nowhere, and files in no split.

    Raises:
        UserError: a file is in two splits, as by a class that is called test; or a link that leads
            nowhere leaves out a class or a table.
    """
    data_files = builder.config.data_files or {}
    counts = Counter(str(file) for files in data_files.values() for file in files)
    twice = [file for file, count in counts.items() if count > 1]
    if twice:
        raise UserError(
            f"data set {found.folder}: {twice[0]} is in two splits by its path: rename its folder "
            "or it"
        )
    suffixes = {os.path.splitext(file)[1] for file in counts}
    lowered = {suffix.lower() for suffix in suffixes}
    notes = dangling_note(found, lowered, are_tables=builder.name in TABLE_BUILDERS)
    unread = [
        path
        for path in found.files
        if path not in counts and os.path.splitext(path)[1] in suffixes
        if not found.is_hidden(path)
    ]
    if unread:
        example = repr(found.relative(unread[0]))
        notes.append(f"{len(unread):,} files are in no split and not read, as {example}")
    return notes


def load_splits(source: DataSource) -> tuple["DatasetDict", list[str]]:
    """Read all splits of a data set that is not built in; return them and notes.

    Raises:
        UserError: a file can't be read, or holds other columns than the others; a split is empty.
    """
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    for library in (datasets, huggingface_hub):  # what fails is said below
        library.logging.set_verbosity(datasets.logging.CRITICAL)
    what = f"data set {source.location}"
    opened = open_builder(source)
    dialects = find_dialects(opened.builder)
    notes = [*opened.notes, *dialect_notes(dialects, source)]
    with reading(what):
        try:
            loaded = load_with(opened, dialects)
        except Exception:
            blame_file(opened.builder, dialects, what)
            raise
    for name, split in loaded.items():
        if not len(split):
            raise UserError(f"{what}: split {name} is empty: remove or fill it")
    return loaded, notes


def find_dialects(builder: Any) -> dict[str, Dialect]:
    """Return how each local CSV file is written that the builder does not expect as it is.

    Raises:
        UserError: a file is not in Unicode, or is one beside images and not as it has to be there.
    """
    data_files = builder.config.data_files or {}
    files = [str(file) for file in chain(*data_files.values())]
    local = [file for file in files if os.path.isfile(file)]
    if builder.name != "csv":
        for file in local:
            if os.path.basename(file) == "metadata.csv" and find_dialect(file) != DEFAULT:
                advice = "write it with commas, in UTF-8"
                raise UserError(f"{file} is {find_dialect(file)}: {advice}")
        return {}
    if builder.config.encoding is not None or builder.config.sep not in SEPARATORS:
        return {}  # its README says how it is written
    tables = [file for file in local if file.lower().endswith((".csv", ".tsv"))]
    dialects = {file: find_dialect(file) for file in tables}
    expected = Dialect(builder.config.sep, "utf-8")
    return dialects if {*dialects.values()} - {expected} else {}


def dialect_notes(dialects: dict[str, Dialect], source: DataSource) -> list[str]:
    """Say how files are written that are not the usual CSV: by the first one of each way."""
    first = {dialect: file for file, dialect in reversed(dialects.items())}
    return [
        f"{os.path.relpath(file, Path(source.location).parent)} is {dialect}"
        for dialect, file in first.items()
        if dialect != DEFAULT
    ]


def csv_options(dialect: Dialect | None) -> dict[str, Any]:
    """Return how `datasets` is to read a CSV file.

    A class or a text that reads NA, null or None is one: an empty cell alone has no value.
    """
    options: dict[str, Any] = {"keep_default_na": False, "na_values": [""]}
    if dialect is not None:
        options |= {"sep": dialect.separator, "encoding": dialect.encoding}
    return options


def load_with(opened: Builder, dialects: dict[str, Dialect]) -> "DatasetDict":
    """Read all splits; CSV files of several dialects one after the other."""
    import datasets
    from datasets.packaged_modules.csv.csv import CsvConfig

    builder = opened.builder
    if not dialects:
        options = csv_options(None) if isinstance(builder.config, CsvConfig) else {}
        with following(opened.linked_folders):
            return datasets.load_dataset(**opened.arguments, **options)
    splits = datasets.DatasetDict()
    features = builder.config.features
    for name, files in builder.config.data_files.items():
        parts = []
        for dialect, group in groupby(map(str, files), key=lambda file: dialects.get(file)):
            part = datasets.load_dataset(
                "csv",
                data_files={"train": [escaped(file) for file in group]},
                split="train",
                cache_dir=opened.arguments["cache_dir"],
                features=features,
                **csv_options(dialect),
            )
            features = features or part.features
            parts.append(part.cast(features))
        splits[str(name)] = datasets.concatenate_datasets(parts)
    return splits


def blame_file(builder: Any, dialects: dict[str, Dialect], what: str) -> None:
    """Raise a `UserError` for the first local table that can't be read, or not with the others."""
    import datasets

    first: dict[str, Any] | None = None
    is_table = builder.name in TABLE_BUILDERS
    for file in chain(*builder.config.data_files.values()) if is_table else ():
        options = csv_options(dialects.get(str(file))) if builder.name == "csv" else {}
        with tempfile.TemporaryDirectory() as folder, reading(f"{what}: its file {file}"):
            arguments = {"data_files": [escaped(file)], "split": "train", "cache_dir": folder}
            try:
                features = datasets.load_dataset(builder.name, **arguments, **options).features
            except ValueError as problem:
                if "corresponds to no data" in str(problem):
                    raise ValueError("it has no rows: remove or fill it") from None
                raise
        first = first or features
        odd = [name for name in {**first, **features} if first.get(name) != features.get(name)]
        if odd:
            columns = f"in the columns {', '.join(odd)} than others"
            raise UserError(f"{what}: its file {file} has other names or types {columns}")
