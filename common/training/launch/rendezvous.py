"""Lets the processes of a job find each other after torchrun has restarted them.

Processes find each other through a store, in which each process writes its address and reads the
others' addresses. torch calls this a rendezvous. It opens the store by a URL, for whose scheme a
handler is registered. Here the scheme ``attempt://`` gives each restart of the job keys of its own.
"""

import functools
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from common.system.launch_variables import count_of

SCHEME = "attempt"  # the scheme of the URL, and the beginning of the keys in the store
RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # how often torchrun has restarted the processes


def rendezvous_url() -> str | None:
    """Return the URL by which the processes of this attempt meet; None for torch's default.

    The first attempt uses torch's default. torchrun (``--max-restarts``) keeps one store for all
    attempts. With the same keys, a later attempt would find the addresses of the first processes,
    which have ended, and wait for them.
    """
    if count_of(RESTARTS, 0) == 0:
        return None
    register()
    return f"{SCHEME}://"


@functools.cache  # torch refuses to register a scheme twice
def register() -> None:
    """Have torch call `meet` for URLs of this scheme."""
    register_rendezvous_handler(SCHEME, meet)


def meet(url: str, timeout: timedelta, **options: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield (store, rank, world_size), as torch requires of a handler.

    All three come from torch's default ``env://``. The store is wrapped so that each of its keys
    begins with the number of this attempt.

    Args:
        options: whatever else torch passes to a handler; torch's default gets it unchanged.
    """
    for store, rank, world_size in rendezvous("env://", timeout=timeout, **options):
        yield PrefixStore(f"{SCHEME}-{os.environ[RESTARTS]}", store), rank, world_size
