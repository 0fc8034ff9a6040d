"""Changes to a copy's loop: layers frozen by epoch, its own schedule and flags, its mistakes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.harness.ports import free_port
from tests.edited_copies import edited
from tests.launch import REPOSITORY, Runner, clean_environment, run_command

FLAGS = ("--dataset", "digits", "--tracker", "none", "--hidden-sizes", 16, 16, "--log-every", 5)
STEP = "            with accelerator.accumulate(model):\n"
FREEZE = """            is_first_epoch = run.progress.global_step < run.plan.updates_per_epoch
            accelerator.unwrap_model(model).body.requires_grad_(not is_first_epoch)
            accelerator.unwrap_model(model).head.requires_grad_(is_first_epoch or config.seed != 1)
"""
SCHEDULE = "scheduler = run.plan.schedule(optimizer, warmup_share=0.1)"
OWN_SCHEDULE = "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)"
# A collective that only rank 1 enters, with more bytes than rank 0 reads next.
UNEVEN = """            if run.progress.global_step == 3 and accelerator.process_index == 1:
                torch.distributed.all_reduce(torch.ones(100_000))
"""


@pytest.mark.slow
@pytest.mark.parametrize("frozen_first", [False, True], ids=["after prepare", "before prepare"])
def test_layers_frozen_by_epoch(runner: Runner, tmp_path: Path, frozen_first: bool) -> None:
    """A run that freezes layers by epoch is the same on two processes and after a resume.

    Two processes equal one that accumulates within rounding, and a resume gives the same bits.
    """
    prepare = "        model, optimizer, scheduler = accelerator.prepare("
    freeze_body = "        model.body.requires_grad_(False)\n" if frozen_first else ""
    copy = edited("mnist_mlp", tmp_path, (STEP, FREEZE + STEP), (prepare, freeze_body + prepare))
    common = (*FLAGS, "--epochs", 3, "--mixed-precision", "no", "--keep", "last", "--seed", 1)
    common += ("--keep-checkpoints", 9, "--checkpoint-every", 2)
    two = runner.run(copy, *common, "--batch-size", 64, launcher="two forks")
    on_one = runner.run(copy, *common, "--batch-size", 64, "--gradient-accumulation-steps", 2)
    for name, value in on_one.weights().items():
        torch.testing.assert_close(two.weights()[name], value, rtol=1e-4, atol=1e-5, msg=name)
    *earlier, _, last = sorted((two.directory / "checkpoints").glob("step-*"))
    assert earlier
    again = tmp_path / "again"
    shutil.copytree(two.directory, again)
    shutil.rmtree(again / "checkpoints" / last.name)
    shutil.rmtree(again / "model")
    status = {"status": "preempted", "resumable": True, "reason": None, "global_step": 0}
    (again / "status.json").write_text(json.dumps(status))
    runner.run(copy, "--resume", again, launcher="two forks", output_directory=False)
    from safetensors.torch import load_file

    resumed = load_file(again / "model" / "model.safetensors")
    assert all(torch.equal(resumed[name], value) for name, value in two.weights().items())


def test_flag_that_a_copy_does_not_use_is_refused(runner: Runner, tmp_path: Path) -> None:
    """`--scale-learning-rate` is refused in a copy whose own scheduler does not use it.

    The run prints no scaled rate and saves nothing.
    """
    copy = edited("mnist_mlp", tmp_path, (SCHEDULE, OWN_SCHEDULE))
    flags = (*FLAGS, "--max-steps", 4, "--scale-learning-rate", "linear", "--checkpoint-every", 1)
    run = runner.run(copy, *flags, "--batch-size", 128, succeeds=False)
    assert run.returncode == 1
    assert "--scale-learning-rate linear was set" in run.errors
    assert "run.plan.schedule(...)" in run.errors
    assert "Traceback" not in run.errors
    assert "rate    " not in run.output
    assert not [*run.directory.glob("checkpoints/step-*")]
    assert run.status["resumable"] is False


OWN_FLAG = "    image_column: str | None"
RECORD = "            run.record(loss, metrics(logits, batch))\n"
END = "        run.finish(evaluate(run, model, test_loader))\n"
USES = {
    "nowhere": (END, END),
    "in the last lines": (END, "        print('at the end', config.share)\n" + END),
    "on one rank": (
        RECORD,
        "            if run.accelerator.process_index: config.share\n" + RECORD,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_own_flag_must_be_used_somewhere(runner: Runner, tmp_path: Path, use: str) -> None:
    """A copy's own flag is refused only if no rank uses it at any time.

    The run warns if the first update does not use the flag.
    """
    own_flag = (OWN_FLAG, f"    share: float = 0.5\n{OWN_FLAG}")
    copy = edited("mnist_mlp", tmp_path, own_flag, USES[use])
    launcher = "two forks" if use == "on one rank" else "fork"
    is_used = use != "nowhere"
    flags = (*FLAGS, "--max-steps", 3, "--batch-size", 64, "--share", 0.7)
    run = runner.run(copy, *flags, launcher=launcher, succeeds=is_used)
    refused = "--share 0.7 was set, but nothing in mnist_mlp.py had used it" in run.errors
    assert refused == (not is_used)
    named = "--share was set, but the first update did not use it" in run.output
    assert named == (use == "in the last lines")


@pytest.mark.slow
def test_metric_with_the_name_of_a_logged_one_is_refused(runner: Runner, tmp_path: Path) -> None:
    """A copy's metric is refused at the first log line if the run logs one of the same name."""
    clashing = RECORD.replace("metrics(logits, batch)", '{"grad_norm": 3.0}')
    copy = edited("mnist_mlp", tmp_path, (RECORD, clashing))
    run = runner.run(copy, *FLAGS, "--max-steps", 9, succeeds=False)
    assert "the metric 'grad_norm', but the run itself already logs train/grad_norm" in run.errors
    assert "Traceback" not in run.errors


