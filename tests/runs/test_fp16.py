"""fp16 with a loss scale. Users run it on GPUs; here the same code runs on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import first
from tests.edited_copies import edited
from tests.jobs import assert_same_result, killed_and_resumed
from tests.launch import RECIPES, REPOSITORY, Finished, Launcher, Runner
from tests.loss_scale import (
    SCRIPT,
    STEADY,
    WILD,
    Scale,
    assert_overflows_only_skip,
    assert_scale_follows_overflows,
    assert_skipped_updates_change_nothing,
)

QUIET = ("--tracker", "none", "--log-every", 1)


def small(recipe: str, odd_images: Path, odd_text: Path) -> tuple[object, ...]:
    """Return flags for a few updates of two micro-batches each."""
    data = odd_text if recipe == "bert" else odd_images
    model_flags: dict[str, tuple[object, ...]] = {
        "mnist_mlp": ("--hidden-sizes", 64, 48),
        "cifar10_fast": ("--widths", 8, 16),
    }
    rate = ("--learning-rate", 0.01 if recipe == "resnet" else 1e-3)
    model = model_flags.get(recipe, ())
    flags = ("--dataset", data, *model, *rate, "--max-steps", 12, "--epochs", 9)
    return (*flags, "--batch-size", 8, "--gradient-accumulation-steps", 2, *QUIET)


def scaled(recipe: str | Path, scale: Scale, *flags: object) -> tuple[object, ...]:
    """Return the arguments of the script that trains a recipe in fp16 from a loss scale."""
    path = recipe if isinstance(recipe, Path) else REPOSITORY / "recipes" / f"{recipe}.py"
    return (*scale, path, *flags, "--mixed-precision", "fp16")


def in_fp16(runner: Runner, recipe: str | Path, scale: Scale, *flags: object) -> Finished:
    return runner.shared(SCRIPT, *scaled(recipe, scale, *flags))


# In fp16 convolutions take many times as long on a CPU, and BERT's products some.
@pytest.mark.parametrize("recipe", first(0, RECIPES, in_ci=2))
def test_losses_are_near_those_of_fp32(
    recipe: str, runner: Runner, odd_images: Path, odd_text: Path, thin_resnet: Path
) -> None:
    """Without an overflow, fp16 gives nearly the losses of fp32, and the config says fp16."""
    flags = small(recipe, odd_images, odd_text)
    script = thin_resnet if recipe == "resnet" else recipe
    half = in_fp16(runner, script, STEADY, *flags)
    full = runner.shared(script, *flags, "--mixed-precision", "no")
    assert half.config["environment"]["mixed_precision"] == "fp16"
    assert half.series("train/loss") == pytest.approx(full.series("train/loss"), rel=0.05)
    assert half.series("train/loss") != full.series("train/loss")
    assert set(half.series("train/loss_scale").values()) == {1024}
    assert half.summary["train/skipped_updates"] == 0
    # Gradients are clipped after unscaling: the norm is that of fp32, not 1,024 times as large.
    norms = full.series("train/grad_norm")
    assert half.series("train/grad_norm") == pytest.approx(norms, rel=0.3)
    dtypes = {name: weights.dtype for name, weights in full.weights().items()}
    assert {name: weights.dtype for name, weights in half.weights().items()} == dtypes


@pytest.mark.parametrize("recipe", first(1, ["mnist_mlp", "bert"], in_ci=1))
def test_an_overflow_is_skipped_and_halves_the_scale(
    recipe: str, runner: Runner, odd_images: Path, odd_text: Path
) -> None:
    """An overflow halves the scale, and four updates without one double it.

    A skipped update also moves the learning rate on.
    """
    flags = small(recipe, odd_images, odd_text)
    run = in_fp16(runner, recipe, WILD, *flags)
    full = runner.shared(recipe, *flags, "--mixed-precision", "no")
    assert_overflows_only_skip(run, full)
    assert all(loss < 100 for loss in run.series("train/loss").values())


def test_a_skipped_update_changes_nothing(runner: Runner, odd_images: Path) -> None:
    """The weights end as they began under a scale that always overflows."""
    flags = small("mnist_mlp", odd_images, odd_images)
    assert_skipped_updates_change_nothing(
        lambda scale, *others: in_fp16(runner, "mnist_mlp", scale, *flags, *others)
    )


@pytest.mark.slow
def test_killed_and_resumed_it_ends_bit_equal(
    runner: Runner, odd_images: Path, tmp_path: Path
) -> None:
    """A resumed run restores the scale and the number of updates since it last changed."""
    flags = (*small("mnist_mlp", odd_images, odd_images), "--checkpoint-every", 1)
    whole = in_fp16(runner, "mnist_mlp", WILD, *flags)
    words = scaled("mnist_mlp", WILD, *flags)
    resumed = killed_and_resumed(
        runner, SCRIPT, *words, directory=tmp_path / "run", kill_at=5, total_steps=12
    )
    assert_same_result(resumed.directory, whole.directory)


@pytest.mark.parametrize("launcher", first(0, ["two forks", "two shards"], in_ci=1))
def test_two_processes_make_the_updates_of_one(
    launcher: Launcher, runner: Runner, odd_images: Path
) -> None:
    """Two processes, also with shards, make the updates of one.

    Both skip an update if a gradient overflows on one of them.
    """
    flags = (*small("mnist_mlp", odd_images, odd_images), "--dropout", 0)
    on_one = in_fp16(runner, "mnist_mlp", STEADY, *flags)
    steady, wild = (
        runner.shared(
            SCRIPT,
            *scaled("mnist_mlp", scale, *flags, "--gradient-accumulation-steps", 1),
            launcher=launcher,
        )
        for scale in (STEADY, WILD)
    )
    assert steady.config["environment"]["world_size"] == 2
    sharding = "FSDP2" if launcher == "two shards" else "no"
    assert steady.config["environment"]["sharding"] == sharding
    assert on_one.series("train/loss") == pytest.approx(steady.series("train/loss"), rel=0.02)
    assert_scale_follows_overflows(wild)
    assert wild.summary["train/loss"] == pytest.approx(on_one.summary["train/loss"], rel=0.3)


# Edits of the MLP: its body and its head have an optimizer and a schedule each.
TWO_OPTIMIZERS = (
    (
        "        optimizer = build_optimizer(model, config, data)\n",
        "        optimizer = build_optimizer(model.body, config, data)\n"
        "        head_optimizer = build_optimizer(model.head, config, data)\n"
        "        head_scheduler = run.plan.schedule(head_optimizer, warmup_share=0.1)\n"
        "        head_optimizer = accelerator.prepare(head_optimizer)\n"
        "        head_scheduler = accelerator.prepare(head_scheduler)\n",
    ),
    (
        "run.keep(model=model,",
        "run.keep(head_optimizer=head_optimizer, head_scheduler=head_scheduler, model=model,",
    ),
    (
        "                optimizer.step()\n",
        "                optimizer.step()\n                head_optimizer.step()\n",
    ),
    (
        "                optimizer.zero_grad()\n",
        "                optimizer.zero_grad()\n"
        "                head_scheduler.step()\n"
        "                head_optimizer.zero_grad()\n",
    ),
)


def test_two_optimizers_train_a_network_as_one_does(
    runner: Runner, tmp_path: Path, odd_images: Path, odd_text: Path
) -> None:
    """One call clips for both, and both skip the updates that overflow."""
    flags = small("mnist_mlp", odd_images, odd_text)
    copy = edited("mnist_mlp", tmp_path, *TWO_OPTIMIZERS)
    with_one = runner.run(SCRIPT, *scaled("mnist_mlp", WILD, *flags))
    with_two = runner.run(SCRIPT, *scaled(copy, WILD, *flags))
    for name in ("loss", "grad_norm", "loss_scale", "skipped_updates"):
        assert with_two.series(f"train/{name}") == with_one.series(f"train/{name}"), name
    weights = with_one.weights()
    assert all(value.equal(weights[name]) for name, value in with_two.weights().items())
    assert_scale_follows_overflows(with_two)
