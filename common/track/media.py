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
        panels |= mistake_panels(prefix, loader, evaluation, data)
    if memory:
        panels["memory/plan"] = table("part planned_mib measured_mib", memory)
    for name, panel in panels.items():
        panels[name] = kept_in_run(wandb_run, name, panel, "summary")
    wandb_run.summary.update(panels)


def kept_in_run(wandb_run: Any, name: str, panel: Any, step: int | str) -> Any:
    """Have W&B keep an offline run's table among the run's own files.

    By default it copies tables to a folder of the user's, and the run names them by absolute paths,
    so that a run which was moved could not be uploaded whole. Online, it uploads them at once.
    """
    import wandb

    if isinstance(panel, wandb.Table) and wandb_run.offline:
        panel.bind_to_run(wandb_run, name, step)
    return panel


def mistake_panels(prefix: str, loader: Loader, evaluation: Classified, data: Any) -> Facts:
    """Return a table of this rank's most confident mistakes, and their images with captions."""
    import wandb

    rows = mistakes(loader, evaluation, data)
    if not rows:
        return {}
    names = ["sample", "file", "content", "label", "prediction", "probability"]
    contents = [row["content"] for row in rows]
    panels: dict[str, Any] = {}
    if isinstance(contents[0], wandb.Image):
        # Images of a table would be kept outside of the run: they stand beside it, in its order.
        panels[f"{prefix}/mistake_images"] = contents
        names.remove("content")
    if rows[0]["file"] is None:
        names.remove("file")
    cells = [[row[name] for name in names] for row in rows]
    return {f"{prefix}/mistakes": table(" ".join(names), cells), **panels}


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
            # They do not change any more: W&B needs no copy in a folder of the user's.
            kept.add_file(str(path), str(path.relative_to(folder)), policy="immutable")
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


def mistakes(loader: Loader, found: Classified, data: Any) -> list[dict[str, Any]]:
    """Return this rank's most confident mistakes, over all batches that were kept.

    Of each: the sample's number, its file where that is known, its image or text, its class, the
    class that was predicted, and the probability of that.
    """
    batches = list(loader.order.micro_batches())  # type: ignore[call-arg]
    read = reader(loader.samples, data)
    if not batches or read is None:
        return []
    samples = torch.cat(batches).tolist()
    files = getattr(loader.samples, "files", None)  # paths by number of the sample
    names = found.class_names
    probabilities = found.probabilities
    wrong = (found.predicted != found.labels).nonzero()[:, 0]
    order = probabilities[wrong].argsort(descending=True, stable=True)
    rows = []
    for position in wrong[order][:MOST_MISTAKES].tolist():
        sample = samples[position]
        label = names[int(found.labels[position])]
        prediction = names[int(found.predicted[position])]
        probability = round(float(probabilities[position]), 6)
        file = None if files is None else str(files[sample])
        content = read(sample)
        if hasattr(content, "_caption"):
            content._caption = f"{label}, taken for {prediction} ({probability:.0%})"
        row = {"sample": sample, "file": file, "content": content, "label": label}
        rows.append({**row, "prediction": prediction, "probability": probability})
    return rows


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
