"""What a W&B run shows besides curves: confusion, mistakes, memory, the profile, the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from common.metrics import Evaluation
from common.mistakes import Mistake, find_mistakes
from common.wandb_run import STEP

if TYPE_CHECKING:
    from common.memory_plan import MemoryRows
    from common.run import Run

MOST_CLASSES = 40  # in a matrix; of more classes, those pairs are listed that are confused most
MOST_PAIRS = 100


def attach_results(run: Run, evaluation: Mapping[str, float], memory: MemoryRows) -> None:
    """Show the final evaluation and the memory, and keep the model where that was asked for.

    Args:
        evaluation: what a recipe's `evaluate` returned; an `Evaluation` has more to show.
    """

    def send(wandb_run: Any) -> None:
        import wandb

        panels: dict[str, Any] = {}
        if isinstance(evaluation, Evaluation):
            names, loader = run.data.class_names, run.all_loaders[run.test_split]
            panels["eval/confusion"] = confusion(evaluation.confusion, names)
            found = find_mistakes(loader, evaluation.predicted, evaluation.labels, run.data)
            if found:
                panels["eval/mistakes"] = mistakes(found, names)
        if memory:
            columns: list[str | int] = ["part", "planned_mib", "measured_mib"]
            panels["memory/plan"] = wandb.Table(columns=columns, data=[list(r) for r in memory])
        wandb_run.log({**panels, STEP: run.global_step})

    run.tracking.attach(send)
    if run.config.log_model and not run.config.evaluate_only:
        folder = run.directory.path / "model"
        run.tracking.attach(lambda wandb_run: keep_folder(wandb_run, folder, "model"))


def attach_profile(run: Run, folder: Path, verdict: str) -> None:
    """Keep the files of a profile with the run, and show its picture."""

    def send(wandb_run: Any) -> None:
        import wandb

        keep_folder(wandb_run, folder, "profile")
        wandb_run.summary["profile/verdict"] = verdict
        if (folder / "memory.png").is_file():
            # With the next metrics: a row of its own would take their place in the order.
            image = wandb.Image(str(folder / "memory.png"))
            wandb_run.log({"profile/memory": image}, commit=False)

    run.tracking.attach(send)


def keep_folder(wandb_run: Any, folder: Path, kind: str) -> None:
    """Keep a folder as an artifact of the run."""
    import wandb

    artifact = wandb.Artifact(f"{kind}-{wandb_run.id}", type=kind)
    for path in sorted(folder.rglob("*")):  # `add_dir` would print
        if path.is_file():
            artifact.add_file(str(path), str(path.relative_to(folder)))
    wandb_run.log_artifact(artifact)


def confusion(counts: torch.Tensor, class_names: Sequence[str]) -> Any:
    """Return W&B's chart of a confusion matrix, or a table of the pairs confused most.

    Args:
        counts: [classes, classes], by true class, then predicted class.
    """
    import wandb

    columns: list[str | int] = ["Actual", "Predicted", "nPredictions"]
    size = len(class_names)
    if size > MOST_CLASSES:
        wrong = counts - torch.diag(counts.diagonal())
        most, cells = (column.tolist() for column in wrong.flatten().topk(MOST_PAIRS))
        pairs = zip(cells, most, strict=True)
        rows = [[class_names[c // size], class_names[c % size], int(n)] for c, n in pairs if n]
        return wandb.Table(columns=columns, data=rows)
    rows = [
        [class_names[a], class_names[b], int(n)]
        for a, row in enumerate(counts.tolist())
        for b, n in enumerate(row)
    ]
    return wandb.plot_table(
        "wandb/confusion_matrix/v1",
        wandb.Table(columns=columns, data=rows),
        {str(name): str(name) for name in columns},
        {"title": "Final evaluation"},
    )


def mistakes(found: Sequence[Mistake], class_names: Sequence[str]) -> Any:
    """Return a table of wrong predictions, with the images or the text."""
    import wandb

    def shown(content: Any) -> Any:
        if isinstance(content, str):
            return content
        return wandb.Image(content[..., 0] if content.shape[-1] == 1 else content)

    kind = "text" if isinstance(found[0].content, str) else "image"
    rows = [
        [m.sample, shown(m.content), class_names[m.label], class_names[m.predicted]] for m in found
    ]
    columns: list[str | int] = ["sample", kind, "label", "prediction"]
    return wandb.Table(columns=columns, data=rows)
