"""A copy of an example that trains on an `IterableDataset` is killed and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.edited_copies import edited
from tests.jobs import Job, final_weights, newest_step, rows_without_clock
from tests.launch import REPOSITORY, Runner

EXAMPLE = REPOSITORY / "examples" / "own_dataset.py"
TRAIN = '"train": Digits(True, config.noise)'
STREAM = '"train": IterableSamples(HubDataset.from_generator(one_by_one))'
IMPORTS = """from common.data.iterable import IterableSamples
from datasets import IterableDataset as HubDataset


def one_by_one():
    digits = Digits(False, 0.0)
    yield from (digits[sample] for sample in range(len(digits)))


class Digits("""


@pytest.mark.slow
def test_run_on_an_iterable_dataset_resumes(runner: Runner, tmp_path: Path) -> None:
    """Two killed processes resume to the same bits; a resume on one process is refused."""
    recipe = edited(EXAMPLE, tmp_path, (TRAIN, STREAM), ("class Digits(", IMPORTS))
    flags = ("--batch-size", 16, "--checkpoint-every", 4, "--log-every", 5, "--tracker", "none")
    flags = (*flags, "--max-steps", 100)
    whole = runner.run(recipe, *flags, launcher="two forks")
    directory = tmp_path / "run"
    again: tuple[object, ...] = (*flags, "--output-dir", directory)
    job = Job(runner, recipe, *again, directory=directory, launcher="two forks")
    job.wait_for_step(20)
    job.kill()
    assert newest_step(directory) < 100, "the kill came too late"
    refused = runner.run(recipe, "--resume", directory, output_directory=False, succeeds=False)
    assert "resume the run with 2 processes" in refused.errors
    job = Job(runner, recipe, "--resume", directory, directory=directory, launcher="two forks")
    assert job.end() == 0, job.printed()
    assert rows_without_clock(directory) == rows_without_clock(whole.directory)
    assert final_weights(directory) == final_weights(whole.directory)
    whole = runner.run(recipe, *flags[:-2], succeeds=False)
    assert "pass --max-steps" in whole.errors
