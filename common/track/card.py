"""The model card: `README.md` of a `model` folder, so that `hf upload` is all publishing takes."""

from dataclasses import fields
from pathlib import Path

from common.config import TrainingConfig
from common.data.batch import Data
from common.flags import role_of, spelled
from common.measure.memory import peak_memory
from common.objective import PREFIXES
from common.platforms import command_line
from common.records import Flags, RunConfig
from common.track.names import PEAK, Facts, describe, precision_name

TASKS = {"max_length": "text-classification", "image_size": "image-classification"}
USE = "recipes predict FOLDER"
OF_THE_RUN = ("perf/samples_per_second", "time/train_seconds")


def model_card(
    config: TrainingConfig,
    run: RunConfig,
    description: Facts,
    data: Data,
    split: str,
    summary: Facts,
) -> str:
    """Return a model's card, without folders of this machine, names of runs and notes."""
    from huggingface_hub import EvalResult, ModelCardData

    name = description["name"]
    environment = run.environment
    own = [n for n in summary if n.startswith(f"{PREFIXES[split]}/") and describe(n).panel]
    task = next((task for fact, task in TASKS.items() if fact in description), None)
    place = Path(data.source.location if data.source is not None else data.name)
    location = data.name if place.is_absolute() else str(place)  # a Hub id has a slash
    results = [
        EvalResult(
            task_type=task,
            dataset_type=location,
            dataset_name=data.name,
            dataset_split=split,
            metric_type=n.rpartition("/")[2],
            metric_value=summary[n],
        )
        for n in own
        if task is not None and summary[n] is not None
    ]
    metadata = ModelCardData(
        model_name=name,
        eval_results=results or None,
        datasets=[location] if "/" in location else None,
        pipeline_tag=task,
        library_name="transformers" if "files" in description else None,
        tags=["accelerate", run.recipe],
    )
    sizes = ", ".join(f"{split} {size:,}" for split, size in run.data.sizes.items())
    figures = [(f"{describe(n).heading}, {split}", describe(n).text(summary[n])) for n in own]
    figures += [(describe(n).heading, describe(n).text(summary.get(n))) for n in OF_THE_RUN]
    figures += [(describe(PEAK).heading, describe(PEAK).text(peak_memory(summary)))]
    versions = ", ".join(f"{package} {v}" for package, v in environment.versions.items())
    word = "FILE.txt" if task == "text-classification" else "IMAGE.png"
    lines = (
        f"---\n{metadata.to_yaml()}\n---\n\n# {name}\n",
        f"Trained by the recipe `{run.recipe}` on {data.name}: {sizes}.",
        *(f"- {note}" for note in data.notes),
        "\n| one run, seed " + str(config.seed) + " | |\n|---|--:|",
        *(f"| {label} | {value} |" for label, value in figures),
        f"\nFlags: `{flags_given(config, run.given)}`\n",
        f"Hardware: {environment.device}, {environment.world_size} × "
        f"{precision_name(environment.mixed_precision)}, effective batch "
        f"{environment.effective_batch_size}; python {environment.python}, {versions}; "
        f"commit {environment.git_commit or 'unknown'}.",
        f"\nTo use it:\n\n```bash\n{USE} {word}\n```\n" if task else "",
    )
    return "\n".join(lines)


def flags_given(config: TrainingConfig, given: Flags, all_of_them: bool = False) -> str:
    """Return the flags of a run: those that its figures depend on, without folders, or all."""
    words: list[str] = []
    for field in fields(config):
        value = given.get(field.name, field.default)
        is_wanted = all_of_them or role_of(type(config), field.name).compared
        if value == field.default or not is_wanted:
            continue
        if isinstance(value, bool):
            words.append(spelled(field.name if value else f"no_{field.name}"))
        else:
            items = value if isinstance(value, list | tuple) else [value]
            shown = str if all_of_them else without_folder
            words += [spelled(field.name), *(shown(str(item)) for item in items)]
    return command_line(words) or "none"


def without_folder(text: str) -> str:
    """Return the last name of a path that is of this machine; a Hub id stays whole."""
    is_here = text.startswith((".", "~", "/", "runs")) or Path(text).exists()
    return Path(text).name if is_here and "/" in text else text
