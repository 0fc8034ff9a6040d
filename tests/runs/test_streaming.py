"""Runs that stream their data resume after a kill, on as many processes or fewer."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tests.conftest import first
from tests.jobs import (
    SAMPLE_RECORDER,
    Job,
    RecordedSamples,
    final_weights,
    newest_step,
    recorded_samples,
    rows_without_clock,
)
from tests.launch import REPOSITORY, Runner
from tests.unit.data.test_parquet import images_folder

RECIPE = REPOSITORY / "recipes" / "mnist_mlp.py"
UPDATES = 12  # of an epoch: 16 of 203 samples each
EPOCHS = 5
FLAGS = (
    *("--streaming", "--epochs", EPOCHS, "--batch-size", 8, "--checkpoint-every", 3),
    *("--log-every", 4, "--hidden-sizes", 32, "--dropout", 0.2, "--tracker", "none"),
)


@pytest.mark.parametrize("launcher", first(0, ["two forks", "fork"], in_ci=1))
def test_each_sample_once_an_epoch_after_a_kill(
    runner: Runner, tmp_path: Path, launcher: str
) -> None:
    """A killed run of two processes sees each sample of an epoch once when it resumes.

    Two processes end with the same bits, and one process makes updates of the same samples.
    """
    flags = ("--dataset", images_folder(tmp_path / "data"), *FLAGS)
    whole_folder = tmp_path / "whole"
    folder = tmp_path / "killed"
    directory = tmp_path / "run"
    whole = runner.run(SAMPLE_RECORDER, whole_folder, RECIPE, *flags, launcher="two forks")
    job = Job(runner, SAMPLE_RECORDER, folder, RECIPE, *flags, "--output-dir", directory,
              directory=directory, launcher="two forks")  # fmt: skip
    job.wait_until(lambda: newest_step(directory) > UPDATES)
    job.kill()
    saved_step = newest_step(directory)
    assert UPDATES < saved_step < EPOCHS * UPDATES, "the kill came too late"
    job = Job(runner, SAMPLE_RECORDER, folder, RECIPE, "--resume", directory, directory=directory,
              launcher=launcher)  # type: ignore[arg-type]  # fmt: skip
    assert job.end() == 0, job.printed()
    expected, _, _ = recorded_samples(whole_folder)
    record, beginnings, _ = recorded_samples(folder)
    assert beginnings == [(0, 0), divmod(saved_step, UPDATES)]
    samples_of_updates = samples_by_update(record)
    assert samples_of_updates == samples_by_update(expected)
    for epoch in range(EPOCHS):
        samples: list[int] = []
        for update in range(UPDATES):
            samples += samples_of_updates[epoch, update]
        assert len(samples) == len({*samples}) == UPDATES * 16
    if launcher == "two forks":
        assert rows_without_clock(directory) == rows_without_clock(whole.directory)
        assert final_weights(directory) == final_weights(whole.directory)


def samples_by_update(record: RecordedSamples) -> dict[tuple[int, int], set[int]]:
    """Return the samples of each (epoch, update), of all ranks and micro-batches together."""
    samples_of_updates: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for (epoch, update, _, _), samples in record.items():
        samples_of_updates[epoch, update].update(samples)
    return dict(samples_of_updates)
