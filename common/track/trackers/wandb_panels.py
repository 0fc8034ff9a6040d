"""Panels of a W&B run besides curves: tables of results, memory, the profile and the model."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from common.data.dataset import Data
from common.data.image_batches.image_samples import CachedImages, ImageSamples
from common.data.loader import Loader
from common.data.order import EvaluationOrder
from common.data.samples import Samples
from common.data.text import CachedText, TextData
from common.measure.classification import Classified
from common.measure.memory_plan import MemoryRows
from common.measure.value_checks import Metrics

if TYPE_CHECKING:  # only runs with W&B import wandb
    import wandb
    from wandb.plot import CustomChart

    Panel = wandb.Table | CustomChart | list[wandb.Image]

MAX_CLASSES = 40  # classes in a matrix; with more, a table lists the most confused pairs
MAX_PAIRS = 100  # rows of that table
# The columns of a confusion table, with the names that W&B's chart of a confusion matrix expects.
CONFUSION_COLUMNS = "Actual Predicted nPredictions"
MAX_MISTAKES = 32  # rows of the table of mistakes


class MistakenSample(NamedTuple):
    """A sample that the model takes for another class; the fields are the columns of a table."""

    sample: int  # its number in the split
    file: str | None
    content: "wandb.Image | str"  # the image or the text
    label: str  # the name of its class
    prediction: str  # the name of the predicted class
    probability: float  # the probability of the predicted class


def show_results(
    wandb_run: "wandb.Run",
    evaluation: Metrics,
    prefix: str,
    loader: Loader,
    data: Data,
    memory: MemoryRows,
) -> None:
    """Put tables of the final evaluation and of memory into the W&B run's summary.

    If a table is logged with the metrics, W&B charts its number of rows. In the summary, W&B shows
    the table itself.

    See `Tracker.log_results` for the arguments after the W&B run.
    """
    import wandb

    panels: dict[str, Panel] = {}
    if isinstance(evaluation, Classified):
        if evaluation.confusion is not None:
            if len(evaluation.class_names) > MAX_CLASSES:
                table = most_confused_pairs(evaluation.confusion, evaluation.class_names)
            else:
                chart = confusion_chart(evaluation.confusion, evaluation.class_names)
                define_chart(wandb_run, chart, f"{prefix}/confusion")
                table = chart.table
            panels[f"{prefix}/confusion_table"] = table
        by_class = wandb_table("class precision recall f1 samples", evaluation.by_class())
        panels[f"{prefix}/classes"] = by_class
        panels |= mistake_panels(prefix, loader, evaluation, data)
    if memory:
        panels["memory/plan"] = wandb_table("part planned_mib measured_mib", memory)
    for name, panel in panels.items():
        if isinstance(panel, wandb.Table):
            keep_in_run(wandb_run, name, panel, "summary")
    wandb_run.summary.update(panels)


def define_chart(wandb_run: "wandb.Run", chart: "CustomChart", key: str) -> None:
    """Define a custom chart in the run's configuration; `wandb.log` would also add a row."""
    chart.set_key(key)
    section, name, spec_key = chart.spec.config_key
    definitions = dict(wandb_run.config.get(section, {}))
    definitions[name] = {spec_key: chart.spec.config_value}
    wandb_run.config.update({section: definitions}, allow_val_change=True)


def keep_in_run(wandb_run: "wandb.Run", name: str, panel: "wandb.Table", step: int | str) -> None:
    """Have W&B store an offline run's table inside the run's own folder.

    By default W&B copies the table to a folder in the user's home, and the run refers to it by an
    absolute path. A run that was moved to another machine could then not be uploaded whole. An
    online run needs no such care, because W&B uploads its tables at once.

    Args:
        step: the step of the table, or "summary"; W&B makes it part of the file's name.
    """
    if wandb_run.offline:
        panel.bind_to_run(wandb_run, name, step)


def mistake_panels(
    prefix: str, loader: Loader, evaluation: Classified, data: Data
) -> "dict[str, Panel]":
    """Return panels with this rank's most confident mistakes: a table, and images with captions."""
    import wandb

    rows = mistakes(loader, evaluation, data)
    if not rows:
        return {}
    columns = list(MistakenSample._fields)
    images = [row.content for row in rows if isinstance(row.content, wandb.Image)]
    panels: dict[str, Panel] = {}
    if images:
        # W&B would store a table's images outside of the run. So the images have a panel of their
        # own, in the table's order.
        panels[f"{prefix}/mistake_images"] = images
        columns.remove("content")
    if rows[0].file is None:
        columns.remove("file")
    cells = [[getattr(row, column) for column in columns] for row in rows]
    return {f"{prefix}/mistakes": wandb_table(" ".join(columns), cells), **panels}


def upload_profile(wandb_run: "wandb.Run", folder: Path, verdict: str) -> None:
    """Upload the files of a profile, and show its verdict and its picture of memory."""
    import wandb

    upload_artifact(wandb_run, folder, "profile")
    wandb_run.summary["profile/verdict"] = verdict
    if (folder / "memory.png").is_file():
        # Without a commit, the picture joins the next row of metrics. A row of its own would take
        # that row's step.
        wandb_run.log({"profile/memory": wandb.Image(str(folder / "memory.png"))}, commit=False)


