"""`--auto-batch-size`: all ranks agree on a batch, and the updates are the same as without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.edited_copies import edited
from tests.jobs import final_weights, rows_without_clock
from tests.launch import Launcher, Runner

FLAGS = (
    *("--dataset", "digits", "--epochs", 2, "--hidden-sizes", 64, "--dropout", 0.2),
    *("--mixed-precision", "no", "--log-every", 2, "--tracker", "none"),
)


def recipe_that_holds(tmp_path: Path, rank: int, most: int) -> Path:
    """Return a copy of the MLP recipe that runs out of memory on one rank above `most` samples."""
    line = '    logits = model(batch["images"])\n'
    condition = f'os.environ.get("RANK", "0") == "{rank}" and len(batch["labels"]) > {most}'
    limited = f"    if model.training and {condition}:\n"
    limited += '        raise torch.OutOfMemoryError("CUDA out of memory. Tried")\n'
    import_os = ("import torch\n", "import os\n\nimport torch\n")
    return edited("mnist_mlp", tmp_path, (line, limited + line), import_os)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "rank"), [("fork", 0), pytest.param("two forks", 1, marks=pytest.mark.slow)]
)
def test_all_take_what_the_smallest_rank_holds(
    runner: Runner, tmp_path: Path, launcher: Launcher, rank: int
) -> None:
    """The run is bit-equal to one with that batch size and accumulation as flags."""
    recipe = recipe_that_holds(tmp_path, rank, most=20)
    flags = (*FLAGS, "--batch-size", 64, "--gradient-accumulation-steps", 2)
    run = runner.run(recipe, *flags, "--auto-batch-size", launcher=launcher)
    assert run.returncode == 0, run.explain()
    assert run.config["config"]["batch_size"] == 16
    assert run.config["config"]["gradient_accumulation_steps"] == 8
    assert run.output.count("16 × 8 accumulated") == 1 + run.output.count("batch   16 × 8")
    same_batch = ("--batch-size", 16, "--gradient-accumulation-steps", 8)
    same_run = runner.run("mnist_mlp", *FLAGS, *same_batch, launcher=launcher)
    assert rows_without_clock(run.directory) == rows_without_clock(same_run.directory)
    assert final_weights(run.directory) == final_weights(same_run.directory)


def test_nothing_fits(runner: Runner, tmp_path: Path) -> None:
    """The run ends with one sentence if even a batch of one sample runs out of memory."""
    recipe = recipe_that_holds(tmp_path, 0, most=0)
    run = runner.run(recipe, *FLAGS, "--auto-batch-size", launcher="fork", succeeds=False)
    assert run.returncode == 1
    assert run.printed().count("out of memory even with one sample per batch") == 1, run.explain()
    assert "Traceback" not in run.errors
