"""Asks the Hugging Face Hub, or its local cache, for the version of a repository."""

import contextlib
import os
from pathlib import Path
from typing import Literal


def hub_commit(
    hub_id: str, repository_type: Literal["datasets", "models"] = "datasets"
) -> str | None:
    """Return the current commit of a Hub repository.

    The commit is the fingerprint of a data set of the Hub. Callers also use it to find out whether
    a data set or a model can be loaded.

    The Hub has 3 s to answer. If it does not answer or does not have the repository, the commit is
    that of the local cache.

    Returns:
        None if neither the Hub nor the cache has a commit.
    """
    from huggingface_hub import HfApi, constants

    # Any error of the Hub leads to the cache, which the lines below look up.
    with contextlib.suppress(Exception):
        # The Hub's interface takes the singular, "dataset" or "model". The names of the cache's
        # folders have the plural.
        return HfApi().repo_info(hub_id, repo_type=repository_type.removesuffix("s"), timeout=3).sha
    folder = f"{repository_type}--{hub_id.replace('/', '--')}"
    reference = Path(constants.HF_HUB_CACHE, folder, "refs", "main")
    return reference.read_text(encoding="utf-8").strip() if os.path.isfile(reference) else None
