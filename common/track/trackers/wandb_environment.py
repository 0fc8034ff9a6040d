"""How the user's environment sets up W&B: online or offline, and the folder for its files."""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from common.console import warn
from common.track.trackers.tracker import TrackerSettingsError

if TYPE_CHECKING:  # a run imports only its own tracker
    import wandb

MAX_VALUE_LENGTH = 64  # characters of a rejected variable's value that an error shows
# Bytes written to a folder to see whether it takes W&B's files. A full disk may take an empty file.
PROBE_BYTES = 2**16
SERVER_SECONDS = 5.0  # time for the server to accept a connection, and again to answer


def wandb_mode() -> tuple[str, str]:
    """Return W&B's mode, and the reason for it to print.

    The mode is the variable WANDB_MODE, if the user has set it. Otherwise it is "online" if the
    server knows the user's key, else "offline". The server is asked here, so that W&B neither
    prompts for a key nor waits for a server that is out of reach.

    Raises:
        TrackerSettingsError: a `WANDB_*` variable has a value that W&B does not accept.
    """
    import requests

    settings = wandb_settings()
    chosen_mode = os.environ.get("WANDB_MODE")
    if chosen_mode:
        return chosen_mode, "by WANDB_MODE"
    netrc_auth = requests.utils.get_netrc_auth(settings.base_url)
    key = os.environ.get("WANDB_API_KEY")
    auth = ("api", key) if key else netrc_auth
    if auth is None:
        return "offline", "no API key"
    try:
        response = requests.post(
            f"{settings.base_url}/graphql",
            json={"query": "query Viewer { viewer { id } }"},
            auth=auth,
            headers=settings.x_extra_http_headers,
            timeout=SERVER_SECONDS,
        )
    except requests.RequestException:
        return "offline", "the server does not answer"
    if not response.ok:
        return "offline", f"the server answers {response.status_code} {response.reason}"
    with contextlib.suppress(ValueError, KeyError, TypeError):
        if response.json()["data"]["viewer"]["id"]:
            return "online", str(settings.base_url)
    return "offline", "the server does not know the key"


def wandb_settings() -> "wandb.Settings":
    """Return W&B's settings, which `WANDB_*` variables may change.

    Raises:
        TrackerSettingsError: a `WANDB_*` variable has a value that W&B does not accept.
    """
    import wandb
    from pydantic import ValidationError  # wandb's settings are a pydantic model

    try:
        return wandb.setup(wandb.Settings(silent=True)).settings
    except ValidationError as problem:
        error = problem.errors()[0]
        variable = "_".join(["WANDB", *map(str, error["loc"])]).upper()
        # A rejected key must not be shown.
        value = "" if "KEY" in variable else f"={str(error['input'])[:MAX_VALUE_LENGTH]!r}"
        raise TrackerSettingsError(
            f"W&B rejects {variable}{value}: {error['msg']}", f"correct or unset {variable}"
        ) from None
    except wandb.Error as problem:  # a malformed key, which the message does not repeat
        raise TrackerSettingsError(
            f"W&B rejects a WANDB_* variable ({problem})",
            "correct or unset WANDB_API_KEY, or log in with wandb login",
        ) from None


def wandb_folder(directory: Path) -> Path:
    """Return the folder for W&B's files: WANDB_DIR, or the run's directory.

    The run's directory is used if WANDB_DIR is not set, or with a warning if it can't be written.
    """
    chosen_folder = os.environ.get("WANDB_DIR")
    if not chosen_folder:
        return directory
    try:
        Path(chosen_folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=chosen_folder) as file:
            file.write(bytes(PROBE_BYTES))
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else None
        cause = reason or problem
        warn(f"WANDB_DIR {chosen_folder} can't be written ({cause}), so W&B writes to {directory}")
        return directory
    return Path(chosen_folder)