def upload_artifact(wandb_run: "wandb.Run", folder: Path, artifact_type: str) -> None:
    """Upload all files under a folder as one artifact of a type such as "model"."""
    import wandb

    logged = wandb.Artifact(f"{artifact_type}-{wandb_run.id}", type=artifact_type)
    for path in sorted(folder.rglob("*")):  # `add_dir` would print
        if path.is_file():
            # The files will not change, so W&B need not copy them to a folder in the user's home.
            logged.add_file(str(path), str(path.relative_to(folder)), policy="immutable")
    wandb_run.log_artifact(logged)


def wandb_table(columns: str, rows: Iterable[Iterable[object]]) -> "wandb.Table":
    """Return a W&B table; `columns` are names separated by spaces."""
    import wandb

    return wandb.Table(columns=[*columns.split()], data=[[*row] for row in rows])


def confusion_chart(counts: torch.Tensor, class_names: Sequence[str]) -> "CustomChart":
    """Return W&B's chart of a confusion matrix.

    Args:
        counts: the number of samples, [true class, predicted class].
        class_names: the name of each class.
    """
    import wandb

    table = confusion_table(counts, class_names, range(counts.numel()))
    fields = {name: name for name in CONFUSION_COLUMNS.split()}
    title = {"title": "Final evaluation"}
    return wandb.plot_table("wandb/confusion_matrix/v1", table, fields, title)


def most_confused_pairs(counts: torch.Tensor, class_names: Sequence[str]) -> "wandb.Table":
    """Return a table of the pairs of classes that are confused most often, at most `MAX_PAIRS`.

    The arguments are those of `confusion_chart`. The matrix needs at least `MAX_PAIRS` cells.
    """
    errors = counts.clone().fill_diagonal_(0).flatten()
    most_confused = errors.topk(MAX_PAIRS).indices.tolist()
    cells = [cell for cell in most_confused if errors[cell]]  # without pairs never confused
    return confusion_table(counts, class_names, cells)


def confusion_table(
    counts: torch.Tensor, class_names: Sequence[str], cells: Iterable[int]
) -> "wandb.Table":
    """Return a table with one row for each of some cells of a confusion matrix.

    Args:
        counts: the number of samples, [true class, predicted class].
        class_names: the name of each class.
        cells: the numbers of the cells: true class × number of classes + predicted class.
    """
    flat_counts = counts.flatten().tolist()
    rows = []
    for cell in cells:
        label, prediction = divmod(cell, len(class_names))
        rows.append([class_names[label], class_names[prediction], int(flat_counts[cell])])
    return wandb_table(CONFUSION_COLUMNS, rows)


def mistakes(loader: Loader, evaluation: Classified, data: Data) -> list[MistakenSample]:
    """Return this rank's most confident mistakes among the samples that `evaluation` kept.

    The mistake with the highest probability comes first. The list is empty if the samples are
    neither images nor text, or if they are streamed.
    """
    samples = loader.samples
    assert isinstance(loader.order, EvaluationOrder)
    # The loader's batches of samples, in the order in which the evaluation read them.
    batches = loader.order.batches()
    show = content_reader(samples, data)
    if not batches or show is None:
        return []
    sample_numbers = torch.cat(batches).tolist()
    # The paths of the images, by number of the sample.
    files = samples.files if isinstance(samples, ImageSamples) else None
    class_names = evaluation.class_names
    probabilities = evaluation.probabilities
    wrong = (evaluation.predicted != evaluation.labels).nonzero()[:, 0]
    order = probabilities[wrong].argsort(descending=True, stable=True)
    rows = []
    for position in wrong[order][:MAX_MISTAKES].tolist():
        sample = sample_numbers[position]
        label = class_names[int(evaluation.labels[position])]
        prediction = class_names[int(evaluation.predicted[position])]
        probability = round(float(probabilities[position]), 6)
        file = None if files is None else str(files[sample])
        content = show(sample)
        if not isinstance(content, str):  # W&B's image, which has no public way to change this
            content._caption = f"{label}, taken for {prediction} ({probability:.0%})"
        rows.append(MistakenSample(sample, file, content, label, prediction, probability))
    return rows


def content_reader(samples: Samples, data: Data) -> "Callable[[int], wandb.Image | str] | None":
    """Return a function from a sample's number to W&B's image or to text; None for other data.

    Images are read as they are stored. Text is decoded from its tokens. Streamed images and texts
    are not stored, so the result is None for them, too.
    """
    if isinstance(samples, CachedImages):
        images = samples.images
        return lambda number: image_panel(images[number])
    if not isinstance(samples, CachedText) or not isinstance(data, TextData):
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(data.tokenizer_folder / "tokenizer.json"))
    tokens = samples.tensors["tokens"]
    offsets = samples.tensors["offsets"]  # where each sample's tokens begin
    return lambda number: tokenizer.decode(tokens[offsets[number] : offsets[number + 1]].tolist())


def image_panel(pixels: np.ndarray) -> "wandb.Image":
    """Return W&B's image of pixels [height, width, channels]; one channel is grey."""
    import wandb

    return wandb.Image(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
