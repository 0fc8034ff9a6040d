"""Features of single examples: random transforms, a second network, an average, adapters."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from common.data.dataset import DatasetSamples
from common.data.loader import Loader
from common.data.order import TrainingOrder
from examples.gan import MLP, Config, frechet
from examples.own_dataset import Digits
from tests.edited_copies import edited
from tests.examples import EXAMPLES
from tests.jobs import newest_step
from tests.launch import Finished, Runner
from tests.runs.test_examples import whole, with_data

EXAMPLE_BY_NAME = {example.name: example for example in EXAMPLES}


def newest_checkpoint(run: Finished) -> Path:
    """Return the folder of a run's last checkpoint."""
    return run.directory / "checkpoints" / f"step-{newest_step(run.directory):08d}"


def kept_checkpoint(run: Finished) -> Path:
    """Return the folder of the checkpoint whose model is exported."""
    return run.directory / "checkpoints" / f"step-{run.summary['progress/kept_step']:08d}"


def drawn(
    epoch: int, workers: int, world_size: int, first_update: int = 0, noise: float = 0.05
) -> dict[int, torch.Tensor]:
    """Return the images of an epoch by sample, made in worker processes and on several ranks."""
    images: dict[int, torch.Tensor] = {}
    for rank in range(world_size):
        samples = DatasetSamples(Digits(True, noise))
        order = TrainingOrder(
            num_samples=len(samples),
            batch_size=64 // world_size,
            world_size=world_size,
            rank=rank,
            lengths=None,
            accumulation=1,
            seed=3,
        )
        loader = Loader(samples, order, torch.device("cpu"), "workers", workers, seed=3)
        numbers = order.micro_batches(epoch, first_update)
        for micro_batch, (batch, _) in zip(numbers, loader.epoch(epoch, first_update), strict=True):
            images |= dict(zip(micro_batch.tolist(), batch["images"], strict=True))
    return images


@pytest.mark.parametrize(("workers", "world_size"), [(1, 1), (2, 1), (1, 2)])
def test_draws_depend_on_seed_epoch_and_sample_only(workers: int, world_size: int) -> None:
    """Random draws of a sample depend on the seed, the epoch and the sample alone.

    They do not depend on worker processes, ranks, or where in the epoch a run resumes.
    """
    here = drawn(epoch=1, workers=0, world_size=1)
    there = drawn(1, workers, world_size)
    assert here.keys() == there.keys()
    assert all(torch.equal(here[sample], there[sample]) for sample in here)
    rest = drawn(1, workers, world_size, first_update=20)
    assert 0 < len(rest) < len(here)
    assert all(torch.equal(here[sample], rest[sample]) for sample in rest)


def test_draws_differ_between_epochs() -> None:
    """NumPy's noise changes each image from epoch to epoch; torch's draws change most of them."""
    for noise, least in ((0.05, 1.0), (0.0, 0.8)):
        first, second = (drawn(epoch, 0, 1, noise=noise) for epoch in (0, 1))
        both = first.keys() & second.keys()
        changed = sum(not torch.equal(first[sample], second[sample]) for sample in both)
        assert len(both) > 1000
        assert changed >= least * len(both)


def test_both_networks_and_optimizers_are_in_the_checkpoint(runner: Runner) -> None:
    """A checkpoint holds both networks with their optimizers; the export is the generator alone."""
    example = EXAMPLE_BY_NAME["gan"]
    run = runner.run(example.path, *example.flags, "--tracker", "none", "--max-steps", 20)
    folder = newest_checkpoint(run)
    generator = load_file(folder / "model.safetensors")
    discriminator = load_file(folder / "discriminator.safetensors")
    assert {tuple(v.shape) for v in generator.values()} >= {(128, 32), (64, 128)}
    assert {tuple(v.shape) for v in discriminator.values()} >= {(128, 64), (1, 128)}
    for name in ("optimizer", "optimizer_d"):
        moments = load_file(folder / f"{name}.safetensors")
        assert sum(bool(value.abs().max() > 0) for value in moments.values()) >= 12, name
    parts = json.loads((folder / "manifest.json").read_text())["parts"]
    assert parts["scheduler"]["last_epoch"] == parts["scheduler_d"]["last_epoch"] > 0
    assert parts["scheduler"]["base_lrs"] == [Config().learning_rate]
    assert parts["scheduler_d"]["base_lrs"] == [2 * Config().learning_rate]
    facts = json.loads((run.directory / "model" / "model.json").read_text())
    model = MLP(**facts["arguments"])
    model.load_state_dict(run.weights())
    assert all(torch.equal(run.weights()[name], value) for name, value in generator.items())


