"""What a W&B run shows besides curves: confusion, classes, mistakes, memory, profile, model."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from common.data.loader import Loader
from common.measure.classification import Classified
from common.measure.memory_plan import MemoryRows
from common.track.names import Facts

MOST_CLASSES = 40  # in a matrix; of more classes, those pairs are listed that are confused most
MOST_PAIRS = 100
MOST_MISTAKES = 32


def results(
    wandb_run: Any, evaluation: Facts, prefix: str, loader: Loader, data: Any, memory: MemoryRows
) -> None:
    """Show memory and evaluation, in the summary: of tables among rows W&B draws their sizes."""
    panels: dict[str, Any] = {}
    if isinstance(evaluation, Classified):
        if evaluation.confusion is not None:
            chart = confusion(evaluation.confusion, evaluation.class_names)
            if hasattr(chart, "spec"):
                chart.set_key(f"{prefix}/confusion")
                place, name, key = chart.spec.config_key
                kept = {**wandb_run.config.get(place, {}), name: {key: chart.spec.config_value}}
                wandb_run.config.update({place: kept}, allow_val_change=True)
            panels[f"{prefix}/confusion_table"] = getattr(chart, "table", chart)
        by_class = table("class precision recall f1 samples", evaluation.by_class())
        panels[f"{prefix}/classes"] = by_class
        if found := mistakes(loader, evaluation, data):
            panels[f"{prefix}/mistakes"] = table("sample content label prediction", found)
    if memory:
        panels["memory/plan"] = table("part planned_mib measured_mib", memory)
    wandb_run.summary.update(panels)


def profile(wandb_run: Any, folder: Path, verdict: str) -> None:
    import wandb

    artifact(wandb_run, folder, "profile")
    wandb_run.summary["profile/verdict"] = verdict
    if (folder / "memory.png").is_file():
        # With the next metrics: a row of its own would take their place in the order.
        wandb_run.log({"profile/memory": wandb.Image(str(folder / "memory.png"))}, commit=False)


def artifact(wandb_run: Any, folder: Path, kind: str) -> None:
    import wandb

    kept = wandb.Artifact(f"{kind}-{wandb_run.id}", type=kind)
    for path in sorted(folder.rglob("*")):  # `add_dir` would print
        if path.is_file():
            kept.add_file(str(path), str(path.relative_to(folder)))
    wandb_run.log_artifact(kept)


def table(columns: str, rows: Iterable[Iterable[Any]]) -> Any:
    import wandb

    return wandb.Table(columns=[*columns.split()], data=[[*row] for row in rows])


def confusion(counts: torch.Tensor, class_names: Sequence[str]) -> Any:
    """Return W&B's chart of counts [true class, predicted], or a table of the worst pairs."""
    import wandb

    columns, size = "Actual Predicted nPredictions", len(class_names)
    cells, flat = list(range(size**2)), counts.flatten().tolist()
    if size > MOST_CLASSES:
        wrong = counts.clone().fill_diagonal_(0).flatten()
        cells = [cell for cell in wrong.topk(MOST_PAIRS).indices.tolist() if wrong[cell]]
    rows = [[class_names[c // size], class_names[c % size], int(flat[c])] for c in cells]
    if size > MOST_CLASSES:
        return table(columns, rows)
    fields, title = {name: name for name in columns.split()}, {"title": "Final evaluation"}
    return wandb.plot_table("wandb/confusion_matrix/v1", table(columns, rows), fields, title)


def mistakes(loader: Loader, found: Classified, data: Any) -> list[list[Any]]:
    """Return of this rank's first mistakes: the sample's number, what it shows, and two classes."""
    batches, read = loader.order.micro_batches(), reader(loader.samples, data)  # type: ignore[call-arg]
    if not len(batches) or read is None:
        return []
    samples, names = torch.cat(list(batches)).tolist(), found.class_names
    labels, predicted = found.labels.tolist(), found.predicted.tolist()
    wrong = (found.predicted != found.labels).nonzero()[:MOST_MISTAKES, 0].tolist()
    return [[samples[i], read(samples[i]), names[labels[i]], names[predicted[i]]] for i in wrong]


def reader(samples: Any, data: Any) -> Callable[[int], Any] | None:
    """Return what turns a sample's number into W&B's picture or text; None of other samples."""
    if hasattr(samples, "images"):
        import wandb

        return lambda number: wandb.Image(
            samples.images[number][..., 0 if samples.images.shape[-1] == 1 else slice(None)]
        )
    if not hasattr(data, "tokenizer_folder") or not hasattr(samples, "tensors"):
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(data.tokenizer_folder / "tokenizer.json"))
    tokens, offsets = samples.tensors["tokens"], samples.tensors["offsets"]
    return lambda number: tokenizer.decode(tokens[offsets[number] : offsets[number + 1]].tolist())
