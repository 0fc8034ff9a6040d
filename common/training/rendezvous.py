"""How processes that torchrun started again find each other."""

import functools
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from common.system.machine import count_of

SCHEME = "attempt"
RESTARTS = "TORCHELASTIC_RESTART_COUNT"


def rendezvous_url() -> str | None:
    """Return the URL at which the processes of this attempt meet; None for torch's default.

    The first attempt uses torch's default. torchrun (``--max-restarts``) keeps one store for all
    attempts. In it, a later attempt would find the addresses of the first processes, which have
    ended, and wait for them.
    """
    if count_of(RESTARTS, 0) == 0:
        return None
    register()
    return f"{SCHEME}://"


@functools.cache  # torch refuses to register a scheme twice
def register() -> None:
    register_rendezvous_handler(SCHEME, meet)


def meet(url: str, timeout: timedelta, **options: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield (store, rank, world_size) as ``env://`` does, with keys of this attempt alone."""
    for store, rank, world_size in rendezvous("env://", timeout=timeout, **options):
        yield PrefixStore(f"{SCHEME}-{os.environ[RESTARTS]}", store), rank, world_size
