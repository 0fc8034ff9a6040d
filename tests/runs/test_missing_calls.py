"""A copy that has lost a call of `Run` says so in one sentence, or does what the call would do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.edited_copies import edited
from tests.launch import Runner

FLAGS = ("--dataset", "digits", "--hidden-sizes", 16, "--batch-size", 64, "--tracker", "none")
RECORD = "            run.record(loss, metrics(logits, batch))\n"
SAVE = "            if run.should_save:\n                run.save()\n"
FINISH = "        run.finish(evaluate(run, model, test_loader))\n"
ZERO_GRAD = "                optimizer.zero_grad()\n"
BACKWARD = "                accelerator.backward(loss)\n"
EVALUATE = "if run.should_evaluate:  # at the top"
IS_MAIN = "(not run.progress.global_step or accelerator.is_main_process)"
STOP = """\
            if run.progress.global_step == 3:
                import os, signal
                os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        ((RECORD, ""), "error: a whole epoch made no update, because the loop does not call "),
        ((FINISH, ""), "error: the recipe did not call run.finish, so there is no final "),
        (
            ("run.make_plan(train_loader", "run.make_plan(test_loader"),
            "error: the recipe trains on a loader for evaluations: call run.make_plan(",
        ),
        (
            ("run.batches(train_loader)", "run.batches(test_loader)"),
            "error: the recipe trains on a loader for evaluations: call run.batches(",
        ),
        (
            ("run.batches(train_loader)", "train_loader"),
            "error: the loop is over train_loader itself, so no checkpoint would contain its ",
        ),
        (
            ("run.keep(model=model", "run.keep(log=model, model=model"),
            "error: run.keep(...) got a part named 'log', but the name is taken, by the run ",
        ),
        (("run.start(description", "run.start({}"), "has no 'name' of the model: pass a dict"),
        (
            (RECORD, RECORD + "            config.seed += 1\n"),
            "error: the recipe changes config.seed after run.start(...), so config.json ",
        ),
    ],
    ids=["record", "finish", "make_plan", "batches", "loader", "keep", "start", "frozen flag"],
)
def test_a_missing_or_wrong_call_gives_one_sentence(
    edit: tuple[str, str], sentence: str, runner: Runner, tmp_path: Path
) -> None:
    recipe = edited("mnist_mlp", tmp_path, edit)
    run = runner.run(recipe, *FLAGS, "--epochs", 2, succeeds=False)
    assert run.returncode == 1, run.explain()
    assert sentence in " ".join(run.printed().split()), run.explain()
    assert run.printed().count("error: ") == 1, run.explain()
    assert "Traceback" not in run.printed(), run.explain()


def test_a_stop_saves_without_a_call_of_save(runner: Runner, tmp_path: Path) -> None:
    """The resumed run ends with the weights of a run that was never stopped."""
    whole = runner.run("mnist_mlp", *FLAGS, "--max-steps", 8)
    recipe = edited("mnist_mlp", tmp_path, (RECORD, RECORD + STOP), (SAVE, ""))
    stopped = runner.run(recipe, *FLAGS, "--max-steps", 8, succeeds=False)
    assert stopped.returncode == 75, stopped.explain()
    assert "everything is saved" in stopped.printed(), stopped.explain()
    resumed = runner.run(recipe, "--resume", stopped.directory, output_directory=False)
    assert "error" not in resumed.printed()
    weights = [
        (directory / "model" / "model.safetensors").read_bytes()
        for directory in (whole.directory, stopped.directory)
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    "edit",
    [
        (EVALUATE, EVALUATE.replace(":", f" and {IS_MAIN}:")),
        (RECORD, f"            accelerator.is_main_process and {RECORD.strip()}\n"),
    ],
    ids=["evaluation", "record"],
)
def test_call_on_one_process_only_gives_one_sentence(
    edit: tuple[str, str], runner: Runner, tmp_path: Path
) -> None:
    """The library for collectives knows only that the other process sent something else."""
    recipe = edited("mnist_mlp", tmp_path, edit)
    flags = (*FLAGS, "--max-steps", 9, "--eval-every", 3, "--collective-timeout", 6)
    run = runner.run(recipe, *flags, launcher="two forks", succeeds=False)
    reason = run.status["reason"]
    assert "the processes did not make the same calls" in reason or "values of different" in reason
    assert "gloo" not in reason
    printed = " ".join(run.errors.split())
    assert f"{reason} (in mnist_mlp.py, line " in printed, run.explain()
    assert "let all processes make the same calls, such as run.record" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("edits", "micro_batches", "is_warned"),
    [
        ([], 2, False),
        ([(ZERO_GRAD, "")], 1, True),
        ([(ZERO_GRAD, ""), (BACKWARD, ZERO_GRAD + BACKWARD)], 1, False),
        # Accelerate's call does nothing in the first micro-batch, and removes too much in the last.
        ([(ZERO_GRAD, ""), (BACKWARD, ZERO_GRAD + BACKWARD)], 2, True),
    ],
    ids=["as it is", "missing", "before the backward pass", "between micro-batches"],
)
@pytest.mark.parametrize(
    "launcher", ["fork", pytest.param("two forks", marks=pytest.mark.slow)], ids=["1", "2"]
)
def test_gradients_that_are_added_up_are_warned_of(
    edits: list[tuple[str, str]],
    micro_batches: int,
    is_warned: bool,
    launcher: str,
    runner: Runner,
    tmp_path: Path,
) -> None:
    """A loop may remove gradients wherever no backward pass adds to those of another update."""
    recipe = edited("mnist_mlp", tmp_path, *edits)
    flags = (*FLAGS, "--max-steps", 3, "--gradient-accumulation-steps", micro_batches)
    run = runner.run(recipe, *flags, launcher=launcher)
    warning = "the second update has added its gradients to those of the first one"
    assert (warning in " ".join(run.printed().split())) == is_warned
