"""Data that are read while training: cut off and gone on with, on as many processes or fewer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import first
from tests.jobs import RECORDED, Job, final_weights, learned, newest_step, recorded
from tests.launch import REPOSITORY, Runner
from tests.unit.data.test_parquet import images_folder

RECIPE = REPOSITORY / "recipes" / "mnist_mlp.py"
UPDATES = 12  # of an epoch: 16 of 203 samples each
EPOCHS = 8
FLAGS = (
    *("--streaming", "--epochs", EPOCHS, "--batch-size", 8, "--checkpoint-every", 3),
    *("--log-every", 4, "--hidden-sizes", 32, "--dropout", 0.2, "--tracker", "none"),
)


@pytest.mark.parametrize("launcher", first(1, ["python", "two"]))
def test_each_sample_once_an_epoch_after_a_kill(
    runner: Runner, tmp_path: Path, launcher: str
) -> None:
    """Two processes are killed; two end with the same bits, and one sees the same samples."""
    flags = ("--dataset", images_folder(tmp_path / "data"), *FLAGS)
    whole_folder, folder, directory = tmp_path / "whole", tmp_path / "killed", tmp_path / "run"
    whole = runner.run(RECORDED, whole_folder, RECIPE, *flags, launcher="two")
    job = Job(runner, RECORDED, folder, RECIPE, *flags, "--output-dir", directory,
              directory=directory, launcher="two")  # fmt: skip
    job.wait_until(lambda: newest_step(directory) > UPDATES)
    job.kill()
    found = newest_step(directory)
    assert UPDATES < found < EPOCHS * UPDATES, "the kill came too late"
    job = Job(runner, RECORDED, folder, RECIPE, "--resume", directory, directory=directory,
              launcher=launcher)  # type: ignore[arg-type]  # fmt: skip
    assert job.end() == 0, job.said()
    expected, _, _ = recorded(whole_folder)
    record, beginnings, _ = recorded(folder)
    assert beginnings == [(0, 0), divmod(found, UPDATES)]
    updates = [
        {
            (epoch, update): {
                sample
                for (*key, _, _), samples in made.items()
                if key == [epoch, update]
                for sample in samples
            }
            for epoch in range(EPOCHS)
            for update in range(UPDATES)
        }
        for made in (expected, record)
    ]
    assert updates[0] == updates[1]
    for number in range(EPOCHS):
        epoch = [sample for (e, _), made in updates[1].items() if e == number for sample in made]
        assert len(epoch) == len({*epoch}) == UPDATES * 16
    if launcher == "two":
        assert learned(directory) == learned(whole.directory)
        assert final_weights(directory) == final_weights(whole.directory)