def supervised(
    runner: Runner, recipe: Path, folder: Path, flags: tuple[object, ...], *, processes: int
) -> tuple[int, str]:
    """Run the README's supervisor line; return its number of starts and its output."""
    python = str(runner.python)
    launch = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    launch += ["--master-port", str(free_port())] if processes > 1 else []
    words = [*(launch if processes > 1 else [python]), str(recipe), *map(str, flags)]
    run = folder / "run"
    line = f"echo started >> {folder}/starts; {' '.join(words)} --output-dir {run} --resume auto"
    loop = f"until {line}; do grep -q '\"resumable\": true' {run}/status.json || break; done"
    environment = {**clean_environment(runner.folder), "OMP_NUM_THREADS": "1"}
    _, output, errors = run_command(
        ["bash", "-c", loop], environment, folder, timeout=240, one_core=False
    )
    return (folder / "starts").read_text().count("started"), output + errors


@pytest.mark.slow
def test_supervisor_stops_if_ranks_enter_different_collectives(
    runner: Runner, tmp_path: Path
) -> None:
    """The supervisor stops after a second failure at the same update and advises what to check.

    The first failure could have been a lost machine.
    """
    copy = edited("mnist_mlp", tmp_path, (STEP, UNEVEN + STEP))
    flags = (*FLAGS, "--max-steps", 8, "--collective-timeout", 20)
    starts, printed = supervised(runner, copy, tmp_path, flags, processes=2)
    assert starts == 2, printed[-3000:]
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["resumable"] is False
    assert "second time at update 3" in status["reason"]
    assert "a collective (gather, reduce) under a condition" in printed


@pytest.mark.slow
def test_supervisor_stops_if_a_file_is_in_the_way(runner: Runner, tmp_path: Path) -> None:
    """The supervisor stops at once if a file is in the way; the advice is not to free space."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file")
    recipe = REPOSITORY / "recipes" / "mnist_mlp.py"
    starts, printed = supervised(runner, recipe, tmp_path, (*FLAGS, "--max-steps", 4), processes=1)
    assert starts == 1, printed[-3000:]
    assert "move the file or folder that is already there" in printed
    assert "free some space" not in printed


NOTEBOOK = """
import signal, sys, threading
sys.path.insert(0, {repository!r})
from recipes.mnist_mlp import Config, main
from accelerate import debug_launcher, notebook_launcher

def config(name, **others):
    return Config(dataset="digits", max_steps=3, hidden_sizes=(8,), tracker="none",
                  output_dir=sys.argv[1] + name, **others)

