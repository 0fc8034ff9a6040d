"""Finds a data set by its name: on the Hub, in a local folder or file, or built in."""

import platform
import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from accelerate import Accelerator

from common.config import TrainingConfig
from common.data.evaluated_model.model import EvaluatedModel, read_evaluated_model
from common.data.evaluated_model.training_data import TrainedOn, is_same_place, own_configuration
from common.data.versions.fingerprint import fingerprint_of_files
from common.data.versions.hub_commits import hub_commit
from common.data.versions.local_files import TABLE_SUFFIXES, find_files
from common.errors import UserError
from common.failures.sentences import reading
from common.ranks.agreement import ask_rank_zero

# Public data sets by their short names: the id and the configuration on the Hub.
PUBLIC = {
    "mnist": ("ylecun/mnist", None),
    "cifar10": ("uoft-cs/cifar10", None),
    "sst2": ("nyu-mll/glue", "sst2"),
    "mrpc": ("nyu-mll/glue", "mrpc"),
}
BUILT_IN = ("digits", "docstrings", "synthetic")
# Characters and sequences that a path must not have, because `datasets` would take it for a pattern
# or a chain of addresses.
UNUSABLE_IN_PATH = re.compile(r"[*?[\n]|::")


@dataclass(frozen=True)
class DataSource:
    """Where a data set comes from and how it is read, known before any sample is read."""

    name: str  # short name, for messages and the tables of results
    location: str  # Hub id, absolute folder or file, or the built-in name
    configuration: str | None  # the value of `--dataset-config`, or that of a public data set
    reason: str  # why the run uses this data set, printed for the user
    fingerprint: str  # a text that changes when the data do, so that no old cache is used
    # The share of train that becomes the validation split if there is none; None: a default.
    validation_share: float | None = None
    streaming: bool = False  # whether samples are read while training, instead of from a cache
    # Whether a run that only evaluates reads one split as a whole and holds nothing out, because no
    # known run of its model was trained on the data.
    is_whole: bool = False
    # The model of a run that only evaluates; None: the run trains.
    evaluated: EvaluatedModel | None = None


def choose_source(
    config: TrainingConfig,
    accelerator: Accelerator,
    *,
    public: str,
    built_in: str,
    public_on_cpu: bool,
) -> DataSource:
    """Find the data set that `--dataset` names, on rank 0 for all ranks.

    A data set that the user names is never replaced by another. For ``auto``, the arguments of the
    recipe decide. With ``--evaluate-only``, the result also states which samples are evaluated: see
    `for_evaluation`.

    Args:
        public: the short name of the recipe's public data set. ``auto`` means this data set if it
            is cached or the Hub answers.
        built_in: the built-in data set that ``auto`` means in all other cases.
        public_on_cpu: whether ``auto`` may mean the public data set on a CPU.

    Raises:
        UserError: there is no such data set, or the flags contradict each other. It is raised on
            all ranks.
    """
    configuration = own_configuration(config)
    may_use_public = public_on_cpu or accelerator.device.type != "cpu"

    def choose() -> DataSource:
        if config.dataset == "auto":
            return automatic_source(public, built_in, may_use_public)
        return find_named(config.dataset, configuration, config.resume is not None)

    source = ask_rank_zero(choose)
    if config.streaming and source.location in BUILT_IN:
        raise UserError(
            f"--streaming reads files, but data set {source.name} is built in ({source.reason})",
            advice="pass --dataset with a folder of parquet files, or --no-streaming",
        )
    source = replace(source, validation_share=config.validation_share, streaming=config.streaming)
    if not config.evaluate_only:
        return source
    assert config.init_from is not None  # `--evaluate-only` is refused without it
    return for_evaluation(source, config.init_from)


def automatic_source(public: str, built_in: str, may_use_public: bool) -> DataSource:
    """Return the data set that ``--dataset auto`` means.

    Args:
        public: the short name of the recipe's public data set.
        built_in: the built-in data set that takes its place.
        may_use_public: whether the public data set may be taken on this device.
    """
    if not may_use_public:
        reason = (
            f"auto: on a CPU, this recipe trains on {built_in}; for {public}, pass --dataset "
            f"{public}"
        )
        return built_in_source(built_in, reason)
    source = source_on_hub(public, configuration=None, reason="auto: from the Hub")
    if source is not None:
        return source
    reason = f"auto: {public} is not cached, and the Hub does not answer"
    return built_in_source(built_in, reason)


