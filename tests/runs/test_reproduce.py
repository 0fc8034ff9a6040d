"""`recipes reproduce` on real runs: equal bits, a cause that is named, and an interruption."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.harness.edited_recipe import edited_once
from common.run_directory.provenance import saved_attempts
from common.tools.compare.readers.run_record import RunRecord
from common.tools.launching.launched_run import LaunchedRun
from common.tools.reproduce.command import main
from common.tools.reproduce.conclusion import ANOTHER_EXPERIMENT, BEYOND_TOLERANCE
from common.tools.reproduce.receipt import Reproduction, read_receipt
from tests.git_repository import commit_all, git
from tests.jobs import Job
from tests.launch import REPOSITORY, Runner

FLAGS = (
    *("--dataset", "digits", "--batch-size", 64, "--hidden-sizes", 32, "--dropout", 0.1),
    *("--log-every", 3, "--checkpoint-every", 4, "--tracker", "none"),
)
SHORT = (*FLAGS, "--max-steps", 12)


def reproduce(*words: object, status: int = 0) -> Reproduction:
    """Reproduce a run, and return the receipt."""
    words = tuple(map(str, words))
    if status:
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == status
    else:
        main(words)
    output = f"{words[0]}-reproduced"
    if "--output-dir" in words:
        output = str(words[words.index("--output-dir") + 1])
    receipt = read_receipt(Path(output))
    assert receipt is not None
    return receipt


@pytest.mark.slow
@pytest.mark.usefixtures("forking_python")
def test_run_of_a_dirty_tree_is_reproduced(runner: Runner, tmp_path: Path) -> None:
    """A run is reproduced in its own tree, then from commit and patch; a changed flag is named."""
    code = tmp_path / "code"
    code.mkdir()
    text = (REPOSITORY / "recipes" / "mnist_mlp.py").read_text()
    (code / "train.py").write_text(text)
    commit_all(code)
    # An uncommitted change, which needs a file that git does not track.
    edits = [
        ("nn.ReLU()", "activation()"),
        ("import torch\n", "import torch\nfrom shapes import activation\n"),
    ]
    (code / "train.py").write_text(edited_once(text, edits))
    (code / "shapes.py").write_text("from torch.nn import GELU as activation\n")
    run = runner.run(code / "train.py", *SHORT, all_cores=True)
    receipt = reproduce(run.directory)
    assert receipt.result == "equal bits"
    assert receipt.differences == []
    assert receipt.rows is not None
    assert receipt.weights is not None
    assert (receipt.rows.rows, receipt.weights.checkpoints) == (4, 3)
    assert receipt.weights.exported_is_equal is True
    # The change is undone, and the other file is another one now.
    (code / "train.py").write_text(text)
    (code / "shapes.py").write_text("raise ValueError\n")
    elsewhere = tmp_path / "elsewhere"
    receipt = reproduce(run.directory, "--output-dir", elsewhere)
    assert receipt.result == "equal bits"
    assert "with the saved patch, in a temporary worktree" in receipt.code
    assert (code / "train.py").read_text() == text
    assert git(code, "worktree", "list").count("\n") == 0
    other = tmp_path / "other"
    receipt = reproduce(
        *(run.directory, "--learning-rate", 0.00101, "--output-dir", other, "--tolerance", 0.5),
        status=ANOTHER_EXPERIMENT,
    )
    assert [difference.fact for difference in receipt.differences] == ["--learning-rate"]
    assert receipt.rows is not None
    assert receipt.rows.first is not None
    assert receipt.rows.first.update == 3
    sentence = "this is a different experiment: --learning-rate was 0.001 and is 0.00101"
    assert receipt.explanation == sentence


@pytest.mark.slow
@pytest.mark.usefixtures("forking_python")
def test_published_run_is_reproduced(runner: Runner, tmp_path: Path) -> None:
    """A published run is reproduced in a clone at another place, without the run's directory."""
    code = tmp_path / "code"
    code.mkdir()
    text = (REPOSITORY / "recipes" / "mnist_mlp.py").read_text()
    (code / "train.py").write_text(text)
    commit_all(code)
    (code / "train.py").write_text(edited_once(text, [("nn.ReLU()", "nn.GELU()")]))
    run = runner.run(code / "train.py", *SHORT, all_cores=True)
    published = code / "results" / "first"
    main([str(run.directory), "--publish", str(published)])
    shutil.rmtree(run.directory)
    (code / "train.py").write_text(text)
    clone = tmp_path / "clone"
    code.rename(clone)
    output = tmp_path / "again"
    receipt = reproduce(clone / "results" / "first", "--output-dir", output)
    assert receipt.result == "equal bits"
    assert receipt.differences == []
    assert receipt.weights is not None
    assert receipt.weights.checkpoints == 3
    assert receipt.weights.exported_is_equal is True


@pytest.mark.slow
@pytest.mark.usefixtures("forking_python")
def test_resume_on_one_process_is_a_cause(
    runner: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resume on one process is named as a cause; the new run trains like the last attempt."""
    directory = tmp_path / "run"
    flags = (*FLAGS, "--max-steps", 900, "--checkpoint-every", 50, "--output-dir", directory)
    job = Job(runner, "mnist_mlp", *flags, directory=directory, launcher="two forks")
    job.wait_for_step(50)
    job.wait_until(lambda: bool(saved_attempts(directory)))
    job.kill()
    runner.run("mnist_mlp", "--resume", directory, output_directory=False, all_cores=True)
    first, last = saved_attempts(directory)
    assert (first.world_size, last.world_size) == (2, 1)
    assert "gradient_accumulation_steps" in last.changed_flags
    with suppress(SystemExit):  # the figures may be beyond the tolerance
        main([str(directory)])
    receipt = read_receipt(tmp_path / "run-reproduced")
    assert receipt is not None
    facts = {difference.fact for difference in receipt.differences}
    assert f"processes until update {last.global_step}" in facts
    assert receipt.exit_status in (0, BEYOND_TOLERANCE)
    printed = " ".join(capsys.readouterr().out.split())
    assert "resumed with processes: 1 instead of 2" in printed


@pytest.mark.slow
@pytest.mark.usefixtures("forking_python")
def test_two_processes_are_reproduced(runner: Runner) -> None:
    """A run of two processes is reproduced by `accelerate launch`."""
    run = runner.run("mnist_mlp", *SHORT, launcher="two forks")
    receipt = reproduce(run.directory)
    assert receipt.result == "equal bits"
    assert "--num_processes 2" in receipt.command
    assert receipt.differences == []


@pytest.mark.slow
@pytest.mark.usefixtures("forking_python")
def test_interrupted_reproduction_goes_on(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C stops the new run, which saves itself. The same command finishes it."""
    run = runner.run("mnist_mlp", *FLAGS, "--max-steps", 300, all_cores=True)
    output = run.directory.with_name("run-reproduced")
    follow = LaunchedRun.follow

    def follow_until_interrupted(trial: LaunchedRun) -> Iterator[RunRecord]:
        for record in follow(trial):
            yield record
            if record.last_step >= 3:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LaunchedRun, "follow", follow_until_interrupted)
        interrupted = reproduce(run.directory, status=130)
    assert interrupted.result == "running"
    assert "stopped: continue with the same command" in capsys.readouterr().out
    receipt = reproduce(run.directory)
    assert receipt.result == "equal bits"
    assert receipt.rows is not None
    assert receipt.rows.rows == len(run.metrics)
    assert receipt.began == interrupted.began
    assert (
        "resuming"
        in (output / "output.log").read_text() + output.with_name("run-reproduced.log").read_text()
    )
