"""Images, tables and histograms that a recipe logs in whole runs, with each tracker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.edited_copies import edited
from tests.launch import Runner
from tests.wandb_file import records

CALLS = """            if run.progress.global_step in (0, 2, 3):
                run.log_images("train/batch", torch.rand(2, 1, 8, 8), ["a", "b"])
                run.log_table("train/rows", ["x"], [[torch.tensor(2.5)]])
                run.log_histogram("train/weights", next(model.parameters()))
                assert (run.tracker is None) == (config.tracker == "none")
"""
LINE = "            run.record(loss, metrics(logits, batch))\n"


@pytest.mark.slow
@pytest.mark.parametrize("tracker", ["wandb", "tensorboard", "none"])
def test_whole_run_keeps_what_a_recipe_logs(tracker: str, tmp_path: Path, runner: Runner) -> None:
    """A run keeps logged media as files and in the tracker, with the row of their step.

    Media after the last row are kept as well.
    """
    recipe = edited("mnist_mlp", tmp_path, (LINE, CALLS + LINE))
    flags = ("--dataset", "digits", "--max-steps", 4, "--log-every", 2, "--hidden-sizes", 8)
    run = runner.run(recipe, *flags, "--eval-every", 4, "--tracker", tracker)
    run.check_success()
    kept = {str(path.relative_to(run.directory)) for path in run.directory.rglob("media/*/*/*")}
    kept = {name for name in kept if not name.startswith("wandb")}
    assert kept == {
        f"media/{place}-{step:08d}{ending}"
        for step in (0, 2, 3)
        for place, ending in (
            ("images/train/batch", "-0.png"),
            ("images/train/batch", "-1.png"),
            ("tables/train/rows", ".json"),
            ("histograms/train/weights", ".json"),
        )
    }
    if tracker == "wandb":
        rows = {row["progress/global_step"]: row for row in records(run)["history"]}
        assert [step for step, row in rows.items() if "train/batch.count" in row] == [0, 2, 3]
        assert rows[2]["train/loss"] == run.series("train/loss")[2]
        assert rows[2]["train/weights._type"] == "histogram"
    if tracker == "tensorboard":
        events = b"".join(path.read_bytes() for path in run.directory.rglob("events.out*"))
        for name in (b"train/batch/a", b"train/rows", b"train/weights"):
            assert name in events
