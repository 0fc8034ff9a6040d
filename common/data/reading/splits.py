"""Reads all splits of a Hub data set, a local folder or a file with `datasets`."""

from itertools import groupby
from typing import TYPE_CHECKING

from common.data.mistakes import empty_split_error
from common.data.reading.builders import OpenedBuilder, advice_on_files, glob_pattern, open_builder
from common.data.reading.csv_dialects import csv_options, dialect_notes, find_dialects
from common.data.reading.csv_files import Dialect
from common.data.reading.damaged_tables import refuse_damaged_table
from common.data.reading.metadata_files import refuse_metadata_without_paths
from common.data.sources import DataSource
from common.data.versions.local_files import following
from common.failures.sentences import reading

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, Features


def load_splits(source: DataSource) -> tuple["DatasetDict", list[str]]:
    """Return all splits of a data set that is not built in, and notes for the user.

    Raises:
        UserError: a file can't be read, has different columns from the others, or lacks the paths
            of images; or a split is empty. See also `open_builder` and `find_dialects`.
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
            refuse_metadata_without_paths(opened.builder, description)
            raise  # no single file is to blame
    for name, split in splits.items():
        if not len(split):
            raise empty_split_error(source.location, str(name))
    return splits, notes


def load_in_dialects(opened: OpenedBuilder, dialects: dict[str, Dialect]) -> "DatasetDict":
    """Read all splits of a data set, each CSV file in its dialect.

    Args:
        dialects: the dialects of CSV files, by path; the files of each dialect are read with their
            own options. If it is empty, the builder reads all files in the same way.
    """
    import datasets

    builder = opened.builder
    if not dialects:
        return load_with_builder(opened)
    splits = datasets.DatasetDict()
    # All parts get the column types that the README states, or else those of the first part.
    features = builder.config.features
    for name, files in builder.config.data_files.items():
        parts = []
        # Only neighbouring files are read together, so that the rows keep their order.
        for dialect, neighbours in groupby(map(str, files), key=dialects.get):
            # Only local files have dialects, and for these `open_builder` sets a cache.
            cache_dir = opened.arguments["cache_dir"]
            part = load_csv_files([*neighbours], dialect, features, cache_dir)
            features = features or part.features
            parts.append(part.cast(features))
        splits[str(name)] = datasets.concatenate_datasets(parts)
    return splits


def load_with_builder(opened: OpenedBuilder) -> "DatasetDict":
    """Read all splits of a data set in the way that its builder expects."""
    import datasets
    from datasets.packaged_modules.csv.csv import CsvConfig

    options = csv_options(None) if isinstance(opened.builder.config, CsvConfig) else {}
    with following(opened.linked_folders):
        return datasets.load_dataset(**opened.arguments, **options)


def load_csv_files(
    files: list[str], dialect: Dialect | None, features: "Features | None", cache_dir: str
) -> "Dataset":
    """Read CSV files of one dialect, one after the other.

    Args:
        dialect: see `csv_options`.
        features: the types of the columns; None: `datasets` infers them.
    """
    import datasets

    return datasets.load_dataset(
        "csv",
        data_files={"train": [glob_pattern(file) for file in files]},
        split="train",
        cache_dir=cache_dir,
        features=features,
        **csv_options(dialect),
    )
