"""Find a data set: on the Hub, in a local folder or built in; none of it is read yet."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from common.errors import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator

Answer = TypeVar("Answer")

# Short names of public data sets: Hub id and configuration.
PUBLIC = {
    "mnist": ("ylecun/mnist", None),
    "cifar10": ("uoft-cs/cifar10", None),
    "sst2": ("nyu-mll/glue", "sst2"),
    "mrpc": ("nyu-mll/glue", "mrpc"),
}
BUILT_IN = ("digits", "docstrings", "synthetic")


@dataclass(frozen=True)
class DataSource:
    """Where a data set comes from, known before any of it is read."""

    name: str  # short name, as the recipes' tables know it
    location: str  # Hub id, absolute folder, or the built-in name
    configuration: str | None
    reason: str  # why this one, for the person at the terminal
    fingerprint: str  # changes when the data do
    validation_share: float | None = None  # of train, held out where there is no validation split


def choose_source(
    config: Any, accelerator: Accelerator, *, public: str, built_in: str, public_on_cpu: bool
) -> DataSource:
    """Resolve `--dataset`; on rank 0 alone, so that all ranks get the same answer.

    Args:
        config: has ``dataset``, ``dataset_config`` and ``validation_share``.
        public: what ``auto`` means where it makes sense to train it and it can be had.
        built_in: what ``auto`` means elsewhere.
        public_on_cpu: whether training `public` without an accelerator makes sense.
    Raises:
        UserError: for a named data set that can't be had; a name is never replaced.
    """
    source = ask_rank_zero(
        accelerator, lambda: find_source(config, accelerator, public, built_in, public_on_cpu)
    )
    return replace(source, validation_share=config.validation_share)


def ask_rank_zero(accelerator: Accelerator, choose: Callable[[], Answer]) -> Answer:
    """Return what `choose` returns on rank 0, on all ranks; its `UserError` ends all of them."""
    from accelerate.utils import broadcast_object_list

    answer: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            answer = [choose()]
        except UserError as error:
            answer = [error]
    broadcast_object_list(answer)
    if isinstance(answer[0], UserError):
        raise answer[0]
    return answer[0]


def find_source(
    config: Any, accelerator: Accelerator, public: str, built_in: str, public_on_cpu: bool
) -> DataSource:
    """Resolve `--dataset` on this rank; see `choose_source`."""
    if config.dataset != "auto":
        return find_named(config.dataset, config.dataset_config)
    if accelerator.device.type == "cpu" and not public_on_cpu:
        return built_in_source(built_in, f"auto: {public} would take hours without a GPU")
    location, configuration = PUBLIC[public]
    commit = hub_commit(location)
    if commit is None:
        return built_in_source(built_in, f"auto: {public} is not cached, the Hub does not answer")
    return DataSource(public, location, configuration, "auto: from the Hub", commit)


def built_in_source(name: str, reason: str) -> DataSource:
    """Return the source of a built-in data set."""
    version = platform.python_version() if name == "docstrings" else "1"
    return DataSource(name, name, None, reason, f"{name}-3-{version}")


def find_named(name: str, configuration: str | None) -> DataSource:
    """Resolve a data set that the user named: built in, a local folder, or a Hub id."""
    if name in BUILT_IN:
        return built_in_source(name, "named, built in")
    if "://" in name:  # not repeated in the message: it may hold a token
        raise UserError("--dataset takes a name, a Hub id or a local folder, and no address")
    folder = Path(name).expanduser()
    if folder.is_dir():
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        listing = [
            (str(f.relative_to(folder)), f.stat().st_size, f.stat().st_mtime_ns) for f in files
        ]
        fingerprint = hashlib.sha256(json.dumps([str(folder.resolve()), listing]).encode())
        return DataSource(
            folder.resolve().name.lower(),
            str(folder.resolve()),
            configuration,
            "named, a local folder",
            fingerprint.hexdigest()[:16],
        )
    if folder.exists():
        raise UserError(f"--dataset {name} is a file: pass the folder that holds it")
    location, known_configuration = PUBLIC.get(name, (name, None))
    commit = hub_commit(location)
    if commit is None:
        raise UserError(
            f"--dataset {name} can't be had: there is no such folder, it is not cached, and the "
            f"Hub has no {location} or does not answer. Pass a local folder, or one that is "
            f"built in: {', '.join(BUILT_IN)}"
        )
    reason = "named, from the Hub"
    return DataSource(name, location, configuration or known_configuration, reason, commit)


def hub_commit(hub_id: str, kind: Literal["datasets", "models"] = "datasets") -> str | None:
    """Return the commit of a Hub repository: from the Hub within 3 s, else from the local cache.

    `datasets.load_dataset` would take 24 s to find that the Hub does not answer.
    """
    import requests
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers

    if not constants.HF_HUB_OFFLINE:
        address = f"{constants.ENDPOINT}/api/{kind}/{hub_id}"
        try:
            answer = requests.get(address, headers=build_hf_headers(), timeout=3)
            if answer.ok:
                return answer.json()["sha"]
        except (requests.RequestException, KeyError):
            pass  # out of reach: what the cache has will do
    folder = f"{kind}--{hub_id.replace('/', '--')}"
    reference = Path(constants.HF_HUB_CACHE, folder, "refs", "main")
    return reference.read_text().strip() if reference.is_file() else None


def cache_folder(source: DataSource, **settings: object) -> Path:
    """Return the folder that caches `source` prepared with `settings`; it may not exist yet."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "accelerate-recipes")
    if source.validation_share is not None:
        settings = {**settings, "validation_share": source.validation_share}
    key = json.dumps([source.fingerprint, source.location, source.configuration, settings])
    return root / f"{source.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
