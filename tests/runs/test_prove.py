"""`recipes prove` on an unchanged recipe: each check passes, and the receipt says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.tools.prove.command import main
from common.tools.prove.instruments.updates import COMPARED_UPDATE
from common.tools.prove.layouts.compared_runs import UPDATES
from common.tools.prove.layouts.comparison import updates_of
from common.tools.prove.layouts.process_runs import STOPPED_AFTER
from common.tools.prove.receipt import read_receipt
from common.tools.prove.records.observed_run import ObservedRun, read_processes
from common.tools.prove.records.run_records import Interruption, MicroBatch
from tests.launch import REPOSITORY
from tests.unit.data.test_parquet import images_folder

RECIPE = REPOSITORY / "recipes" / "mnist_mlp.py"


@pytest.mark.slow
def test_a_recipe_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It learns, and its bits are the same when repeated and after each kind of interruption."""
    receipt_path = tmp_path / "proof.json"
    folder = tmp_path / "runs"
    words = [str(RECIPE), "--hidden-sizes", "32", "--dropout", "0.1"]
    words += ["--checks", "learns,repeatable,resumes"]
    main([*words, "--output", str(receipt_path), "--folder", str(folder)])
    output = capsys.readouterr().out
    receipt = read_receipt(receipt_path)
    assert receipt.passed, output
    assert receipt.environment is not None
    assert receipt.processor == receipt.environment.processor
    assert [result.passed for result in receipt.checks] == [True, True, True]
    assert "3 of 3 checks passed (learns, repeatable, resumes)" in output.splitlines()[-2]
    processes = read_processes(folder / "interrupted")
    assert [len(process.of(Interruption)) for process in processes] == [1, 1, 1, 1, 1, 0]
    # The interrupted launches together made each update, and none of them from the start.
    steps = [{step for step, _ in process.micro_batches} for process in processes]
    assert set().union(*steps) == {*range(receipt.updates)}
    assert min(steps[-1]) > 0
    (reference,) = read_processes(folder / "reference")
    assert {record.epoch for record in reference.of(MicroBatch)} == {0, 1, 2, 3}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("forking_python")
def test_a_recipe_that_streams_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The proof reads few samples of its blocks, so its updates are as few as without streaming."""
    receipt_path = tmp_path / "proof.json"
    data = images_folder(tmp_path / "data")
    words = [str(RECIPE), "--dataset", str(data), "--streaming", "--batch-size", "4"]
    words += ["--hidden-sizes", "32", "--checks", "resumes,samples", "--updates", "16"]
    main([*words, "--output", str(receipt_path), "--folder", str(tmp_path / "runs")])
    receipt = read_receipt(receipt_path)
    assert receipt.passed, capsys.readouterr().out
    assert receipt.updates == 16
    samples = receipt.checks[1].compared
    assert samples.startswith("36 training samples")
    assert "whole epochs: 4 of reference, 1 of divided, 1 of two-processes, 4 of interr" in samples
    assert receipt.code[0].commit is not None


@pytest.mark.slow
@pytest.mark.usefixtures("forking_python")
def test_a_recipe_with_batch_norm_is_compared_in_float64(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One process and two agree more closely than they could in fp32.

    The recipe computes its whitening filters in fp32 before the training. On some CPUs, their last
    bits depend on the number of threads, and that is another one if two processes share the cores.
    """
    receipt_path = tmp_path / "proof.json"
    folder = tmp_path / "runs"
    words = [str(REPOSITORY / "recipes" / "cifar10_fast.py"), "--widths", "8", "8"]
    words += ["--checks", "processes", "--output", str(receipt_path), "--folder", str(folder)]
    main(words)
    receipt = read_receipt(receipt_path)
    assert receipt.passed, capsys.readouterr().out
    assert "in float64, as BatchNorm2d amplifies rounding" in receipt.checks[0].compared
    assert receipt.environment is not None  # although no check needed the reference run
    losses = []
    first, *resumed = read_processes(folder / "from-one-to-two-in-float64")
    assert max(step for step, _ in first.micro_batches) == STOPPED_AFTER - 1
    for process in resumed:  # two processes make the update whose weights are compared
        assert min(step for step, _ in process.micro_batches) == COMPARED_UPDATE - 1
    for name in ("divided-in-float64", "two-processes-in-float64"):
        processes = read_processes(folder / name)
        run = ObservedRun(name, folder / name, processes, seconds=0.0, command="")
        losses.append([update.loss for update in updates_of(run).values()])
    assert len(losses[0]) == UPDATES
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
