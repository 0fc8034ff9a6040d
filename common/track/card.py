"""The model card: the `README.md` of a run's `model` folder, ready for `hf upload`."""

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from common.config import TrainingConfig
from common.data.dataset import Data
from common.flags import role_of, value_from_json, words_of_flag
from common.measure.memory import peak_memory
from common.metric_names import THROUGHPUT, TRAINING_SECONDS
from common.objective import PREFIXES, Split
from common.run_directory.records import Flags, RunConfig
from common.system.platforms.commands import command_line
from common.track.names import PEAK, metric_named, precision_name

# The Hub's name of a task, by a key that only the descriptions of models of that task have.
TASK_BY_DESCRIPTION_KEY = {
    "max_length": "text-classification",
    "image_size": "image-classification",
}
PREDICT = "recipes predict FOLDER"
CARD_METRICS = (THROUGHPUT, TRAINING_SECONDS)


def model_card(
    config: TrainingConfig,
    run_config: RunConfig,
    description: Mapping[str, object],
    data: Data,
    split: Split,
    summary: Mapping[str, float],
) -> str:
    """Return a model's card as Markdown, with nothing private in it.

    The card is made to be published, so it names no folders of this machine, no runs and no notes.

    Args:
        config: the flags.
        run_config: the contents of `config.json`.
        description: the facts about the model that its folder keeps.
        data: the data set that the recipe's `load_data` returned.
        split: the split of the final evaluation, "validation" or "test".
        summary: the contents of `summary.json`.
    """
    name = description["name"]
    environment = run_config.environment
    task = task_of(description)
    sizes = ", ".join(
        f"{split_name} {size:,}" for split_name, size in run_config.data.sizes.items()
    )
    versions = ", ".join(
        f"{package} {version}" for package, version in environment.versions.items()
    )
    input_file = "FILE.txt" if task == "text-classification" else "IMAGE.png"
    metadata = card_metadata(run_config, description, data, split, summary, task)
    lines = (
        f"---\n{metadata}\n---\n\n# {name}\n",
        f"Trained by the recipe `{run_config.recipe}` on {data.name}: {sizes}.",
        *(f"- {note}" for note in data.notes),
        f"\n| one run, seed {config.seed} | |\n|---|--:|",
        *(f"| {heading} | {value} |" for heading, value in result_rows(split, summary)),
        f"\nFlags: `{flags_on_card(config, run_config.given_flags)}`\n",
        f"Hardware: {environment.device}, {environment.world_size} × "
        f"{precision_name(environment.mixed_precision)}, effective batch "
        f"{environment.effective_batch_size}; python {environment.python}, {versions}; "
        f"commit {environment.git_commit or 'unknown'}.",
        f"\nTo use it:\n\n```bash\n{PREDICT} {input_file}\n```\n" if task else "",
    )
    return "\n".join(lines)


def task_of(description: Mapping[str, object]) -> str | None:
    """Return the Hub's name of a model's task; None if the task has none.

    The card of a model without such a name has no results in its metadata, and no command.
    """
    for key, task in TASK_BY_DESCRIPTION_KEY.items():
        if key in description:
            return task
    return None


def metrics_of_split(split: Split, summary: Mapping[str, float]) -> list[str]:
    """Return the names of the split's metrics that have a chart: all but the number of samples."""
    prefix = f"{PREFIXES[split]}/"
    return [name for name in summary if name.startswith(prefix) and metric_named(name).panel]


def card_metadata(
    run_config: RunConfig,
    description: Mapping[str, object],
    data: Data,
    split: Split,
    summary: Mapping[str, float],
    task: str | None,
) -> str:
    """Return the YAML block by which the Hub lists a model: its task, data set and results."""
    from huggingface_hub import EvalResult, ModelCardData

    location = data.name if data.source is None else data.source.location
    # The path of a local folder is absolute, and private. So the card has the data's name instead.
    # The location of a data set on the Hub is its id.
    dataset_id = data.name if Path(location).is_absolute() else Path(location).as_posix()
    results = [
        EvalResult(
            task_type=task,
            dataset_type=dataset_id,
            dataset_name=data.name,
            dataset_split=split,
            metric_type=name.rpartition("/")[2],
            metric_value=summary[name],
        )
        for name in metrics_of_split(split, summary)
        if task is not None and math.isfinite(summary[name])  # the Hub takes no NaN
    ]
    metadata = ModelCardData(
        model_name=description["name"],
        eval_results=results or None,
        # The Hub names a data set OWNER/NAME.
        datasets=[dataset_id] if "/" in dataset_id else None,
        pipeline_tag=task,
        # Only a model of Transformers comes with files, such as its tokenizer's.
        library_name="transformers" if "files" in description else None,
        tags=["accelerate", run_config.recipe],
    )
    return metadata.to_yaml()


def result_rows(split: Split, summary: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the heading and the value of each row of the card's table of results."""
    rows = []
    for name in metrics_of_split(split, summary):
        metric = metric_named(name)
        rows.append((f"{metric.heading}, {split}", metric.text(summary[name])))
    for name in CARD_METRICS:
        metric = metric_named(name)
        rows.append((metric.heading, metric.text(summary.get(name))))
    peak = metric_named(PEAK)
    rows.append((peak.heading, peak.text(peak_memory(summary))))
    return rows


def flags_on_card(config: TrainingConfig, given_flags: Flags) -> str:
    """Return a run's flags as on a command line, in a form that can be published.

    Flags on which no result depends are left out, and local paths are cut to their last name. See
    `flags_as_text` for the rest.
    """
    words: list[str] = []
    for name, value in non_default_flags(config, given_flags).items():
        if role_of(type(config), name).compared:
            flag_word, *value_words = words_of_flag(type(config), name, value)
            words += [flag_word, *map(without_folder, value_words)]
    return command_line(words) or "none"


def flags_as_text(config: TrainingConfig, given_flags: Flags) -> str:
    """Return a run's flags as on a command line; "none" if all of them have their defaults.

    The text is in `config.json`. Flags at their defaults are left out.

    Args:
        config: the recipe's flags, for their names, defaults and roles.
        given_flags: the values before anything resolved `auto`, by name.
    """
    words: list[str] = []
    for name, value in non_default_flags(config, given_flags).items():
        words += words_of_flag(type(config), name, value)
    return command_line(words) or "none"


def non_default_flags(config: TrainingConfig, given_flags: Flags) -> dict[str, object]:
    """Return the flags that do not have their defaults; see `flags_as_text` for the arguments."""
    changed: dict[str, object] = {}
    for field in fields(config):
        value = value_from_json(given_flags.get(field.name, field.default))
        if value != field.default:
            changed[field.name] = value
    return changed


def without_folder(text: str) -> str:
    """Return the last name of a local path; any other text, such as a Hub id, stays whole."""
    # A path of another machine, or one that is gone by now, is recognised by its beginning.
    looks_local = text.startswith((".", "~", "/", "runs/", "runs\\")) or Path(text).is_absolute()
    is_local_path = looks_local or Path(text).exists()
    # Windows may separate folders by backslashes, which `as_posix` turns into slashes.
    has_folder = "/" in text or "/" in Path(text).as_posix()
    return Path(text).name if is_local_path and has_folder else text
