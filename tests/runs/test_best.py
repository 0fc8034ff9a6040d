"""The best model is kept, whatever happens to the run. Test data never choose it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import first
from tests.edited_copies import edited
from tests.jobs import final_weights, rows_without_clock
from tests.launch import Finished, Runner

FLAGS = ("--dataset", "digits", "--tracker", "none", "--batch-size", 128)
OFTEN = ("--eval-every", 4, "--checkpoint-every", 4, "--keep-checkpoints", 100)
CHOOSING = (*FLAGS, *OFTEN, "--validation-share", 0.2, "--max-steps", 30)
BEST = 12


@pytest.fixture(scope="module")
def peaked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a recipe whose accuracy is best after update 12, and falls afterwards."""
    line = "    return sums.result()\n"
    worse = f"    worse = abs(run.progress.global_step - {BEST}) / 100\n"
    worse += '    return sums.result() | {"accuracy": -worse}\n'
    return edited("mnist_mlp", tmp_path_factory.mktemp("peaked"), (line, worse))


def assert_kept(run: Finished, directory: Path, step: int) -> None:
    """Check that `model/` holds the weights of the checkpoint of update `step`."""
    kept = load_file(directory / "model" / "model.safetensors")
    then = load_file(run.directory / "checkpoints" / f"step-{step:08d}" / "model.safetensors")
    assert {name for name in kept if not torch.equal(kept[name], then[name])} == set()
    assert json.loads((directory / "summary.json").read_text())["progress/kept_step"] == step
    assert json.loads((directory / "model" / "model.json").read_text())["update"] == step


def test_best_model_is_kept(peaked: Path, runner: Runner) -> None:
    """The run keeps the model of its best evaluation and not that of the last one."""
    run = runner.shared(peaked, *CHOOSING)
    assert_kept(run, run.directory, BEST)
    assert [*run.series("val/accuracy")] == [4, 8, 12, 16, 20, 24, 28, 30]
    assert run.summary["val/best_accuracy"] == 0
    marked = re.findall(r"step (\d+)  validation of \d+: .*★ best", run.output)
    assert marked == ["4", "8", "12"]
    assert "step 12  test of 360: " in run.output
    again = runner.run(*(peaked, *FLAGS, "--evaluate-only", "--init-from", run.directory))
    assert again.summary["test/loss"] == run.summary["test/loss"]
    assert len([*(run.directory / "checkpoints").glob("best-*")]) >= 1


KEEP = "run.keep(model=model, optimizer=optimizer, scheduler=scheduler)"
PREPARE = "accelerator.prepare(model, optimizer, scheduler)\n"
ZERO_GRAD = "                optimizer.zero_grad()\n"
FINISH = "run.finish(evaluate(run, model,"
# Averages of the weights that `run.keep` gets as networks, and that are evaluated in the end.
AVERAGED_MODEL = (
    (
        "import torch\nfrom torch import nn",
        "import torch\nfrom torch import nn\nfrom torch.optim.swa_utils import AveragedModel",
    ),
    (
        PREPARE,
        f"{PREPARE}        average = AveragedModel(accelerator.unwrap_model(model))\n",
    ),
    (KEEP, f"{KEEP[:-1]}, average=average)"),
    (ZERO_GRAD, f"{ZERO_GRAD}                average.update_parameters(model)\n"),
    (FINISH, "run.finish(evaluate(run, average,"),
)
DEEP_COPY = (
    ("import torch\nfrom torch", "import copy\nimport torch\nfrom torch"),
    (PREPARE, f"{PREPARE}        average = copy.deepcopy(accelerator.unwrap_model(model))\n"),
    (KEEP, f"{KEEP[:-1]}, average=average)"),
    (
        ZERO_GRAD,
        f"{ZERO_GRAD}                for mine, weight in zip(average.parameters(), "
        "model.parameters()):\n                    mine.detach().lerp_(weight.detach(), 0.1)\n",
    ),
    (FINISH, "run.finish(evaluate(run, average,"),
)
# An average in an object of the recipe's own, which is copied into the model to be evaluated.
OWN_AVERAGE = """class Average:
    def __init__(self, model):
        self.model = model
        self.values = {name: value.clone() for name, value in model.state_dict().items()}

    def update(self):
        for name, value in self.model.state_dict().items():
            self.values[name].lerp_(value, 0.1)

    def state_dict(self):
        return self.values

    def load_state_dict(self, values):
        self.values = values


def compute_loss("""
OWN_OBJECT = (
    ("def compute_loss(", OWN_AVERAGE),
    (PREPARE, f"{PREPARE}        average = Average(accelerator.unwrap_model(model))\n"),
    (KEEP, f"{KEEP[:-1]}, average=average)"),
    (ZERO_GRAD, f"{ZERO_GRAD}                average.update()\n"),
    (
        f"        {FINISH}",
        "        accelerator.unwrap_model(model).load_state_dict(average.values)\n"
        f"        {FINISH}",
    ),
)


