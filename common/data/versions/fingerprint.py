"""Fingerprints of data: short digests that change with the contents of a data set.

A resumed run compares fingerprints to notice that its data have changed since it began. They also
are part of the names of the caches of prepared data, so that changed data get a new cache. To be
fast, a fingerprint covers small data as a whole, and only some samples of large data, at fixed
positions.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from common.data.versions.local_files import TABLE_SUFFIXES
from common.failures.sentences import reading
from common.storage.digests import SHORT, sha256_of_bytes, sha256_of_file, short_digest
from common.storage.value_digests import add_contents

# The arrays of a split are read as a whole if they have at most this many bytes together. Otherwise
# only ROWS rows of each array are read.
WHOLE_BYTES = 64 * 2**20
ROWS = 256
PROBES = 5  # samples that are read from a data set that can only be read sample by sample
# Each of these samples is read this many times. Random samples differ between readings, and get no
# fingerprint.
READINGS = 3
# A text file or a table is identified by its content if it has at most SMALL_BYTES. This ends when
# MAX_BYTES_READ bytes of all files together have been read.
SMALL_BYTES = 2**22
MAX_BYTES_READ = 2**26
READ_WHOLE = {*TABLE_SUFFIXES, ".md", ".txt", ".yaml", ".yml"}  # suffixes of these files


def spread_positions(count: int, limit: int) -> list[int]:
    """Return at most `limit` positions, spread evenly over ``range(count)`` from first to last.

    If `count` is not larger than `limit`, all positions are returned.

    Args:
        limit: at least 2, for the first and the last position.
    """
    if count <= limit:
        return [*range(count)]
    return [index * (count - 1) // (limit - 1) for index in range(limit)]


def fingerprint_of_files(files: Mapping[str, os.stat_result]) -> str:
    """Return a digest that changes with files, even if their sizes and modification times do not.

    Small tables and text files are read. Other files are identified by their size, their times and
    their inode. One of the times is that of the last change of status (ctime): a program can set
    back the time of modification, but not the ctime. The digest also covers the paths.

    Args:
        files: the status of each file, by path.

    Raises:
        OSError: a file can't be read.
    """
    identities: list[list[str | int]] = []
    bytes_left = MAX_BYTES_READ
    for path, status in files.items():
        may_be_read = os.path.splitext(path)[1].lower() in READ_WHOLE
        if may_be_read and status.st_size <= min(SMALL_BYTES, bytes_left):
            bytes_left -= status.st_size
            identities.append([path, status.st_size, sha256_of_file(Path(path))])
        else:
            times = (status.st_mtime_ns, status.st_ctime_ns)
            identities.append([path, status.st_size, *times, status.st_ino])
    return short_digest(identities)


def fingerprint_of_tokenizer(checkpoint: str) -> str:
    """Return a digest that changes with the files of a tokenizer in a local folder.

    The digest becomes part of the name of a cache of tokenised text. The files are those directly
    in the folder whose names begin with "token" or "vocab".

    A Hub id and "scratch" have no files here, so all of them get the same digest. The name of the
    cache must therefore depend on `checkpoint` as well.

    Raises:
        UserError: the files can't be read.
    """
    advice = "make its files readable for your user, or copy them again from where they came"
    with reading(f"checkpoint {checkpoint}", advice):
        # For example, tokenizer.json, tokenizer_config.json and vocab.txt.
        files = [
            path for path in Path(checkpoint).glob("*") if path.name.startswith(("token", "vocab"))
        ]
        contents = b"".join(path.read_bytes() for path in sorted(files))
    return sha256_of_bytes(contents)


def fingerprint_of_arrays(arrays: Mapping[str, torch.Tensor | np.ndarray]) -> str:
    """Return a digest of the names, shapes, dtypes and contents of tensors or arrays.

    If the arrays have more than `WHOLE_BYTES` together, the digest covers only some rows of each.
    """
    digest = hashlib.sha256()
    is_small = sum(values.nbytes for values in arrays.values()) <= WHOLE_BYTES
    for name, values in sorted(arrays.items()):
        digest.update(f"{name} {tuple(values.shape)} {values.dtype};".encode())
        rows = values if is_small else values[spread_positions(len(values), ROWS)]
        if isinstance(rows, np.ndarray):
            # Without the type and shape that `add_contents` adds, because the digests in saved runs
            # do not have them.
            digest.update(np.ascontiguousarray(rows).data)
        else:
            add_contents(digest, rows)
    return digest.hexdigest()[:SHORT]


def fingerprint_of_samples(count: int, read: Callable[[int], object]) -> str | None:
    """Return a digest of some samples of a data set and of the number of all samples.

    Use it for data sets that are not made of arrays or files, such as a recipe's own `Dataset`.

    Args:
        count: the number of samples of the data set.
        read: returns the sample at an index, and must not change the state of random generators.

    Returns:
        None if a sample can't be read here, differs between readings, or holds a value that can't
        be turned into bytes.
    """
    readings = set()
    for _ in range(READINGS):
        digest = hashlib.sha256(f"{count};".encode())
        try:
            for index in spread_positions(count, PROBES):
                add_contents(digest, read(index))
        except Exception:
            # The code of the data set may raise any error. If it concerns training, training meets
            # it as well and reports it.
            return None
        readings.add(digest.hexdigest()[:SHORT])
    return readings.pop() if len(readings) == 1 else None


def fingerprint_of_splits(fingerprints: Mapping[str, str | None]) -> str | None:
    """Return one digest of the fingerprints of all splits; None if no split has a fingerprint.

    Splits without a fingerprint are left out of the digest.
    """
    known = {name: value for name, value in fingerprints.items() if value is not None}
    if not known:
        return None
    return sha256_of_bytes(repr(sorted(known.items())).encode())[:SHORT]
