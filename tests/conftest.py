"""What all tests share: a clean environment, a launcher, and runs that several tests look at."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling, Scheduling

from tests import local_data
from tests.launch import FOREIGN, UNREACHABLE, Finished, Runner, clean_environment

# Now, before a test module imports a library that reads its settings when it is imported.
ROOT = tempfile.TemporaryDirectory(prefix="recipe-tests-")
for _name in [name for name in os.environ if name.startswith(FOREIGN)]:
    del os.environ[_name]
os.environ.update(clean_environment(Path(ROOT.name)))

# Modules whose tests look at no common run, so that any of pytest's workers can take each.
SPREAD = {
    "test_attempts",
    "test_batch_size",
    "test_command_line",
    "test_data",
    "test_faults",
    "test_resume",
}
SHARE_WITH = {"test_launch_configs": "test_equivalence"}  # its runs
# Updates of a learning rate that rises over the first three, 64 samples each, fp32, no dropout:
# what is left to differ between two ways of making the same update is rounding.
SAME_UPDATES = (
    *("--epochs", 3, "--warmup-steps", 3, "--log-every", 1, "--learning-rate", 3e-3),
    *("--mixed-precision", "no", "--dropout", 0),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    """Give the tests out to pytest's workers."""
    return KeepTogether(config, log)


class KeepTogether(LoadScopeScheduling):
    """Keeps on one worker what looks at the same runs."""

    def _split_scope(self, nodeid: str) -> str:
        """Return the name of the tests that belong together."""
        module = Path(nodeid.partition("::")[0]).stem
        return nodeid if module in SPREAD else SHARE_WITH.get(module, module)


@pytest.fixture(scope="session")
def runner() -> Iterator[Runner]:
    """Launch recipes with caches that the whole session shares."""
    yield Runner(Path(ROOT.name))
    ROOT.cleanup()


@pytest.fixture(scope="session")
def odd_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images whose splits have odd sizes."""
    return local_data.write_odd_images(tmp_path_factory.mktemp("data") / "odd-images")


@pytest.fixture(scope="session")
def odd_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sentences whose splits have odd sizes."""
    return local_data.write_odd_text(tmp_path_factory.mktemp("data") / "odd-text")


# Runs that learn.


@pytest.fixture(scope="session")
def learned_mlp(runner: Runner) -> Finished:
    """The bare command where the Hub does not answer, without a W&B key; shorter than default."""
    return runner.run(
        *("mnist_mlp", "--batch-size", 128, "--epochs", 15, "--log-every", 20),
        environment={"HF_HUB_OFFLINE": None, "HF_ENDPOINT": UNREACHABLE},
        all_cores=True,
    )


@pytest.fixture(scope="session")
def learned_resnet(runner: Runner) -> Finished:
    """ResNet-18 on digits, for few epochs of small batches."""
    flags = ("--epochs", 3, "--batch-size", 64, "--log-every", 20)
    flags = (*flags, "--dataset", "digits", "--tracker", "none")
    return runner.run("resnet", *flags)


@pytest.fixture(scope="session")
def learned_bert(runner: Runner) -> Finished:
    """A small BERT from scratch on docstrings, for few epochs at a high rate."""
    flags = ("--epochs", 4, "--learning-rate", 1e-3, "--log-every", 40)
    flags = (*flags, "--dataset", "docstrings", "--tracker", "none")
    return runner.run("bert", *flags)


# One update made in different ways.


@pytest.fixture(scope="session")
def whole_mlp(runner: Runner, odd_images: Path) -> Finished:
    """Batches of 64 on one process, launched with `cpu.yaml`."""
    flags = ("--dataset", odd_images, *SAME_UPDATES, "--tracker", "none")
    flags = (*flags, "--batch-size", 64)
    return runner.run("mnist_mlp", *flags, launcher="cpu", all_cores=True)


@pytest.fixture(scope="session")
def accumulated_mlp(runner: Runner, odd_images: Path) -> Finished:
    """Twice 32 accumulated on one process."""
    flags = ("--dataset", odd_images, *SAME_UPDATES, "--tracker", "none")
    accumulation = ("--batch-size", 32, "--gradient-accumulation-steps", 2)
    return runner.run("mnist_mlp", *flags, *accumulation)


@pytest.fixture(scope="session")
def distributed_mlp(runner: Runner, odd_images: Path) -> Finished:
    """32 on each of two processes."""
    flags = ("--dataset", odd_images, *SAME_UPDATES, "--tracker", "none")
    return runner.run("mnist_mlp", *flags, "--batch-size", 32, launcher="two")


@pytest.fixture(scope="session")
def whole_bert(runner: Runner, odd_text: Path) -> Finished:
    """Batches of 32 on one process."""
    flags = ("--dataset", odd_text, *SAME_UPDATES, "--tracker", "none")
    return runner.run("bert", *flags, "--batch-size", 32)


@pytest.fixture(scope="session")
def accumulated_bert(runner: Runner, odd_text: Path) -> Finished:
    """Twice 16 accumulated on one process."""
    flags = ("--dataset", odd_text, *SAME_UPDATES, "--tracker", "none")
    accumulation = ("--batch-size", 16, "--gradient-accumulation-steps", 2)
    return runner.run("bert", *flags, *accumulation)


@pytest.fixture(scope="session")
def distributed_bert(runner: Runner, odd_text: Path) -> Finished:
    """16 on each of two processes."""
    flags = ("--dataset", odd_text, *SAME_UPDATES, "--tracker", "none")
    return runner.run("bert", *flags, "--batch-size", 16, launcher="two")


@pytest.fixture(scope="session")
def accumulated_resnet(runner: Runner, odd_images: Path) -> Finished:
    """Twice 16 accumulated on one process, four updates."""
    return runner.run(
        *("resnet", "--dataset", odd_images, "--max-steps", 4, "--log-every", 1),
        *("--mixed-precision", "no", "--tracker", "none", "--learning-rate", 0.01),
        *("--batch-size", 16, "--gradient-accumulation-steps", 2),
    )


@pytest.fixture(scope="session")
def distributed_resnet(runner: Runner, odd_images: Path) -> Finished:
    """16 on each of two processes, four updates."""
    return runner.run(
        *("resnet", "--dataset", odd_images, "--max-steps", 4, "--log-every", 1),
        *("--mixed-precision", "no", "--tracker", "none", "--learning-rate", 0.01),
        *("--batch-size", 16),
        launcher="two",
    )
