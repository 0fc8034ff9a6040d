"""The recipes on pretended platforms: they train, stop, resume and report mistakes."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import pytest

from tests.conftest import first
from tests.jobs import final_weights, rows_without_clock
from tests.launch import Finished, Runner
from tests.platforms.pretended import PLATFORMS, Platform, PretendedJob, launch, launch_fork

TINY = ("--dataset", "digits", "--tracker", "none", "--max-steps", 4, "--log-every", 2)
TINY_OF = {
    "mnist_mlp": (*TINY, "--batch-size", 32),
    "resnet": (*TINY, "--batch-size", 8),
    "bert": (*TINY[2:], "--batch-size", 8, "--max-length", 16),  # and small texts
}
# Long enough to be stopped, with dropout, checkpoints in mid-epoch, and a worker process.
LONG = (
    *("--dataset", "digits", "--tracker", "none", "--epochs", 4, "--batch-size", 32),
    *("--dropout", 0.2, "--log-every", 3, "--checkpoint-every", 25, "--hidden-sizes", 64, 48),
    *("--data-placement", "workers", "--num-workers", 1),
    # Bits may depend on the number of threads. By default, it is the number of usable cores on
    # Linux, and of all cores on other systems.
    *("--num-threads", 1),
)
# The signals that stand for Ctrl-Break on Windows and Ctrl-C on macOS.
REQUESTS: tuple[tuple[Platform, signal.Signals, str], ...] = (
    ("windows", signal.SIGUSR1, "SIGBREAK"),
    ("macos", signal.SIGINT, "SIGINT"),
)


@pytest.mark.parametrize("pretended", first(1, itertools.product(PLATFORMS, TINY_OF), in_ci=3))
def test_first_command_trains(
    pretended: tuple[Platform, str], runner: Runner, thin_resnet: Path, odd_text: Path
) -> None:
    """A recipe trains on the platform and prints one line about the features it lacks.

    Its output has only symbols of the platform's encoding.
    """
    platform, recipe = pretended
    script = thin_resnet if recipe == "resnet" else recipe
    flags = (*TINY_OF[recipe], *(("--dataset", odd_text) if recipe == "bert" else ()))
    assert_trained(launch_fork(runner, platform, script, *flags), platform)


@pytest.mark.slow
@pytest.mark.parametrize("platform", PLATFORMS)
def test_fresh_interpreter_trains(platform: Platform, runner: Runner) -> None:
    """The same holds in a fresh interpreter, which also warns of default encodings."""
    assert_trained(launch(runner, platform, "mnist_mlp", *TINY_OF["mnist_mlp"]), platform)


def assert_trained(run: Finished, platform: Platform) -> None:
    """Check what a run on a platform printed, and that it left a model and nothing unfinished."""
    assert run.summary["progress/global_step"] == 4
    assert run.output.count("system  ") == 1, run.output
    assert ("->" if platform == "windows" else "→") in run.output
    assert "\\u" not in run.output
    assert "Warning" not in run.errors
    assert (run.directory / "model" / "model.safetensors").exists()
    assert not [*run.directory.rglob("*.unfinished"), *run.directory.rglob("*.superseded")]


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "number", "name"), REQUESTS)
def test_stopped_run_resumes_to_the_same_bits(
    platform: Platform, number: int, name: str, runner: Runner, tmp_path: Path
) -> None:
    """A run stopped during training saves, and resumes to the bits of an unbroken run on Linux.

    The worker processes of the unbroken run are forked and not spawned.
    """
    whole = runner.shared("mnist_mlp", *LONG)
    directory = tmp_path / "run"
    flags = (*LONG, "--output-dir", directory)
    job = PretendedJob(runner, platform, "mnist_mlp", *flags, directory=directory)
    assert job.stop_after("step 9/", number) == 75, job.printed()
    assert f"by {name}; everything is saved" in job.printed()
    assert job.read("status.json")["status"] == "preempted"
    resumed = PretendedJob(
        runner, platform, "mnist_mlp", "--resume", directory, directory=directory
    )
    assert resumed.end() == 0, resumed.printed()
    assert final_weights(directory) == final_weights(whole.directory)
    assert rows_without_clock(directory) == rows_without_clock(whole.directory)


@pytest.mark.parametrize("platform", first(0, PLATFORMS))
def test_help_is_printed_in_ascii(platform: Platform, runner: Runner) -> None:
    """`--help` replaces frames and symbols by ASCII characters where the output is ASCII."""
    run = launch_fork(
        runner, platform, "resnet", "--help", encoding="ascii", output_directory=False
    )
    assert "--learning-rate" in run.output
    assert run.output.isascii()
    assert "\\u" not in run.output


@pytest.mark.slow
@pytest.mark.parametrize("platform", PLATFORMS)
def test_mistake_is_a_sentence(platform: Platform, runner: Runner) -> None:
    """A mistake ends in a sentence and not in a traceback about a feature that is missing."""
    for flags in (("--dataset", "no/such/folder"), ("--batch-size", 0), ("--resume", "nothing")):
        run = launch_fork(runner, platform, "mnist_mlp", *flags, succeeds=False)
        assert run.returncode == 1
        assert "error: " in run.errors, run.explain()
        assert "Traceback" not in run.errors, run.explain()
