"""Recipes and tools give the same results on the simulated device as on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.jobs import Job, assert_same_result, killed_and_resumed, newest_step
from tests.launch import Finished, Runner
from tests.loss_scale import SCRIPT as IN_FP16
from tests.loss_scale import (
    WILD,
    Scale,
    assert_scale_follows_overflows,
    assert_skipped_updates_change_nothing,
)
from tests.simulated.runs import LAUNCH, LIKE_APPLE, LIKE_CUDA, on_device, script_of, waits

Words = tuple[object, ...]
IN_FP32 = ("--mixed-precision", "no")
QUIET = ("--tracker", "none", "--log-every", 1)


def small(recipe: str, odd_images: Path, odd_text: Path) -> Words:
    """Return flags for a few updates of two micro-batches each, without dropout."""
    data = odd_text if recipe == "bert" else odd_images
    model = ("--hidden-sizes", 64, 48) if recipe == "mnist_mlp" else ()
    rate = 0.01 if recipe == "resnet" else 1e-3
    dropout = () if recipe == "resnet" else ("--dropout", 0)
    updates = ("--max-steps", 3 if recipe == "resnet" else 8, "--learning-rate", rate)
    batches = ("--batch-size", 8, "--gradient-accumulation-steps", 2)
    return ("--dataset", data, *model, *dropout, *updates, *batches, *QUIET)


@pytest.mark.parametrize(
    ("recipe", "variant"),
    [
        pytest.param("mnist_mlp", LIKE_APPLE, marks=pytest.mark.slow),
        pytest.param("bert", LIKE_APPLE, marks=pytest.mark.slow),
        pytest.param("mnist_mlp", LIKE_CUDA, marks=pytest.mark.slow),
        pytest.param("mnist_mlp", "fused=none", marks=pytest.mark.exhaustive),
        pytest.param("resnet", LIKE_APPLE, marks=pytest.mark.exhaustive),
    ],
)
def test_a_recipe_learns_what_it_learns_on_the_cpu(
    recipe: str,
    variant: str,
    runner: Runner,
    odd_images: Path,
    odd_text: Path,
    thin_resnet: Path,
) -> None:
    """The recipe's losses, accuracy and weights differ from those of the CPU by rounding alone."""
    flags = (*small(recipe, odd_images, odd_text), *IN_FP32)
    script = thin_resnet if recipe == "resnet" else recipe
    run = on_device(runner, script, *flags, variant=variant)
    on_cpu = runner.shared(script, *flags)
    assert on_cpu.config["environment"]["device_type"] == "cpu"
    assert run.config["environment"]["device"] == "Simulated accelerator"
    assert_alike(run, on_cpu)


def assert_alike(run: Finished, other: Finished) -> None:
    """Check that two runs are the same but for rounding."""
    for name in ("train/loss", "train/grad_norm", "train/learning_rate", "val/loss"):
        assert run.series(name) == pytest.approx(other.series(name), rel=2e-3, abs=1e-6), name
    for name in ("test/accuracy", "test/loss"):
        assert run.summary[name] == pytest.approx(other.summary[name], rel=0.01), name
    expected = other.weights()
    for name, values in run.weights().items():
        torch.testing.assert_close(values, expected[name], rtol=0.02, atol=2e-3, msg=name)


@pytest.mark.slow
def test_killed_and_resumed_it_ends_bit_equal(
    runner: Runner, odd_images: Path, tmp_path: Path
) -> None:
    """A killed fp16 run resumes to the same bits, also those of the device's random numbers."""
    flags = (*small("mnist_mlp", odd_images, odd_images), "--dropout", 0.3)
    flags = (*flags, "--checkpoint-every", 1, "--mixed-precision", "fp16")
    whole = on_device(runner, "mnist_mlp", *flags, variant=LIKE_APPLE)
    words = (LIKE_APPLE, "-", script_of("mnist_mlp"), *flags)
    resumed = killed_and_resumed(
        runner, LAUNCH, *words, directory=tmp_path / "run", kill_at=3, total_steps=8
    )
    assert_same_result(resumed.directory, whole.directory)


@pytest.mark.slow
def test_run_of_the_cpu_goes_on_on_the_device(
    runner: Runner, odd_images: Path, tmp_path: Path
) -> None:
    """A CPU run resumes on the device, says so, and has the same figures but for rounding."""
    flags = (*small("mnist_mlp", odd_images, odd_images), *IN_FP32)
    flags = (*flags, "--max-steps", 60, "--checkpoint-every", 1)
    whole = runner.shared("mnist_mlp", *flags)
    directory = tmp_path / "run"
    job = Job(runner, "mnist_mlp", *flags, "--output-dir", directory, directory=directory)
    job.wait_for_step(3)
    job.kill()
    assert 0 < newest_step(directory) < 60, "the kill came too late"
    words = (LIKE_APPLE, "-", script_of("mnist_mlp"), "--resume", directory)
    job = Job(runner, LAUNCH, *words, directory=directory)
    assert job.end(240) == 0, job.printed()
    assert "simulated instead of cpu, so metrics differ by rounding" in job.printed()
    assert job.read("config.json")["environment"]["device_type"] == "simulated"
    losses = [read["test/loss"] for read in (job.read("summary.json"), whole.summary)]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)


