"""Finds the weights that `--init-from` names, and reads their facts and shapes.

The flag names a finished run, a folder or file of weights, or a model of the Hub.
"""

import contextlib
import functools
import os
import re
from pathlib import Path

from pydantic import ValidationError

from common.errors import UserError
from common.failures.sentences import reading
from common.ranks.agreement import ask_rank_zero
from common.run_directory.finished_model import (
    COPY_MODEL,
    WEIGHTS,
    model_folder,
    require_written_weights,
)
from common.run_directory.model_records import InitialFacts, PublishedSettings
from common.run_directory.record_files import mistake_in_words, read_record_if_there
from common.run_directory.records import MODEL_FOLDER, MODEL_JSON, STATUS
from common.storage.json_files import json_safe, read_json_if_there
from common.system.platforms.commands import quoted

PUBLISHED = "config.json"  # the file that timm publishes beside weights: how they were trained


@functools.cache
def find_initial(name: str) -> str:
    """Return the path of the folder or file that `--init-from` names.

    If the name is the id of a model of the Hub, rank 0 downloads the model first, and then each
    rank whose machine has another cache. Any other name is returned unchanged. If nothing is there,
    `weights_file` raises the error.

    All ranks must call this function. The result is cached, so that further calls with the same
    name need neither the other ranks nor the Hub.

    Raises:
        UserError: if the model can't be downloaded; on all ranks, if rank 0 can't download it.
    """

    def download_if_id() -> str:
        # The id of a model of the Hub has the form OWNER/NAME. A path such as runs/NAME has this
        # form, too. So a name is no id if its first part is a folder here.
        looks_like_id = re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None
        is_id = looks_like_id and not os.path.isdir(Path(name).parent)
        if os.path.exists(name) or not is_id:
            return name
        from huggingface_hub import snapshot_download

        subject = (
            f"--init-from {name} is neither a file nor a folder here, and as a model of the Hub, it"
        )
        advice = (
            "check the spelling, the connection and HF_TOKEN, or pass a finished run, or a folder "
            "or file of weights"
        )
        with reading(subject, advice):
            return snapshot_download(name, allow_patterns=[WEIGHTS, PUBLISHED])

    path = ask_rank_zero(download_if_id)
    # A rank on another machine may have a cache of its own, which lacks the model.
    return path if os.path.exists(path) else download_if_id()


def weights_file(path: str | Path) -> Path:
    """Return the safetensors file that `--init-from` names.

    Args:
        path: the file itself, a run, a model's folder, or the id of a model of the Hub.

    Raises:
        UserError: there is no such file, or a run's weights have changed since it wrote them.
    """
    local_path = Path(find_initial(str(path)))
    if os.path.isfile(local_path):
        # If this file is that of a finished model, compare it with its digest.
        if local_path.name == WEIGHTS and os.path.isfile(local_path.with_name(MODEL_JSON)):
            require_written_weights(local_path.parent)
        return local_path
    names = os.listdir(local_path) if os.path.isdir(local_path) else []
    # A finished BERT has such a file, too, but also the digest of its weights.
    if PUBLISHED in names and WEIGHTS in names and MODEL_JSON not in names:
        return local_path / WEIGHTS
    # The path is a run or a finished model's folder. With `path` instead of `local_path`, an error
    # shows what the user typed.
    return model_folder(path) / WEIGHTS


def initial_facts(name: str | None) -> InitialFacts:
    """Return the facts about the model that `--init-from` names.

    The run scales its images as these facts say, and it compares the classes with its own. The
    facts are empty for a single file of weights, and if the flag is not set.

    Args:
        name: a file, a run, a model's folder, or the id of a model of the Hub; None without the
            flag.

    Raises:
        UserError: there are no such weights, or the facts can't be read.
    """
    if name is None or os.path.isfile(name):
        return InitialFacts()
    folder = weights_file(name).parent
    facts_of_run = read_record_if_there(folder / MODEL_JSON, InitialFacts, COPY_MODEL)
    if facts_of_run is not None:
        return facts_of_run
    return published_facts(folder)


def describe_local_weights(name: str) -> str:
    """Return the update and the run that local weights come from, such as "of update 120".

    The run is named by its id if the path is not that of the run itself. The text is empty if the
    weights do not say it.

    Args:
        name: the value of `--init-from`.
    """
    path = Path(name)
    folders = [path.parent] if path.name == WEIGHTS else [path / MODEL_FOLDER, path]
    facts = InitialFacts()
    with contextlib.suppress(UserError):  # the code that loads the weights reports it
        records = (read_record_if_there(folder / MODEL_JSON, InitialFacts) for folder in folders)
        facts = next(filter(None, records), facts)
    if not isinstance(facts.update, int):
        return ""
    # A model that Transformers loads has a `config.json` of its own, but no `status.json`.
    is_run = os.path.isfile(path / STATUS)
    has_id = isinstance(facts.run_id, str)
    of_run = f" of run {facts.run_id}" if has_id and not is_run else ""
    return f"of update {facts.update:,}{of_run}"


def published_facts(folder: Path) -> InitialFacts:
    """Return the scaling and the size of images that timm publishes beside weights.

    Args:
        folder: the folder of the weights and of `PUBLISHED`.

    Raises:
        UserError: the file can't be read, or lacks these facts.
    """
    path = folder / PUBLISHED
    advice = f"pass --init-from {quoted(folder / WEIGHTS)}"  # the weights without these facts
    published = read_json_if_there(path, advice) or {}
    entries = published.get("pretrained_cfg")
    if not isinstance(entries, dict):  # some files have no such level
        entries = published
    try:
        settings = PublishedSettings.model_validate(json_safe(entries))
    except ValidationError as problem:
        mistake = mistake_in_words(problem.errors()[0])
        raise UserError(
            f"{path} does not describe images as timm's files do ({mistake})", advice=advice
        ) from None
    channels, height, _ = settings.input_size
    return InitialFacts(
        mean=settings.mean, std=settings.std, channels=channels, published_size=height
    )


def initial_shapes(path: str | None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that `--init-from` names, by weight; empty without it.

    A recipe can build a model that these weights fit. `recipes/resnet.py` gets the size of its
    first kernel from them.
    """
    from safetensors import safe_open

    if path is None:
        return {}
    file = weights_file(path)
    with (
        reading(str(file), "copy the file again from where it came, or pass other weights"),
        safe_open(file, framework="pt") as weights,
    ):
        return {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
