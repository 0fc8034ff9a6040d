"""Runs that are repeated, launched in other ways, copied, or begun from another run's weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch import REPOSITORY, Finished, Runner


def test_config_file_repeats_a_run_under_plain_python(runner: Runner, whole_mlp: Finished) -> None:
    """`--config runs/X/config.json` repeats a run to the last bit; a flag beside it overrides."""
    again = runner.run(
        *("mnist_mlp", "--config", whole_mlp.directory / "config.json"),
        *("--tracker", "tensorboard", "--log-every", 3),
        launcher="fork",
    )
    assert again.summary["train/loss"] == whole_mlp.summary["train/loss"]
    assert again.summary["test/loss"] == whole_mlp.summary["test/loss"]
    assert again.summary["test/accuracy"] == whole_mlp.summary["test/accuracy"]
    changed = {"config", "output_dir", "tracker", "log_every"}
    before = whole_mlp.config["config"]
    now = again.config["config"]
    assert {name for name in now if now[name] != before[name]} == changed
    assert list(again.series("train/loss")) == [3, 6, 9]
    events = list(again.directory.rglob("events.out.tfevents.*"))
    assert len(events) == 1
    assert not again.wandb_folder.exists()
    assert_events_hold(events[0], again)


def assert_events_hold(path: Path, run: Finished) -> None:
    """Check that TensorBoard's file has the same values as `metrics.jsonl`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path.parent))
    events.Reload()
    for name in ("train/loss", "test/accuracy", "train/learning_rate"):
        logged = {event.step: event.value for event in events.Scalars(name)}
        assert logged == pytest.approx(run.series(name), rel=1e-5), name


@pytest.mark.slow
def test_torchrun_with_two_processes(runner: Runner, whole_mlp: Finished) -> None:
    """`torchrun` works like `accelerate launch`, and two processes repeat a run of one."""
    run = runner.run(
        *("mnist_mlp", "--config", whole_mlp.directory, "--batch-size", 32), launcher="torchrun"
    )
    assert run.config["environment"]["world_size"] == 2
    assert run.config["environment"]["effective_batch_size"] == 64
    assert run.summary["train/loss"] == pytest.approx(whole_mlp.summary["train/loss"], rel=2e-4)
    assert run.summary["test/loss"] == pytest.approx(whole_mlp.summary["test/loss"], rel=2e-4)


def test_copied_recipe_runs_from_elsewhere(
    runner: Runner, odd_images: Path, tmp_path: Path
) -> None:
    """A recipe copied to any folder trains and writes to `runs/` in the working directory."""
    script = tmp_path / "elsewhere" / "train.py"
    script.parent.mkdir()
    script.write_text((REPOSITORY / "recipes" / "mnist_mlp.py").read_text())
    working_directory = tmp_path / "work"
    working_directory.mkdir()
    runner.run(
        *(script, "--dataset", odd_images, "--batch-size", 64),
        *("--max-steps", 2, "--tracker", "none"),
        working_directory=working_directory,
        output_directory=False,
    )
    (directory,) = (working_directory / "runs").iterdir()
    assert directory.name.startswith("train-")
    assert json.loads((directory / "status.json").read_text())["status"] == "finished"
    assert json.loads((directory / "summary.json").read_text())["progress/global_step"] == 2


def test_initial_weights_are_those_of_a_run(
    runner: Runner, odd_images: Path, whole_mlp: Finished
) -> None:
    """`--init-from RUN` starts from the run's weights: they stay with a learning rate of 0."""
    run = runner.run(
        *("mnist_mlp", "--dataset", odd_images, "--batch-size", 64),
        *("--init-from", whole_mlp.directory),
        *("--learning-rate", 0, "--max-steps", 1, "--mixed-precision", "no", "--tracker", "none"),
        launcher="fork",
    )
    assert run.summary["test/loss"] == pytest.approx(whole_mlp.summary["test/loss"], rel=1e-6)
    before = whole_mlp.weights()
    after = run.weights()
    assert all(before[name].equal(after[name]) for name in after)


def test_target_decides_the_status(runner: Runner, odd_images: Path) -> None:
    """A run that ends below `--target` says so, keeps its model, and fails."""
    run = runner.run(
        *("mnist_mlp", "--dataset", odd_images, "--batch-size", 64),
        *("--max-steps", 1, "--learning-rate", 0),
        *("--target", 0.99, "--tracker", "none"),
        launcher="fork",
        succeeds=False,
    )
    assert run.printed().count("error: ") == 1
    assert "worse than --target 0.99" in run.printed()
    assert run.status["status"] == "failed"
    assert run.summary["test/accuracy"] < 0.99
    assert (run.directory / "model" / "model.safetensors").is_file()