def for_evaluation(source: DataSource, model: str) -> DataSource:
    """Return a data set as it must be read to evaluate a model.

    A model's history is its training run, the run of its initial weights, and so on. If a run of
    this history trained on the data, only the samples that this training run held out are
    evaluated. Otherwise, one split is evaluated as a whole, unless `unseen_samples.prepare_whole`
    recognises a copy of training data.

    Args:
        model: the value of `--init-from`.

    Raises:
        UserError: `--validation-share` differs from that of the training run, so the model would be
            evaluated on its training samples; or the model can't be read.
    """
    evaluated = read_evaluated_model(model)
    for trained in evaluated.trained_on:
        # `config.json` may have the short name of a public data set. `source` has its Hub id, so
        # replace the name by the id before they are compared.
        location, public_configuration = place_on_hub(trained.dataset)
        resolved = replace(
            trained,
            dataset=location,
            configuration=trained.configuration or public_configuration,
        )
        if not is_same_place(resolved, source.location, source.configuration):
            continue
        require_trained_share(source.validation_share, trained)
        return replace(
            source,
            validation_share=trained.validation_share,
            evaluated=replace(evaluated, trained_on=(trained,)),
        )
    return replace(source, is_whole=True, validation_share=None, evaluated=evaluated)


def require_trained_share(share: float | None, trained: TrainedOn) -> None:
    """Raise a `UserError` if the share to hold out differs from that of the model's run.

    With another share, samples on which the model was trained would be evaluated.

    Args:
        share: the value of `--validation-share`; None: the run's share is used, which is no error.
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
    """Return the source of a built-in data set.

    Args:
        reason: why the run uses this data set, printed for the user.
    """
    # Only the docstrings change with the version of Python.
    version = platform.python_version() if name == "docstrings" else "1"
    # Raise the 5 whenever these data are made in a different way, so that no old cache is used.
    return DataSource(name, name, None, reason, f"{name}-5-{version}")


def find_named(name: str, configuration: str | None, is_resumed: bool = False) -> DataSource:
    """Find the data set that the user names: built in, a local path, or else on the Hub.

    Args:
        name: a built-in name, a short name of `PUBLIC`, a Hub id, or a path to a folder or file.
        configuration: the value of `--dataset-config`; built-in data have none.
        is_resumed: whether a run is resumed, which must have the same data again. This changes the
            advice if they are not found.

    Raises:
        UserError: there is no such data set; the message says what to pass.
    """
    if name in BUILT_IN:
        return built_in_source(name, "named, built in")
    if "://" in name or not name:
        # The message does not repeat the name, because an address may contain a token.
        raise UserError(
            "--dataset is empty or a web address",
            advice="pass a name, a Hub id, or a local folder or file",
        )
    with reading(f"--dataset {name}", "check the path, and whether your user may read it"):
        source = find_local(name, configuration)
    if source is not None:
        return source
    source = source_on_hub(name, configuration, "named, from the Hub")
    if source is not None:
        return source
    hub_id, _ = place_on_hub(name)
    raise UserError(
        (
            f"--dataset {name} can't be found, because there is no such folder or file, it is not "
            f"cached, and the Hub has no data set {hub_id} or does not answer"
        ),
        advice=advice_for_resume(name) if is_resumed else advice_for_missing(name),
    )


def place_on_hub(name: str) -> tuple[str, str | None]:
    """Return the Hub id and the configuration of a short name; any other name has none."""
    return PUBLIC.get(name, (name, None))


def source_on_hub(name: str, configuration: str | None, reason: str) -> DataSource | None:
    """Return the source of a data set on the Hub; None if neither the Hub nor the cache has it.

    Args:
        name: a short name of `PUBLIC`, or a Hub id.
        configuration: the value of `--dataset-config`; None: that of `PUBLIC`, if any.
        reason: why the run uses this data set, printed for the user.
    """
    hub_id, public_configuration = place_on_hub(name)
    commit = hub_commit(hub_id)
    if not commit:
        return None
    return DataSource(name, hub_id, configuration or public_configuration, reason, commit)


def advice_for_resume(name: str) -> str:
    """Return what to do if the data set of a run to resume is not found.

    Its name was right at the first start, so it can't be misspelled.
    """
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

    Args:
        name: a path, relative or absolute; ~ is the user's folder.
        configuration: the value of `--dataset-config`; not used for a file.

    Raises:
        UserError: the file is not a table, or the absolute path has characters that `datasets`
            misreads.
        OSError: a folder or file can't be read.
    """
    path = Path(name).expanduser().resolve()
    if not path.exists():
        return None
    is_folder = path.is_dir()
    if not is_folder and not (path.is_file() and path.suffix.lower() in TABLE_SUFFIXES):
        suffixes = ", ".join(TABLE_SUFFIXES)
        raise UserError(
            f"--dataset {name} has a format that can't be read",
            advice=f"pass a file whose name ends in one of {suffixes}, or a folder of data",
        )
    unusable = UNUSABLE_IN_PATH.search(str(path))
    if unusable is not None:
        raise UserError(
            f"the path of --dataset {name!r} contains {unusable[0]!r}, which can't be used there",
            advice="rename the file or folder whose name contains it",
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

    The result is a folder or table in the folder in which the path was expected, or a public or
    built-in name.
    """
    if name in PUBLIC:  # the name is right, but the Hub could not be reached
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
