"""Shared by all tests: a clean environment, a launcher, and runs that several tests look at."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import execnet
import pytest
from filelock import FileLock
from hypothesis import settings

from tests import local_data
from tests.launch import (
    FOREIGN,
    UNREACHABLE,
    Finished,
    Runner,
    clean_environment,
    without_accelerator,
)
from tests.thin_resnet import write_thin_resnet

if TYPE_CHECKING:
    from tests.cuda_stand_in import Cuda, Nvml

# By default, Hypothesis fails a test whose example takes 0.2 s, as any may on a busy machine.
settings.register_profile("without a deadline", deadline=None)
settings.load_profile("without a deadline")

# Set the environment now, before a test module imports a library that reads its settings on import.
# The main process of pytest makes the folder and passes its path to its workers.
HANDED_DOWN = "RECIPE_TESTS_FOLDER"
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
TEMPORARY = None if IS_WORKER else tempfile.TemporaryDirectory(prefix="recipe-tests-")
FOLDER = Path(os.environ[HANDED_DOWN] if TEMPORARY is None else TEMPORARY.name)
for _name in [name for name in os.environ if name.startswith(FOREIGN)]:
    del os.environ[_name]
os.environ.update({**clean_environment(FOLDER), HANDED_DOWN: str(FOLDER)})
# A shell that starts pytest in the background (`pytest &`) makes it ignore Ctrl-C. The processes of
# tests would inherit this, and a search that a test interrupts would go on.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests of features that only POSIX has: terminals, process groups, limits, mounted file systems.
OF_POSIX = (
    "runs/test_faults.py",
    "runs/test_machines.py",
    "runs/test_slurm.py",
    "runs/test_template.py",
    "runs/test_benchmarks.py",
    "runs/test_streaming.py",
    "fuzz/test_numbers.py",
    "fuzz/test_paths.py",
    "generated/test_generated_copies.py",
    "platforms/test_pretended.py",
    "unit/training/test_signals.py",
)
collect_ignore = [*OF_POSIX] if os.name == "nt" else []
# Single tests that send POSIX signals, make named pipes, or make links, for which Windows may ask
# for a permission.
NEED_POSIX = {
    "test_texts_are_not_read_from_what_never_ends",
    "test_mistakes_are_sentences",
    "test_pipe_in_the_place_of_a_file",
    "test_killed_worker_is_a_lost_process",
    "test_workers_ignore_what_asks_a_job_to_stop",
    "test_trial_that_is_killed_is_explained",
    "test_signal_ends_the_training_of_a_vocabulary",
}

HUB_TOKEN = "hf_TokenOfTheEnvironment"
# Updates of 64 samples in fp32 without dropout, whose learning rate rises over the first three. Two
# ways of making the same update then differ only by rounding.
SAME_UPDATES = (
    *("--epochs", 3, "--warmup-steps", 3, "--log-every", 1, "--learning-rate", 3e-3),
    *("--mixed-precision", "no", "--dropout", 0),
)
SHIFTED_UPDATES = (*SAME_UPDATES, "--max-shift", 2)  # of images, in training

# The slowest fixtures below.
SHARED_RUNS = {
    "learned_mlp",
    "learned_resnet",
    "learned_bert",
    "whole_mlp",
    "whole_bert",
    "accumulated_bert",
    "distributed_bert",
    "distributed_mlp",
    "distributed_resnet",
}


def first(count: int, values: Iterable[Any], in_ci: int | None = None) -> list[Any]:
    """Return parameters for a test: the first `count` run by default, the others are slow tests.

    With `in_ci`, the first `in_ci` run by default or are slow, and the others are exhaustive tests.
    """
    parameters: list[Any] = []
    for number, value in enumerate(values):
        if number < count:
            parameters.append(value)
        elif in_ci is None or number < in_ci:
            parameters.append(pytest.param(value, marks=pytest.mark.slow))
        else:
            parameters.append(pytest.param(value, marks=pytest.mark.exhaustive))
    return parameters


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests: first those that make shared runs, then slow ones, so that no worker waits.

    pytest-xdist cuts the list into equal parts, one for each worker. A worker that has finished its
    part takes tests from the others. So each part gets its share of shared, slow and other tests.
    """
    for item in items:
        if item.get_closest_marker("exhaustive") is not None:
            item.add_marker(pytest.mark.slow)
        if os.name == "nt" and getattr(item, "originalname", "") in NEED_POSIX:
            item.add_marker(pytest.mark.skip(reason="this system is not POSIX"))
    shared: list[pytest.Item] = []
    slow: list[pytest.Item] = []
    rest: list[pytest.Item] = []
    known: set[str] = set()
    for item in items:
        names = {*item.fixturenames} & SHARED_RUNS  # type: ignore[attr-defined]
        is_slow = item.get_closest_marker("slow") is not None
        if names - known:
            shared.append(item)
        elif is_slow:
            slow.append(item)
        else:
            rest.append(item)
        known.update(names)
    long = [*shared, *slow]
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        first_short = worker * len(rest) // workers
        end_of_short = (worker + 1) * len(rest) // workers
        ordered += long[worker::workers]
        ordered += rest[first_short:end_of_short]
    items[:] = ordered


