"""Micro-batches, processes and loader workers do not change the updates of a run."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import SHIFTED_UPDATES, first
from tests.launch import REPOSITORY, Finished, Runner
from tests.local_data import IMAGE_SIZES, TEXT_SIZES

QUICKLY_COMPILED = REPOSITORY / "tests" / "quickly_compiled.py"


def assert_same_run(first: Finished, second: Finished, weights_within: float) -> None:
    """Check that two runs agree at every update, at every evaluation and in their weights."""
    for name in ("train/loss", "val/loss", "train/accuracy", "val/accuracy", "train/grad_norm"):
        values = first.series(name)
        others = second.series(name)
        assert values.keys() == others.keys() != set()
        assert values == pytest.approx(others, rel=2e-4, abs=2e-6), name
        # The rounding of one update is far smaller than what the updates change.
        if name == "train/loss":
            assert max(values.values()) - min(values.values()) > 0.05
    for name in ("train/loss", "test/loss", "test/accuracy", "test/count"):
        assert first.summary[name] == pytest.approx(second.summary[name], rel=2e-4), name
    assert_same_weights(first.weights(), second.weights(), weights_within)


def assert_same_weights(first: dict[str, Any], second: dict[str, Any], within: float) -> None:
    """Check that two sets of tensors agree but for rounding."""
    assert first.keys() == second.keys()
    for name, values in first.items():
        torch.testing.assert_close(
            values, second[name], rtol=1e-4 if within else 0, atol=within, msg=name
        )


def test_mlp_micro_batches_equal_one_batch(whole_mlp: Finished, accumulated_mlp: Finished) -> None:
    """Two micro-batches of 32 make the update that one of 64 makes."""
    assert_same_run(whole_mlp, accumulated_mlp, weights_within=1e-5)


def test_mlp_two_processes_equal_accumulation(
    accumulated_mlp: Finished, distributed_mlp: Finished
) -> None:
    """Two processes make the update that one with accumulation 2 makes."""
    assert distributed_mlp.config["environment"]["world_size"] == 2
    assert_same_run(accumulated_mlp, distributed_mlp, weights_within=1e-5)


@pytest.mark.slow
def test_bert_micro_batches_equal_one_batch(
    whole_bert: Finished, accumulated_bert: Finished
) -> None:
    """Two micro-batches of 16 texts make the update of one of 32, though padded differently."""
    assert_same_run(whole_bert, accumulated_bert, weights_within=2e-4)


@pytest.mark.slow
def test_bert_two_processes_equal_accumulation(
    accumulated_bert: Finished, distributed_bert: Finished
) -> None:
    """Two processes make the update that one with accumulation 2 makes."""
    assert distributed_bert.config["environment"]["world_size"] == 2
    assert_same_run(accumulated_bert, distributed_bert, weights_within=2e-4)


@pytest.mark.slow
def test_resnet_two_processes_equal_accumulation_in_training(
    accumulated_resnet: Finished, distributed_resnet: Finished
) -> None:
    """Two processes train a ResNet as one with accumulation 2 does, but for running statistics.

    Batch norm normalises each micro-batch by itself, so micro-batches of 16 on one process or on
    two give the same losses and weights; one batch of 32 does not. The running statistics, which
    only evaluation uses, are averaged over ranks and not updated in turn, so evaluation differs.
    """
    losses = accumulated_resnet.series("train/loss")
    assert len(losses) == 3
    assert losses == pytest.approx(distributed_resnet.series("train/loss"), rel=1e-3)
    rates = accumulated_resnet.series("train/learning_rate")
    assert rates == distributed_resnet.series("train/learning_rate")
    first = accumulated_resnet.weights()
    second = distributed_resnet.weights()
    learned = [name for name in first if "running" not in name and "num_batches" not in name]
    assert len(learned) > 50
    assert_same_weights(
        {name: first[name] for name in learned}, {name: second[name] for name in learned}, 1e-3
    )
    assert distributed_resnet.summary["test/count"] == IMAGE_SIZES["test"]


@pytest.mark.parametrize("recipe", first(1, ["mlp", "bert"]))
def test_learning_rate_is_stepped_once_an_update(
    recipe: str, request: pytest.FixtureRequest
) -> None:
    """The rate changes once an optimizer update, also with accumulation and on two processes."""
    total = {"mlp": 9, "bert": 9}[recipe]
    # The rate is logged after the scheduler's step: it is that of the update to come.
    expected = {
        step: 3e-3 * ((step + 1) / 4 if step < 3 else (total - step) / (total - 3))
        for step in range(1, total + 1)
    }
    for name in ("whole", "accumulated", "distributed"):
        run = request.getfixturevalue(f"{name}_{recipe}")
        assert run.config["plan"]["total_steps"] == total
        assert run.series("train/learning_rate") == pytest.approx(expected), name


@pytest.mark.parametrize(("recipe", "sizes"), [("mlp", IMAGE_SIZES), ("bert", TEXT_SIZES)])
def test_evaluation_counts_each_sample_once(
    recipe: str, sizes: dict[str, int], request: pytest.FixtureRequest
) -> None:
    """Evaluation counts each sample once, also where a split does not divide by two ranks."""
    for name in ("whole", "distributed"):
        run = request.getfixturevalue(f"{name}_{recipe}")
        assert run.config["data"]["sizes"] == sizes
        assert set(run.series("val/count").values()) == {sizes["validation"]}
        assert run.summary["test/count"] == sizes["test"]
        # A share of the samples, so a whole number of right answers.
        right = run.summary["test/accuracy"] * sizes["test"]
        assert right == pytest.approx(round(right), abs=1e-4)


def test_samples_are_counted_over_processes(
    whole_mlp: Finished, accumulated_mlp: Finished, distributed_mlp: Finished
) -> None:
    """Effective batch, samples and epochs do not depend on how an update is divided."""
    steps = {step: 64 * step for step in range(1, 10)}
    for run in (whole_mlp, accumulated_mlp, distributed_mlp):
        assert run.config["environment"]["effective_batch_size"] == 64
        assert run.series("progress/samples") == steps
        assert run.series("progress/epoch")[9] == 3
        samples = run.summary["perf/samples_per_second"]
        devices = run.config["environment"]["world_size"]
        assert run.summary["perf/samples_per_second_per_device"] == pytest.approx(samples / devices)


@pytest.mark.parametrize("workers", first(1, [2, 0]))
def test_loader_workers_give_the_same_losses(
    workers: int, runner: Runner, odd_images: Path, whole_mlp: Finished
) -> None:
    """Batches from loader workers give the same bits as batches gathered from memory."""
    run = runner.run(
        *("mnist_mlp", "--dataset", odd_images, *SHIFTED_UPDATES, "--tracker", "none"),
        *("--batch-size", 64, "--data-placement", "workers", "--num-workers", workers),
        launcher="fork",
    )
    assert run.config["config"]["data_placement"] == "workers"
    for name in ("train/loss", "val/loss"):
        assert run.series(name) == whole_mlp.series(name)
        assert all(math.isfinite(value) for value in run.series(name).values())
    weights = whole_mlp.weights()
    for name, values in run.weights().items():
        assert torch.equal(values, weights[name]), name


@pytest.mark.parametrize("recipe", first(0, ["mlp", "bert"], in_ci=1))
@pytest.mark.parametrize("flag", ["--gradient-checkpointing", "--compile", "--deterministic"])
def test_way_of_computing_changes_rounding_alone(
    flag: str, recipe: str, runner: Runner, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Recomputing activations, compiling, and deterministic kernels train to the same weights."""
    if flag == "--compile" and shutil.which("g++") is None:
        pytest.skip("compiling for a CPU needs a C++ compiler")
    whole = request.getfixturevalue(f"whole_{recipe}")
    script = REPOSITORY / "recipes" / f"{whole.config['recipe']}.py"
    words: tuple[Path, ...] = (script,)
    if flag == "--compile":
        words = (QUICKLY_COMPILED, tmp_path / "compiled", script)
    run = runner.run(*words, "--config", whole.directory, flag, timeout=600)
    assert_same_run(whole, run, weights_within=5e-4)
    compiled = run.summary.get("time/compile_seconds")
    assert (compiled is not None) == (flag == "--compile")
    assert compiled is None or 0.1 < compiled < run.summary["time/total_seconds"]
    assert "recompile" not in run.output + run.errors