def test_network_that_is_not_kept_is_refused(runner: Runner, tmp_path: Path) -> None:
    """A run is refused if it prepares a network without keeping it, as a resume would lose it."""
    line = "            discriminator=discriminator,\n"
    path = edited(EXAMPLE_BY_NAME["gan"].path, tmp_path, (line, ""))
    run = runner.run(path, *EXAMPLE_BY_NAME["gan"].flags, "--tracker", "none", succeeds=False)
    assert run.returncode == 1
    assert (
        "accelerator.prepare returned an object of class MLP that was not passed to run.keep(), so "
        "a resume could lose its state" in run.printed()
    )


def test_frechet_distance_of_two_gaussians() -> None:
    """The Fréchet distance agrees with a calculation by hand for diagonal covariances.

    It is |m1 - m2|² + tr(C1 + C2 - 2 √(C1 C2)).
    """
    random = np.random.default_rng(0)
    real = torch.from_numpy(random.normal(0, 1, (200_000, 3)))
    other = torch.from_numpy(random.normal(0, 1, (200_000, 3))) * torch.tensor([1.0, 2.0, 3.0]) + 1
    totals = {
        "count": torch.tensor(len(real)),
        "real": real.sum(0),
        "real_products": real.T @ real,
        "drawn": other.sum(0),
        "drawn_products": other.T @ other,
    }
    assert float(frechet(totals)["frechet"]) == pytest.approx(3 + 0 + 1 + 4, rel=0.02)


@pytest.mark.slow
def test_average_is_evaluated_and_stops_early(runner: Runner) -> None:
    """Early stopping follows the average's figures, and the export is the average."""
    run = whole(runner, EXAMPLE_BY_NAME["averaged"])
    assert run.summary["progress/global_step"] < run.config["plan"]["total_steps"]
    accuracies = run.series("val/accuracy")
    losses = run.series("val/loss")
    patience = run.config["config"]["early_stopping"]
    first_best = max(accuracies, key=lambda step: (accuracies[step], -step))
    assert [*accuracies].index(first_best) == len(accuracies) - 1 - patience
    # Of equal accuracies, the lower loss wins, and then the later step.
    best = max(accuracies, key=lambda step: (accuracies[step], -losses[step], step))
    assert run.summary["progress/kept_step"] == best
    folder = kept_checkpoint(run)
    average = load_file(folder / "average.safetensors")
    model = load_file(folder / "model.safetensors")
    for name, value in run.weights().items():
        assert torch.equal(value, average[f"module.{name}"]), name
        assert not torch.equal(value, model[name]), name


@pytest.mark.slow
def test_adapters_are_kept_small_and_exported_merged(
    runner: Runner, request: pytest.FixtureRequest
) -> None:
    """Frozen weights are saved once, and `model/` is a whole BERT with the adapters merged."""
    from transformers import BertForSequenceClassification

    example = with_data(EXAMPLE_BY_NAME["lora"], request)
    run = runner.run(example.path, *example.flags, "--tracker", "none", "--max-steps", 12)
    folder = kept_checkpoint(run)
    frozen = folder.parent / "frozen-model.safetensors"
    changing = load_file(folder / "model.safetensors")
    assert {name.rpartition(".")[2] for name in changing} == {"down", "up", "weight", "bias"}
    assert sum(name.startswith("classifier") for name in changing) == 2
    assert frozen.stat().st_size > 8 * (folder / "model.safetensors").stat().st_size
    of_checkpoint = sum(path.stat().st_size for path in folder.glob("*"))
    assert of_checkpoint < frozen.stat().st_size / 3
    model, loading = BertForSequenceClassification.from_pretrained(
        run.directory / "model", output_loading_info=True
    )
    assert not any(loading.values()), loading
    base = load_file(frozen)
    name = "bert.encoder.layer.0.attention.self.query"
    up, down = (changing[f"{name}.parametrizations.weight.0.{part}"] for part in ("up", "down"))
    added = base[f"{name}.parametrizations.weight.original"] + up @ down
    torch.testing.assert_close(model.get_submodule(name).weight.detach(), added)
    assert float((up @ down).abs().max()) > 1e-3