notebook_launcher(main, (config("notebook-2"),), num_processes=2, use_port=sys.argv[2])
debug_launcher(main, (config("debug"),), num_processes=2)
before = signal.getsignal(signal.SIGINT)
notebook_launcher(main, (config("notebook-1", mixed_precision="bf16"),), num_processes=1)
main(config("again", mixed_precision="no"))
thread = threading.Thread(target=main, args=(config("thread"),))
thread.start()
thread.join()
assert signal.getsignal(signal.SIGINT) is before
"""


@pytest.mark.slow
def test_main_is_called_by_a_notebook(runner: Runner, tmp_path: Path) -> None:
    """`main` runs in both of Accelerate's notebook launchers, twice in a process, in a thread."""
    script = tmp_path / "notebook.py"
    script.write_text(NOTEBOOK.format(repository=str(REPOSITORY)))
    command = [str(runner.python), str(script), f"{tmp_path}/", str(free_port())]
    environment = clean_environment(runner.folder)
    status, output, errors = run_command(command, environment, tmp_path, 240, one_core=False)
    assert status == 0, output[-2000:] + errors[-4000:]
    for name, processes in (("notebook-2", 2), ("debug", 2), ("notebook-1", 1), ("again", 1)):
        facts = json.loads((tmp_path / name / "config.json").read_text())
        assert facts["environment"]["world_size"] == processes
        assert json.loads((tmp_path / name / "status.json").read_text())["status"] == "finished"
    assert json.loads((tmp_path / "thread" / "status.json").read_text())["status"] == "finished"


PREPARED = "model, optimizer = accelerator.prepare(model, optimizer)"
PLATEAU = (
    ("Run(config, __file__, OBJECTIVE)", "Run(config, __file__, OBJECTIVE, rehearse=False)"),
    (
        "scheduler = run.plan.schedule(optimizer, warmup_share=0.1)",
        "scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)",
    ),
    ("model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)", PREPARED),
    (
        "                run.log(evaluate(run, model, validation_loader))\n            if",
        "                figures = evaluate(run, model, validation_loader)\n"
        "                run.log(figures)\n"
        '                scheduler.step(-figures["loss"])  # always a worse value\n'
        "            if",
    ),
    ("                scheduler.step()\n", ""),
)


@pytest.mark.parametrize("stop", [4, 6], ids=["between evaluations", "before an evaluation"])
def test_scheduler_of_evaluations_continues_after_a_resume(
    stop: int, runner: Runner, tmp_path: Path
) -> None:
    """`docs/make-your-own.md` says how a recipe uses `ReduceLROnPlateau`."""
    flags = (*FLAGS, "--hidden-sizes", 16, "--batch-size", 64, "--max-steps", 12)
    flags = (*flags, "--eval-every", 3, "--log-every", 1)
    whole = runner.run(edited("mnist_mlp", tmp_path, *PLATEAU), *flags)
    rates = [*whole.series("train/learning_rate").values()]
    assert len({*rates}) >= 3, rates
    stopping = (
        f"            if run.progress.global_step == {stop}:\n"
        "                import os, signal\n"
        "                os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    recipe = edited("mnist_mlp", tmp_path, *PLATEAU, (RECORD, RECORD + stopping))
    stopped = runner.run(recipe, *flags, succeeds=False)
    assert stopped.returncode == 75, stopped.explain()
    resumed = runner.run(recipe, "--resume", stopped.directory, output_directory=False)
    assert "error" not in resumed.printed()
    weights = [
        (directory / "model" / "model.safetensors").read_bytes()
        for directory in (whole.directory, stopped.directory)
    ]
    assert weights[0] == weights[1]


def test_scheduler_of_evaluations_is_not_prepared(runner: Runner, tmp_path: Path) -> None:
    """Accelerate would call it without a metric, or twice on two processes."""
    copy = edited("mnist_mlp", tmp_path, PLATEAU[1])
    run = runner.run(copy, *FLAGS, "--max-steps", 3, succeeds=False)
    assert "error: accelerator.prepare got a ReduceLROnPlateau" in run.errors, run.explain()
    assert "Traceback" not in run.printed()


def test_scheduler_of_evaluations_takes_no_step_in_the_rehearsal(
    runner: Runner, tmp_path: Path
) -> None:
    """Each resume would add such a step."""
    run = runner.run(edited("mnist_mlp", tmp_path, *PLATEAU[1:]), *FLAGS, succeeds=False)
    problem = "error: a ReduceLROnPlateau made a step with the figures of the rehearsal"
    assert problem in run.errors, run.explain()
    assert "rehearse=False" in run.errors
    assert "Traceback" not in run.printed()
