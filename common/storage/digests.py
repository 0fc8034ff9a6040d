"""SHA-256 digests: of bytes, of files, of values that JSON can hold, and of signed JSON objects.

Caches, checkpoints and configs store these digests. So a function here must give the same digest
for the same value in all versions of this library.

Other digests and checksums are elsewhere, each for a reason:

- `common.storage.value_digests`: of tensors and nested values. It imports torch, which takes a
  second, and tools that only read the files of runs do without it.
- `common.data.versions.fingerprint`: a digest of only some samples of a data set, if it is large.
- `common.data.streaming.parquet_files`: the CRC-32 of a few entries of a file, to notice that the
  file has changed.
- `common.checkpoints.adapters`: the sum of a tensor's bits, which the device and all ranks compute
  without copying the tensor.
- `common.tools.compare.page`: the digest of a script, in the form that browsers require.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from common.storage.files import refuse_pipe
from common.storage.json_files import JsonObject

SIGNATURE = "sha256"  # the entry of a signed JSON object with the digest of all other entries
SHORT = 16  # hexadecimal digits of a short digest
SHOWN = 8  # hexadecimal digits of a digest or a commit that tables and sentences show


def sha256_of_bytes(contents: bytes) -> str:
    """Return the SHA-256 of bytes."""
    return hashlib.sha256(contents).hexdigest()


def size_and_sha256(path: Path) -> tuple[int, str]:
    """Return the size of a file in bytes and its SHA-256; the file is read whole.

    Raises:
        OSError: it can't be read.
    """
    with refuse_pipe(path).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 of a file; an OSError if it can't be read."""
    _, digest = size_and_sha256(path)
    return digest


def remembered_sha256_of_file(path: Path) -> str:
    """Return the SHA-256 of a file; an unchanged file is not read again.

    Raises:
        OSError: it can't be read.
    """
    status = path.stat()
    return sha256_by_stamps(path, (status.st_mtime_ns, status.st_ctime_ns, status.st_size))


@functools.lru_cache(maxsize=16)
def sha256_by_stamps(path: Path, stamps: tuple[int, ...]) -> str:
    """Return the SHA-256 of a file.

    Args:
        stamps: the file's times and size. They only serve as a part of the cache's key, so that a
            changed file is read again.
    """
    return sha256_of_file(path)


def digest_of_json(value: object) -> str:
    """Return the SHA-256 of a value that JSON can hold; the order of keys does not matter."""
    return sha256_of_bytes(json.dumps(value, sort_keys=True).encode())


def short_digest(value: object) -> str:
    """Return the first 16 hexadecimal digits of `digest_of_json`."""
    return digest_of_json(value)[:SHORT]


def shown_digest(digest: str) -> str:
    """Return the beginning of a digest or a commit, as tables and sentences show it."""
    return digest[:SHOWN]


def signed(value: Mapping[str, object]) -> JsonObject:
    """Return a JSON object with the digest of its other entries as `SIGNATURE`."""
    entries = {name: entry for name, entry in value.items() if name != SIGNATURE}
    return entries | {SIGNATURE: digest_of_json(entries)}


def is_as_signed(contents: Mapping[str, object]) -> bool:
    """Whether a JSON object is as `signed` returned it; False if it was edited or never signed."""
    return contents == signed(contents)
