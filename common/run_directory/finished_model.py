"""Finds the folder of a finished model, and checks the digest of its weights."""

import os
from pathlib import Path

from common.errors import UserError
from common.run_directory.model_records import WeightsDigest
from common.run_directory.record_files import read_record
from common.run_directory.records import MODEL_FOLDER, MODEL_JSON
from common.storage.digests import remembered_sha256_of_file
from common.storage.json_files import reading_file_of_run

WEIGHTS = "model.safetensors"  # the file in a finished model's folder, beside MODEL_JSON
# What to do if a file of a finished model is damaged. Its run need not be repeated.
COPY_MODEL = "copy the model's folder again from where it came, or pass another model"


def model_folder(path: str | Path, flag: str = "--init-from ") -> Path:
    """Return the folder of a finished model.

    Args:
        path: a run's directory, or the model's folder itself.
        flag: the flag that names the model, for a message, with a space or "=" at its end.

    Raises:
        UserError: there is no finished model, or its weights have changed since they were written.
    """
    for folder in (Path(path, MODEL_FOLDER), Path(path)):
        if os.path.isfile(folder / WEIGHTS) and os.path.isfile(folder / MODEL_JSON):
            require_written_weights(folder)
            return folder
    advice = "pass the directory of a finished run, such as runs/NAME, or its model folder"
    raise UserError(
        f"there is no finished model ({WEIGHTS} and {MODEL_JSON}) in {flag}{path}", advice=advice
    )


def require_written_weights(folder: Path) -> None:
    """Raise a `UserError` if a model's weights do not have the digest in its `model.json`.

    A `model.json` without a digest is accepted, because a user may have written the file, or may
    have removed the digest to change the weights on purpose.
    """
    path = folder / WEIGHTS
    expected_digest = read_record(folder / MODEL_JSON, WeightsDigest, COPY_MODEL).weights_sha256
    if expected_digest is None:
        return
    with reading_file_of_run(path, COPY_MODEL):
        digest = remembered_sha256_of_file(path)
    if digest != expected_digest:
        mistake = (
            f"{path} has changed since the run wrote it, because its SHA-256 is not the one in "
            f"{MODEL_JSON}"
        )
        advice = (
            "copy the file again from where it came; if you changed the weights yourself, remove "
            f"weights_sha256 from {folder / MODEL_JSON}"
        )
        raise UserError(mistake, advice=advice)