@pytest.mark.parametrize(
    "edits", first(1, [DEEP_COPY, AVERAGED_MODEL], in_ci=1), ids=["a deep copy", "an AveragedModel"]
)
def test_evaluation_again_of_an_average_gives_the_same_figures(
    runner: Runner, tmp_path: Path, edits: tuple[tuple[str, str], ...]
) -> None:
    """`--evaluate-only` also evaluates an average of the weights that began as a copy."""
    copy = edited("mnist_mlp", tmp_path, *edits)
    run = runner.run(copy, *FLAGS, "--keep", "last")
    assert "head.weight" in run.weights()
    again = runner.run(copy, *FLAGS, "--evaluate-only", "--init-from", run.directory)
    assert "gives its weights to average of run.keep(...)" in again.output
    for name in ("loss", "accuracy"):
        assert again.summary[f"test/{name}"] == run.summary[f"test/{name}"], name


def test_evaluation_again_of_weights_that_are_not_loaded_is_refused(
    runner: Runner, tmp_path: Path
) -> None:
    """An average in an object of the recipe's own would put random weights into the model."""
    copy = edited("mnist_mlp", tmp_path, *OWN_OBJECT)
    run = runner.run(copy, *FLAGS, "--keep", "last")
    flags = ("--evaluate-only", "--init-from", run.directory)
    again = runner.run(copy, *FLAGS, *flags, succeeds=False)
    assert (
        "the network to evaluate has weights that the model had before --init-from" in again.errors
    )
    assert "Traceback" not in again.errors


@pytest.mark.parametrize("last", first(1, [8, 16]))
def test_resumed_run_keeps_the_same(
    peaked: Path, runner: Runner, tmp_path: Path, last: int
) -> None:
    """A run killed before or after its best evaluation keeps the same model when resumed."""
    run = runner.shared(peaked, *CHOOSING)
    directory = tmp_path / "run"
    shutil.copytree(run.directory, directory)
    for folder in (directory / "checkpoints").glob("step-*"):
        if int(folder.name[5:]) > last:
            shutil.rmtree(folder)
    shutil.rmtree(directory / "model")
    (directory / "status.json").write_text(json.dumps({"status": "running", "resumable": True}))
    again = (*CHOOSING, "--output-dir", directory, "--resume", "auto")
    resumed = runner.run(peaked, *again, output_directory=False)
    assert f"step-{last:08d}" in resumed.output
    assert_kept(run, directory, BEST)
    # The intervals are the same, by default too.
    assert rows_without_clock(directory) == rows_without_clock(run.directory)
    assert final_weights(directory) == final_weights(run.directory)


@pytest.mark.slow
def test_early_stopping_ends_the_run(peaked: Path, runner: Runner) -> None:
    """Two processes stop after as many evaluations without improvement as the flag says."""
    flags = (*CHOOSING, "--early-stopping", 2)
    run = runner.run(peaked, *flags, launcher="two forks")
    assert run.summary["progress/global_step"] == 20
    assert (
        "stopped early after update 20, because accuracy did not improve in 2 evaluations"
        in run.output
    )
    assert run.status["status"] == "finished"
    assert_kept(run, run.directory, BEST)


def test_last_model_is_kept_if_asked_for(peaked: Path, runner: Runner) -> None:
    """`--keep last` keeps the last model and saves no best one."""
    run = runner.run(peaked, *CHOOSING, "--keep", "last")
    assert_kept(run, run.directory, 30)
    assert run.summary["val/best_accuracy"] == 0
    assert not [*(run.directory / "checkpoints").glob("best-*")]


def test_test_data_choose_nothing(peaked: Path, runner: Runner) -> None:
    """Without validation data, the last model is kept and early stopping is refused."""
    flags = (*FLAGS, *OFTEN, "--max-steps", 16)
    run = runner.run(peaked, *flags)
    assert_kept(run, run.directory, 16)
    assert "val/best_accuracy" not in run.summary
    refused = runner.run(peaked, *flags, "--early-stopping", 2, succeeds=False)
    assert "--early-stopping needs validation data" in refused.printed()