def in_fp16(runner: Runner, variant: str, scale: Scale, *flags: object) -> Finished:
    """Train an MLP in fp16 from a loss scale."""
    words = (*scale, script_of("mnist_mlp"), *flags, "--mixed-precision", "fp16")
    return on_device(runner, IN_FP16, *words, variant=variant)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [LIKE_APPLE, LIKE_CUDA])
def test_overflows_skip_updates_and_halve_the_scale(
    variant: str, runner: Runner, odd_images: Path
) -> None:
    """An overflow in fp16 skips the update and halves the scale."""
    flags = (*small("mnist_mlp", odd_images, odd_images), "--max-steps", 12)
    run = in_fp16(runner, variant, WILD, *flags)
    assert run.config["environment"]["mixed_precision"] == "fp16"
    assert_scale_follows_overflows(run)


@pytest.mark.slow
def test_a_skipped_update_changes_nothing(runner: Runner, odd_images: Path) -> None:
    """The weights end as they began under a scale that always overflows."""
    flags = small("mnist_mlp", odd_images, odd_images)
    assert_skipped_updates_change_nothing(
        lambda scale, *others: in_fp16(runner, LIKE_APPLE, scale, *flags, *others)
    )


@pytest.mark.slow
def test_clipping_clips(runner: Runner, odd_images: Path, thin_resnet: Path) -> None:
    """Clipping in fp16 limits the norm of the unscaled gradients.

    SGD's update is proportional to the clipped gradients.
    """
    flags = (*small("resnet", odd_images, odd_images), *("--weight-decay", 0, "--max-steps", 1))
    flags = (*flags, "--image-size", 4)

    def trained(*others: object) -> Finished:
        words = (64, 1000, thin_resnet, *flags, "--mixed-precision", "fp16", *others)
        return on_device(runner, IN_FP16, *words, variant=LIKE_APPLE)

    clipped = trained("--max-grad-norm", 1e-3).weights()
    whole = trained("--max-grad-norm", 0)
    unchanged = trained("--max-grad-norm", 0, "--learning-rate", 1e-30).weights()

    def length(weights: dict[str, torch.Tensor]) -> float:
        changes = [
            (weights[name] - values).flatten()
            for name, values in unchanged.items()
            if values.is_floating_point() and "running" not in name
        ]
        return float(torch.cat(changes).norm())

    norm = whole.series("train/grad_norm")[1]
    assert length(clipped) / length(whole.weights()) == pytest.approx(1e-3 / norm, rel=0.05)


@pytest.mark.slow
def test_evaluation_and_prediction_of_an_exported_model(
    runner: Runner, odd_images: Path, tmp_path: Path
) -> None:
    """The tools give the figures and the labels that they give on the CPU."""
    flags = (*small("mnist_mlp", odd_images, odd_images), *IN_FP32)
    run = on_device(runner, "mnist_mlp", *flags, variant=LIKE_APPLE)
    again = ("--evaluate-only", "--init-from", run.directory, "--tracker", "none", *IN_FP32)
    figures = on_device(runner, "mnist_mlp", *again, variant=LIKE_APPLE).summary
    assert figures["test/loss"] == pytest.approx(run.summary["test/loss"], rel=1e-5)
    assert figures["test/accuracy"] == run.summary["test/accuracy"]
    image = picture(tmp_path)
    rows = []
    for device in ("simulated", "cpu"):
        words = ("common.tools", "predict", run.directory, image, "--device", device)
        predicted = runner.run(LAUNCH, LIKE_APPLE, "-", *words, output_directory=False)
        rows.append(json.loads(predicted.output))
    assert rows[0]["label"] == rows[1]["label"]


@pytest.mark.slow
def test_profile_ends_without_a_verdict(runner: Runner, odd_images: Path) -> None:
    """Torch's profiler can't time the device's kernels; the run says so and trains on."""
    flags = (*small("mnist_mlp", odd_images, odd_images), "--profile", "--max-steps", 30)
    run = on_device(runner, "mnist_mlp", *flags, variant=LIKE_APPLE)
    assert "profile no verdict: torch's profiler can't time the kernels of simulated" in run.output
    assert run.summary["progress/global_step"] == 30
    assert (run.directory / "profile" / "top_operations.csv").is_file()
    assert not (run.directory / "profile" / "verdict.json").exists()


def picture(folder: Path) -> Path:
    """Write an image."""
    from PIL import Image

    path = folder / "picture.png"
    Image.effect_noise((8, 8), 60).save(path)
    return path


@pytest.mark.slow
def test_training_waits_for_the_device_at_log_lines_alone(
    runner: Runner, odd_images: Path, tmp_path: Path
) -> None:
    """More updates between log lines do not make the host wait more often.

    Uploads of batches do not count. The device has the name of a GPU whose speed the data sheet
    states: the number of waits of a measurement would depend on the clock.
    """
    variant = f"{LIKE_CUDA},name=Tesla T4"
    flags = (*small("mnist_mlp", odd_images, odd_images), "--log-every", 1000, "--batch-size", 1)
    counts = []
    for steps in (10, 60):  # of one epoch
        report = tmp_path / f"{steps}.json"
        words = (*flags, "--max-steps", steps)
        on_device(runner, "mnist_mlp", *words, variant=variant, report=report)
        counts.append(waits(report))
    for name in ("item", "download", "event", "device", "stream"):
        assert counts[0].get(name) == counts[1].get(name), name