def is_plain(spec: execnet.XSpec) -> bool:
    """Whether a worker would be started as by ``-n``: on this machine, with this interpreter."""
    return bool(spec.popen) and not (spec.python or spec.via or spec.chdir)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[execnet.XSpec]) -> None:
    """Start the workers as forks of the template, which has already imported the libraries.

    This process stays connected to the template, so the template lasts as long as the workers.
    """
    if not hasattr(os, "pidfd_open") or not all(is_plain(spec) for spec in specs):
        return
    runner = Runner(FOLDER)
    config.add_cleanup(runner.close)
    script = Path(__file__).with_name("worker.py")
    command = shlex.join([str(runner.python), str(script), sys.executable])
    for spec in specs:
        spec.python = command


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the processor time of the tests' forks; with ``--durations``, also for each module.

    Other work on the machine lengthens the time of the clock, but not the processor's.
    """
    path = FOLDER / "processor-time.jsonl"
    if IS_WORKER or not path.exists():
        return
    costs = defaultdict[str, list[float]](list)
    for line in path.read_text().splitlines():
        test, seconds = json.loads(line)
        module = test.partition("::")[0]
        if module:  # else it is one of pytest's workers
            costs[module].append(seconds)
    if terminalreporter.config.option.durations is not None:
        for module, seconds in sorted(costs.items(), key=lambda pair: -sum(pair[1])):
            terminalreporter.line(f"{len(seconds):4} forks {sum(seconds):7.1f} s  {module}")
    count = sum(map(len, costs.values()))
    total = sum(map(sum, costs.values()))
    terminalreporter.line(f"{count} forks that took {total:.0f} s of processor time")


def pytest_unconfigure() -> None:
    """Remove the folder of the tests, once all of pytest's workers have ended."""
    if TEMPORARY is not None:
        TEMPORARY.cleanup()


@pytest.fixture
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether slow tests run, too. A test that generates its cases then tries all of them."""
    return "not slow" not in request.config.option.markexpr


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Pretend that there is a GPU."""
    from tests.cuda_stand_in import Cuda

    return Cuda(monkeypatch)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch, cuda: Cuda) -> Nvml:
    """Pretend that there is a GPU with its driver."""
    from tests.cuda_stand_in import Nvml

    return Nvml(monkeypatch)


@pytest.fixture
def hidden_test_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a run look for imported packages in its recipe's file only.

    pytest has imported hundreds of files, and reading them takes seconds.
    """
    from common.run_directory import provenance

    monkeypatch.setattr(provenance, "imported_files", set)


@pytest.fixture
def restored_sigterm() -> Iterator[None]:
    """Restore the handler of SIGTERM, which some commands and recipes in this process replace."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def runner() -> Iterator[Runner]:
    """Launches recipes, with caches and shared runs that all of pytest's workers use."""
    runner = Runner(FOLDER)
    yield runner
    runner.close()


