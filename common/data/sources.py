"""Finds a data set by its name: on the Hub, in a local folder or file, or built in."""

import contextlib
import os
import platform
import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from accelerate import Accelerator

from common.agreement import ask_rank_zero
from common.config import TrainingConfig
from common.data.evaluated import (
    Evaluated,
    TrainedOn,
    is_same_place,
    own_configuration,
    read_evaluated,
)
from common.data.fingerprint import fingerprint_of_files
from common.data.local_files import TABLE_SUFFIXES, find_files
from common.errors import UserError
from common.sentences import reading

# Short names of public data sets: Hub id and configuration.
PUBLIC = {
    "mnist": ("ylecun/mnist", None),
    "cifar10": ("uoft-cs/cifar10", None),
    "sst2": ("nyu-mll/glue", "sst2"),
    "mrpc": ("nyu-mll/glue", "mrpc"),
}
BUILT_IN = ("digits", "docstrings", "synthetic")
# Characters and sequences that `datasets` would take for a pattern or a chain of addresses.
UNUSABLE_IN_PATH = re.compile(r"[*?[\n]|::")


@dataclass(frozen=True)
class DataSource:
    """Where a data set comes from, known before any of it is read."""

    name: str  # short name, for messages and the tables of results
    location: str  # Hub id, absolute folder or file, or the built-in name
    configuration: str | None  # the configuration of a Hub data set
    reason: str  # why the run uses this data set, printed for the user
    fingerprint: str  # changes when the data do
    validation_share: float | None = None  # share of train to hold out without a validation split
    streaming: bool = False  # whether samples are read while training, instead of from a cache
    # Whether one split is read and nothing is held out, because no run was trained on the data.
    is_whole: bool = False
    evaluated: Evaluated | None = None  # the model of a run that only evaluates


def choose_source(
    config: TrainingConfig,
    accelerator: Accelerator,
    *,
    public: str,
    built_in: str,
    public_on_cpu: bool,
) -> DataSource:
    """Find the data set that `--dataset` names, on rank 0 for all ranks.

    A data set that the user names is never replaced by another. For ``auto``, the recipe chooses.

    Args:
        public: the short name of the recipe's public data set; ``auto`` means this data set if it
            is cached or the Hub answers.
        built_in: the built-in data set that ``auto`` means otherwise.
        public_on_cpu: whether ``auto`` may mean the public data set on a CPU.

    Raises:
        UserError: there is no such data set, or the flags contradict each other.
    """
    configuration = own_configuration(config)

    def choose() -> DataSource:
        if config.dataset != "auto":
            return find_named(config.dataset, configuration, config.resume is not None)
        if accelerator.device.type == "cpu" and not public_on_cpu:
            return built_in_source(built_in, f"auto: {public} would take hours without a GPU")
        location, public_configuration = PUBLIC[public]
        commit = hub_commit(location)
        if commit:
            reason = "auto: from the Hub"
            # The commit serves as the fingerprint.
            return DataSource(public, location, public_configuration, reason, commit)
        reason = f"auto: {public} is not cached, the Hub does not answer"
        return built_in_source(built_in, reason)

    source = ask_rank_zero(choose)
    if config.streaming and source.location in BUILT_IN:
        raise UserError(
            f"--streaming reads files, but data set {source.name} is built in",
            advice="pass --no-streaming",
        )
    source = replace(source, validation_share=config.validation_share, streaming=config.streaming)
    if not config.evaluate_only:
        return source
    assert config.init_from is not None  # `--evaluate-only` is refused without it
    return for_evaluation(source, config.init_from)


def for_evaluation(source: DataSource, model: str) -> DataSource:
    """Return a data set as it must be read to evaluate a model.

    If a run trained on the data to make this model, only what that run held out is evaluated. Else
    one split is evaluated as a whole.

    Args:
        model: the value of `--init-from`.

    Raises:
        UserError: the flags hold out a different share from the run's. The model would be evaluated
            on its training samples.
    """
    evaluated = read_evaluated(model)
    for trained in evaluated.trained_on:
        # `config.json` may have the short name of a public data set, and `source` has its Hub id.
        location, public_configuration = PUBLIC.get(trained.dataset, (trained.dataset, None))
        resolved = replace(
            trained,
            dataset=location,
            configuration=trained.configuration or public_configuration,
        )
        if not is_same_place(resolved, source.location, source.configuration):
            continue
        insist_on_trained_share(source.validation_share, trained)
        return replace(
            source,
            validation_share=trained.validation_share,
            evaluated=replace(evaluated, trained_on=(trained,)),
        )
    return replace(source, is_whole=True, validation_share=None, evaluated=evaluated)


def insist_on_trained_share(share: float | None, trained: TrainedOn) -> None:
    """Raise a UserError if the share to hold out differs from the trained run's.

    Args:
        share: the value of `--validation-share`. If it is None, the trained run's share is used.
        trained: the data on which the run trained.
    """
    if share is None or share == trained.validation_share:
        return
    if trained.validation_share is None:
        trained_with = "without this flag"
    else:
        trained_with = f"with --validation-share {trained.validation_share:g}"
    raise UserError(
        (
            f"--validation-share {share:g} would evaluate training samples, because {trained.run} "
            f"was trained on this data set {trained_with}"
        ),
        advice="leave --validation-share out",
    )


def built_in_source(name: str, reason: str) -> DataSource:
    """Return the source of a built-in data set."""
    # Docstrings change with the version of Python, digits and synthetic images do not.
    version = platform.python_version() if name == "docstrings" else "1"
    # Raise the 5 whenever these data are made in a different way, so that no old cache is used.
    return DataSource(name, name, None, reason, f"{name}-5-{version}")