@pytest.mark.slow
def test_padding_free_bert_is_the_padded_one(runner: Runner, whole_bert: Finished) -> None:
    """Packed tokens and padded ones train to the same losses and weights."""
    run = runner.run(
        *("bert", "--config", whole_bert.directory, "--padding-free", "no"),
        launcher="fork",
    )
    left_out = "padding is not computed (--padding-free)"
    assert whole_bert.config["config"]["padding_free"] == "auto"  # a GPU that repeats it decides
    assert left_out in whole_bert.config["data"]["notes"]
    assert left_out in whole_bert.output
    assert run.config["config"]["padding_free"] == "no"
    assert left_out not in run.config["data"]["notes"]
    assert_same_run(whole_bert, run, weights_within=2e-4)


@pytest.mark.slow
def test_gradient_compression_rounds_what_processes_exchange(
    runner: Runner, distributed_mlp: Finished
) -> None:
    """Gradients exchanged in 16 bits give nearly the same losses, but not the same bits."""
    run = runner.run(
        *("mnist_mlp", "--config", distributed_mlp.directory, "--gradient-compression", "fp16"),
        launcher="two forks",
    )
    losses = run.series("train/loss")
    uncompressed_losses = distributed_mlp.series("train/loss")
    assert losses == pytest.approx(uncompressed_losses, rel=0.02)
    assert losses[1] == uncompressed_losses[1]  # before any update
    assert losses != uncompressed_losses


@pytest.mark.slow
def test_highest_seed_works_on_two_processes(runner: Runner, odd_images: Path) -> None:
    """The highest seed that the parser accepts also works on several processes."""
    run = runner.run(
        *("mnist_mlp", "--dataset", odd_images, "--seed", 2**32 - 1, "--max-steps", 1),
        *("--tracker", "none", "--batch-size", 8),
        launcher="two forks",
    )
    assert run.config["config"]["seed"] == 2**32 - 1
    assert run.config["environment"]["world_size"] == 2
    assert run.summary["progress/global_step"] == 1