@pytest.fixture
def forking_python(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the code under test start Python processes as forks that have the libraries imported.

    See `Runner.python`.
    """
    python = runner.python
    monkeypatch.setattr(sys, "executable", str(python))
    return python


@pytest.fixture(scope="session")
def odd_images() -> Path:
    """A folder of images whose splits have odd sizes."""
    folder = FOLDER / "odd-images"
    with FileLock(f"{folder}.lock"):
        return folder if folder.exists() else local_data.write_odd_images(folder)


@pytest.fixture(scope="session")
def odd_text() -> Path:
    """A folder of sentences whose splits have odd sizes."""
    folder = FOLDER / "odd-text"
    with FileLock(f"{folder}.lock"):
        return folder if folder.exists() else local_data.write_odd_text(folder)


@pytest.fixture(scope="session")
def thin_resnet() -> Path:
    """A ResNet recipe with an eighth of the channels."""
    folder = FOLDER / "thin"
    with FileLock(f"{folder}.lock"):
        return folder / "resnet.py" if folder.exists() else write_thin_resnet(folder)


@pytest.fixture
def own_accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a test build an Accelerator; remove it and its settings afterwards."""
    import torch
    from accelerate.state import AcceleratorState

    threads = torch.get_num_threads()
    benchmark = torch.backends.cudnn.benchmark
    for name in ("ACCELERATE_USE_CPU", "ACCELERATE_TORCH_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in without_accelerator().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = benchmark


@pytest.fixture
def quick_runs() -> Iterator[None]:
    """Make runs in the test's process quick; see `prepared`."""
    from tests.small_run import prepared

    with prepared():
        yield


# Runs that train until the loss has fallen.


@pytest.fixture(scope="session")
def learned_mlp(runner: Runner) -> Finished:
    """A run of the plain command without a Hub and without a W&B key, shorter than the default.

    The token is for `test_secrets`.
    """
    return runner.shared(
        *("mnist_mlp", "--batch-size", 128, "--epochs", 15, "--log-every", 20),
        launcher="accelerate",
        environment={
            "HF_HUB_OFFLINE": None,
            "HF_ENDPOINT": UNREACHABLE,
            "HF_TOKEN": HUB_TOKEN,
        },
        all_cores=True,
    )


@pytest.fixture(scope="session")
def learned_resnet(runner: Runner) -> Finished:
    """ResNet-18 on digits, with its default settings but four epochs."""
    flags = ("--epochs", 4, "--log-every", 10, "--dataset", "digits", "--tracker", "none")
    return runner.shared("resnet", *flags)


@pytest.fixture(scope="session")
def learned_bert(runner: Runner) -> Finished:
    """A small BERT from scratch, with its default settings for three of its four epochs."""
    return runner.shared("bert", "--epochs", 3, "--log-every", 40, "--dataset", "docstrings")


# The same updates, made in different ways.


@pytest.fixture(scope="session")
def whole_mlp(runner: Runner, odd_images: Path) -> Finished:
    """A run of the MLP with batches of 64 on one process."""
    flags = ("--dataset", odd_images, *SHIFTED_UPDATES, "--tracker", "none")
    return runner.shared("mnist_mlp", *flags, "--batch-size", 64)


@pytest.fixture(scope="session")
def accumulated_mlp(runner: Runner, odd_images: Path) -> Finished:
    """A run of the MLP that accumulates two batches of 32 on one process."""
    flags = ("--dataset", odd_images, *SHIFTED_UPDATES, "--tracker", "none")
    accumulation = ("--batch-size", 32, "--gradient-accumulation-steps", 2)
    return runner.shared("mnist_mlp", *flags, *accumulation)


@pytest.fixture(scope="session")
def distributed_mlp(runner: Runner, odd_images: Path) -> Finished:
    """A run of the MLP with batches of 32 on each of two processes."""
    flags = ("--dataset", odd_images, *SHIFTED_UPDATES, "--tracker", "none")
    return runner.shared("mnist_mlp", *flags, "--batch-size", 32, launcher="two forks")


@pytest.fixture(scope="session")
def whole_bert(runner: Runner, odd_text: Path) -> Finished:
    """A run of BERT with batches of 32 on one process."""
    flags = ("--dataset", odd_text, *SAME_UPDATES, "--tracker", "none")
    return runner.shared("bert", *flags, "--batch-size", 32)


@pytest.fixture(scope="session")
def accumulated_bert(runner: Runner, odd_text: Path) -> Finished:
    """A run of BERT that accumulates two batches of 16 on one process."""
    flags = ("--dataset", odd_text, *SAME_UPDATES, "--tracker", "none")
    accumulation = ("--batch-size", 16, "--gradient-accumulation-steps", 2)
    return runner.shared("bert", *flags, *accumulation)


@pytest.fixture(scope="session")
def distributed_bert(runner: Runner, odd_text: Path) -> Finished:
    """A run of BERT with batches of 16 on each of two processes."""
    flags = ("--dataset", odd_text, *SAME_UPDATES, "--tracker", "none")
    return runner.shared("bert", *flags, "--batch-size", 16, launcher="two forks")


@pytest.fixture(scope="session")
def accumulated_resnet(runner: Runner, odd_images: Path) -> Finished:
    """Three updates of the ResNet, which accumulates two batches of 16 on one process."""
    return runner.shared(
        *("resnet", "--dataset", odd_images, "--max-steps", 3, "--log-every", 1),
        *("--mixed-precision", "no", "--tracker", "none", "--learning-rate", 0.01),
        *("--batch-size", 16, "--gradient-accumulation-steps", 2),
    )


@pytest.fixture(scope="session")
def distributed_resnet(runner: Runner, odd_images: Path) -> Finished:
    """Three updates of the ResNet with batches of 16 on each of two processes."""
    return runner.shared(
        *("resnet", "--dataset", odd_images, "--max-steps", 3, "--log-every", 1),
        *("--mixed-precision", "no", "--tracker", "none", "--learning-rate", 0.01),
        *("--batch-size", 16),
        launcher="two forks",
    )