def find_named(name: str, configuration: str | None, is_resumed: bool = False) -> DataSource:
    """Find the data set that the user names.

    Args:
        name: a built-in or public name, a Hub id, or a path to a folder or file.
        configuration: the value of `--dataset-config`.
        is_resumed: whether the data set is that of a run to resume, which accepts no other.

    Raises:
        UserError: there is no such data set; the message says what to pass.
    """
    if name in BUILT_IN:
        return built_in_source(name, "named, built in")
    if "://" in name or not name:  # the message leaves the name out: it may hold a token
        raise UserError(
            "--dataset is empty or a web address",
            advice="pass a name, a Hub id, or a local folder or file",
        )
    with reading(f"--dataset {name}", "check the path, and whether your user may read it"):
        source = find_local(name, configuration)
    if source is not None:
        return source
    location, public_configuration = PUBLIC.get(name, (name, None))
    commit = hub_commit(location)
    if commit:
        return DataSource(
            name, location, configuration or public_configuration, "named, from the Hub", commit
        )
    raise UserError(
        (
            f"--dataset {name} can't be found, because there is no such folder or file, it is not "
            f"cached, and the Hub has no data set {location} or does not answer"
        ),
        advice=advice_for_resume(name) if is_resumed else advice_for_missing(name),
    )


def advice_for_resume(name: str) -> str:
    """Return what to do if the data set of a run to resume is not found: its name was right."""
    if is_path(name):
        return "pass the new path of these data with --dataset"
    return (
        "repeat the command when the Hub can be reached, or pass the new path of local data with "
        "--dataset"
    )


def advice_for_missing(name: str) -> str:
    """Return what to do if the data set of a new run is not found."""
    suggestion = similar_name(name)
    similar = "" if suggestion is None else f"{suggestion} if you meant that, "
    others = f"{similar}a local folder or file, or one that is built in ({', '.join(BUILT_IN)})"
    if is_path(name):
        return f"check the spelling, or pass {others}"
    return (
        "check the spelling and the connection, log in with hf auth login or set HF_TOKEN if the "
        f"data set is private, or pass {others}"
    )


def is_path(name: str) -> bool:
    """Whether a data set's name can only be a path; a name such as a/b may also be a Hub id."""
    return name.startswith((".", "~")) or Path(name).is_absolute()


def find_local(name: str, configuration: str | None) -> DataSource | None:
    """Return the data set of a local folder or file; None if there is no such path.

    Raises:
        UserError: the file is not a table, or `datasets` can't read from this path.
        OSError: a folder or file can't be read.
    """
    path = Path(name).expanduser().resolve()
    if not path.exists():
        return None
    is_folder = path.is_dir()
    if not is_folder and not (path.is_file() and path.suffix.lower() in TABLE_SUFFIXES):
        suffixes = ", ".join(TABLE_SUFFIXES)
        raise UserError(
            f"--dataset {name} is not a table",
            advice=f"pass a file whose name ends in one of {suffixes}, or pass a folder",
        )
    if UNUSABLE_IN_PATH.search(str(path)):
        raise UserError(
            f"the path of --dataset {name!r} contains * ? [ :: or a new line",
            advice="rename the file or folder",
        )
    if is_folder:
        fingerprint = fingerprint_of_folder(path)
        short_name = path.name.lower()
        return DataSource(
            short_name, str(path), configuration, "named, a local folder", fingerprint
        )
    fingerprint = fingerprint_of_files({str(path): path.stat()})
    return DataSource(path.stem.lower(), str(path), None, "named, a local file", fingerprint)


def similar_name(name: str) -> str | None:
    """Return a data set that the user may have meant by a wrong name; None if nothing is similar.

    The result is a folder or table beside the path, or a public or built-in name.
    """
    # The name is right, so the Hub could not be reached.
    if name in PUBLIC:
        return None
    parent = Path(name).expanduser().parent
    paths = [str(path) for path in parent.glob("*/")]
    for suffix in TABLE_SUFFIXES:
        paths += [str(path) for path in parent.glob(f"*{suffix}")]
    by_lower_case = {candidate.lower(): candidate for candidate in (*paths, *PUBLIC, *BUILT_IN)}
    matches = get_close_matches(name.lower(), by_lower_case, 1)
    return by_lower_case[matches[0]] if matches else None


def fingerprint_of_folder(folder: Path) -> str:
    """Return a digest that changes with the files under a folder.

    Raises:
        OSError: a folder or file can't be read.
    """
    return fingerprint_of_files(find_files(folder).files)


def hub_commit(
    hub_id: str, repository_type: Literal["datasets", "models"] = "datasets"
) -> str | None:
    """Return the current commit of a Hub repository.

    The Hub is asked for at most 3 s. If it does not answer, the local cache may know a commit.

    Returns:
        None if neither the Hub nor the cache knows a commit.
    """
    from huggingface_hub import HfApi, constants

    # If the Hub can't be reached, or lacks the repository, only the cache remains to look at.
    with contextlib.suppress(Exception):
        # The Hub's interface takes "dataset" or "model", and the cache's folders have the plural.
        return HfApi().repo_info(hub_id, repo_type=repository_type.removesuffix("s"), timeout=3).sha
    folder = f"{repository_type}--{hub_id.replace('/', '--')}"
    reference = Path(constants.HF_HUB_CACHE, folder, "refs", "main")
    return reference.read_text(encoding="utf-8").strip() if os.path.isfile(reference) else None
