"""Copies of recipes with an edit each, with which `recipes prove` is tried."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks import REPOSITORY
from benchmarks.harness.edited_recipe import edited_once

MLP = "recipes/mnist_mlp"
OWN_DATASET = "examples/own_dataset"
DENOISER = "examples/denoiser"
CHARACTER_MODEL = "examples/character_model"

# Texts of the recipes that edits replace.
LOOP = "        for batch in run.batches(train_loader):\n"
FORWARD = "                loss, logits = compute_loss(model, batch)\n"
LOSS = '    return F.cross_entropy(logits, batch["labels"]), logits\n'
BACKWARD = "                accelerator.backward(loss)\n"
CLIP = (
    "                if accelerator.sync_gradients:\n"
    "                    run.clip_grad_norm_(model, optimizer)\n"
)
RECORD = "            run.record(loss, metrics(logits, batch))\n"
PREPARE = "        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)\n"
KEEP = (
    "        run.keep(model=model, optimizer=optimizer, scheduler=scheduler)"
    "  # what checkpoints save\n"
)
FINISH = "        run.finish(evaluate(run, model, test_loader))\n"
STEP = "                optimizer.step()\n"
EVALUATION = "        for batch in loader:\n"
OBJECTIVE = "OBJECTIVE = "
TORCH = "import torch\nfrom torch import nn\n"
IMPORT_TIME = (TORCH, f"import time\n\n{TORCH}")  # an edit: a text and its replacement
# The body of an evaluation, from its sums to its result.
SUMS = """\
    sums = ClassificationSums(run.accelerator, run.data.class_names)
    with run.evaluating(model) as bare_model:
        for batch in loader:
            loss, logits = compute_loss(bare_model, batch)
            sums.add(loss, logits, batch["labels"])
    return sums.result()
"""
SMALL = ("--dataset", "digits", "--hidden-sizes", "32")
SMALL_WITHOUT_WORKERS = ("--widths", "8", "--num-workers", "0")  # for OWN_DATASET
DROPOUT = (*SMALL, "--dropout", "0.3")


@dataclass(frozen=True)
class EditedCopy:
    """A copy of a recipe with some edits."""

    name: str  # what the edits do, in words
    recipe: str  # the path in the repository, without ".py"
    edits: tuple[tuple[str, str], ...]  # texts of the recipe and their replacements
    flags: tuple[str, ...] = SMALL
    helpers: tuple[tuple[str, str], ...] = ()  # additional files: relative paths and texts
    updates: int = 12  # the number of updates of the reference run

    def write(self, folder: Path) -> Path:
        """Write the copy into a folder, and return its file.

        Raises:
            ValueError: a text that an edit replaces is not exactly once in the recipe.
        """
        source = (REPOSITORY / f"{self.recipe}.py").read_text(encoding="utf-8")
        path = folder / "train.py"
        path.write_text(edited_once(source, self.edits), encoding="utf-8")
        for name, text in self.helpers:
            helper = folder / name
            helper.parent.mkdir(exist_ok=True)
            helper.write_text(text, encoding="utf-8")
        return path
