"""The benchmark programme for a GPU and its parts, as far as a CPU can run them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live

from benchmarks import gpu, resume_peers, time_to_accuracy, transfer
from benchmarks.accuracy import materials as accuracy_materials
from benchmarks.accuracy.results import Results
from benchmarks.accuracy.workloads import FAST_TRAINER, WORKLOADS
from benchmarks.gpu_session import step as gpu_step
from benchmarks.gpu_session.steps import STEPS, Plan
from benchmarks.harness import guarded
from benchmarks.harness import materials as harness_materials
from benchmarks.harness.bare_environment import make_bare_environment
from benchmarks.harness.isolation import isolated
from benchmarks.harness.options import Options
from benchmarks.harness.recipe_side import load_recipe, train_recipe
from benchmarks.harness.rounds import FinishedTraining
from benchmarks.pictures import screen_of
from benchmarks.resume.results import Results as ResumeResults
from common.errors import UserError
from common.lifecycle import training_figures
from tests.launch import REPOSITORY, Runner, clean_environment, run_command
from tests.local_data import WORDS, grey_images, write_image_parquet, write_parquet, write_tiny_bert

NEEDING_DATASETS = [name for name, plan in STEPS.items() if "datasets" in plan.packages]
TINY = {"dataset": "synthetic", "image_size": 8, "batch_size": 64, "hidden_sizes": (8,)}


def test_copies_are_measured_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each size is measured once, up to the requested largest, here between host buffers."""
    output = tmp_path / "transfer.json"
    plot = tmp_path / "transfer.svg"
    transfer.main(transfer.Options(largest=6, repeats=1, output=output, plot=plot))
    (rows,) = json.loads(output.read_text()).values()
    assert [row["megabytes"] for row in rows] == [1, 4, 6]
    assert all(row["gigabytes_per_second"] > 0 for row in rows)
    assert "</svg>" in plot.read_text()
    assert "6 MB" in capsys.readouterr().out


@pytest.mark.slow
def test_waits_are_errors_in_the_loop_and_allowed_in_what_logs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The guard makes waits errors from the update `settled` on, except in logging.

    The mode is the default again after the run, also if the run failed.
    """
    modes = ["default"]
    modes_during: dict[str, set[str]] = {}
    recipe = load_recipe("mnist_mlp")
    monkeypatch.setattr(guarded, "set_mode", modes.append)

    def noting(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def note(*arguments: Any, **keywords: Any) -> Any:
            modes_during.setdefault(name, set()).add(modes[-1])
            return function(*arguments, **keywords)

        monkeypatch.setattr(owner, name, note)

    for owner, name in (
        (recipe, "compute_loss"),
        (recipe.Run, "clip_grad_norm_"),
        (recipe.Run, "record"),
        (training_figures, "log_interval"),
        (guarded.Stopwatch, "stop"),
    ):
        noting(owner, name)
    settings = {**TINY, "mixed_precision": "no", "log_every": 2}
    with isolated(1), guarded.without_waiting(recipe, settled=3):
        train_recipe(recipe, 8, **settings)
    for name in ("compute_loss", "clip_grad_norm_", "record"):
        assert modes_during[name] == {"default", "error"}, name
    for name in ("log_interval", "stop"):
        assert modes_during[name] == {"default"}, name
    assert modes[-1] == "default"
    monkeypatch.setattr(recipe, "compute_loss", lambda *unused: 1 / 0)
    with isolated(1), guarded.without_waiting(recipe, settled=0), pytest.raises(ZeroDivisionError):
        train_recipe(recipe, 8, **settings)
    assert modes[-1] == "default"


@pytest.mark.slow
def test_wait_in_the_loop_is_reported_beside_the_figures_of_a_run_without_the_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table reports a wait beside the figures of a second run without the guard.

    A refused precision or an unexpected error is reported as well, and the step goes on.
    """
    wait = RuntimeError("called a synchronizing CUDA operation")
    refusal = UserError("no such arithmetic here")
    summary = {"perf/mfu": 0.4, "perf/samples_per_second": 8}
    training = FinishedTraining(2, 8, 0.5, None, summary)
    error = ZeroDivisionError("broken")
    answers: Iterator[Any] = iter([wait, training, refusal, error, training, training])

    def train(*unused: Any, **settings: Any) -> FinishedTraining:
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(gpu_step, "train_recipe", train)
    step = gpu_step.Step(tmp_path / "step.json", True, Options(), None)
    for name in ("waits", "refused", "failed", "well"):
        step.measure([gpu_step.MeasuredRecipe(name, "mnist_mlp", {})], 8, rounds=1)
    figures = json.loads(step.file.read_text())["figures"]
    spread = {"least": 4, "most": 4, "rounds": 1}
    measured = {"samples_per_second": 4, "spread": spread, "perf/mfu": 0.2}
    measured["perf/samples_per_second"] = 8
    assert figures["well"] == measured
    assert figures["waits"].pop("waits").endswith(f"{wait}\n")
    assert figures["waits"] == measured
    assert figures["refused"] == {"refused": refusal.message}
    assert "ZeroDivisionError: broken" in figures["failed"]["failed"]


@pytest.mark.slow
def test_failed_or_slow_step_is_recorded_and_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed or slow step is recorded, and `--resume` runs only the unfinished steps again.

    A step that lacks a package or time is not started.
    """
    started = replace_steps_by_scripts(monkeypatch)
    options = gpu.Options(output=tmp_path, budget_minutes=5)
    assert gpu.main(options) == 3
    assert started == ["tests", "mnist_mlp", "resnet"]
    assert_failures_are_noted(tmp_path)
    started.clear()
    with pytest.raises(SystemExit, match="pass --resume to go on"):
        gpu.main(options)
    gpu.main(replace(options, resume=True))
    assert started == ["tests", "mnist_mlp"]
    assert (tmp_path / "tests.previous.json").exists()
    gpu.main(gpu.Options(output=tmp_path, budget_minutes=0, only=("resnet",)))
    assert started == ["tests", "mnist_mlp"]
    with pytest.raises(SystemExit, match="resnet50x"):
        gpu.main(gpu.Options(output=tmp_path, only=("resnet50x",)))


# What stands in for steps: one fails, one takes too long, and one succeeds.
STEP_SCRIPTS = {
    "tests": "raise SystemExit('broken')",
    "mnist_mlp": 'file.write_text(\'{"figures": {"mlp fp16": {"failed": "so"}}}\')\ntime.sleep(60)',
    "resnet": "file.write_text('{}')",
}


def replace_steps_by_scripts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let a session run `STEP_SCRIPTS`; return the list that gets the name of each started step."""
    preamble = "import pathlib, sys, time\nfile = pathlib.Path(sys.argv[2])\n"
    steps = {
        "tests": Plan(nothing, 60),
        "mnist_mlp": Plan(nothing, 3),
        "resnet": Plan(nothing, 60),
        "bert": Plan(nothing, 60, ("a_package_that_nobody_has",)),
    }
    started: list[str] = []
    popen = gpu.subprocess.Popen

    def start(command: list[str], **keywords: Any) -> Any:
        started.append(command[3])
        words = [sys.executable, "-c", preamble + STEP_SCRIPTS[command[3]], *command[3:]]
        return popen(words, **keywords)

    monkeypatch.setattr(gpu, "STEPS", steps)
    monkeypatch.setattr(gpu, "MIN_SECONDS", 1)
    monkeypatch.setattr(gpu.subprocess, "Popen", start)
    return started


def assert_failures_are_noted(output: Path) -> None:
    """Check the records and the table of a session that ran `STEP_SCRIPTS`."""
    records = {name: json.loads((output / f"{name}.json").read_text()) for name in STEP_SCRIPTS}
    statuses = [record["status"] for record in records.values()]
    assert statuses == ["failed", "ended after 3 s", "done"]
    assert "broken" in records["tests"]["error"]
    table = (output / "table.md").read_text()
    assert "| mnist_mlp | ended after 3 s |" in table
    assert "| bert | needs a_package_that_nobody_has, which this machine lacks |" in table
    assert "| mlp fp16 " in table, "figures written before the limit are lost"
    assert "failed: so" in table


def nothing(step: gpu_step.Step) -> None:
    """Stand in for the step's function: the test replaces the whole step by a script."""


FORKED_STEP = """
import sys
sys.executable = sys.argv.pop(1)
sys.path.insert(0, sys.argv.pop(1))
from benchmarks.gpu_session.steps import main
main(*sys.argv[1:])
"""


@pytest.mark.exhaustive
def test_steps_that_need_datasets_run_to_their_end(
    tmp_path: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step measures something and notes what a CPU cannot do."""
    output = tmp_path / "results"
    script = tmp_path / "step.py"
    script.write_text(FORKED_STEP)
    environment = clean_environment(runner.folder) | {"TMPDIR": str(tmp_path)}

    def fork(command: list[str], stdout: Any, **keywords: Any) -> Any:
        step = [str(script), str(runner.python), str(REPOSITORY), *command[3:]]
        return runner.start(step, "fork", environment, REPOSITORY, stdout, stdout)

    offered = {"DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(gpu, "subprocess", SimpleNamespace(Popen=fork, **offered))
    monkeypatch.setattr(gpu, "STEPS", {name: STEPS[name] for name in NEEDING_DATASETS})
    unfinished = gpu.main(gpu.Options(output=output, tiny=True))
    assert unfinished == 0, (output / "table.md").read_text()
    cells = all_figures(output)
    assert "fp16 can't be used on a CPU" in cells["bert fp16"]["refused"]
    assert cells["bert fp32"]["samples_per_second"] > 0
    for name in ("bert", "mnist"):
        assert all(row["ratio"]["median"] > 0 for row in cells[name]["comparisons"])


def all_figures(output: Path) -> dict[str, Any]:
    """Return the figures of all steps in a folder."""
    figures: dict[str, Any] = {}
    for name in STEPS:
        file = output / f"{name}.json"
        if file.exists():
            figures |= json.loads(file.read_text())["figures"]
    return figures


# Runs the programme with steps that are forks, without the seconds of their imports. What a step
# launches is a fork as well, except for the recipes that its tests kill.
BARE_PROGRAMME = """
import os, runpy, sys, traceback
from types import SimpleNamespace
repository, output = sys.argv[1:]
sys.path.insert(0, repository)
from benchmarks import gpu
from benchmarks.gpu_session import step as gpu_step
from benchmarks.gpu_session import steps as gpu_steps

def interpret(words):
    is_module = words[0] == "-m"
    sys.argv = words[1:] if is_module else words
    if is_module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(words[0]))
        runpy.run_path(words[0], run_name="__main__")

class Fork:
    def __init__(self, work, env):
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid:
            return
        status = 1
        try:
            os.environ.update(env)
            work()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def wait(self, seconds=None):
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def poll(self):
        return 0

def start_step(command, *, stdout, env, **others):
    def work():
        os.setsid()
        os.dup2(stdout.fileno(), 1)
        os.dup2(stdout.fileno(), 2)
        os.chdir(repository)
        gpu_steps.main(*command[3:])
    return Fork(work, env)

def run(words, *, env, check):
    status = Fork(lambda: interpret(words[1:]), env).wait()
    assert status == 0, f"{words} ended with {status}"

started = gpu.subprocess
gpu.subprocess = SimpleNamespace(
    Popen=start_step, DEVNULL=started.DEVNULL, TimeoutExpired=started.TimeoutExpired
)
gpu_step.subprocess = SimpleNamespace(run=run)
gpu.main(gpu.Options(output=gpu.Path(output), tiny=True))
"""
MISSING = ("wandb", "datasets", "optuna", "wandb-workspaces", "matplotlib", "scikit-learn")
MISSING = (*MISSING, "nvidia-ml-py")


@pytest.mark.exhaustive
def test_programme_runs_on_a_machine_that_lacks_packages(tmp_path: Path, runner: Runner) -> None:
    """Every step that does not need `datasets` runs; the table names those that need it."""
    python = make_bare_environment(tmp_path / "environment", MISSING)
    output = tmp_path / "results"
    environment = clean_environment(runner.folder)
    environment |= {"TMPDIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    words = [str(python), "-c", BARE_PROGRAMME, str(REPOSITORY), str(output)]
    status, printed, errors = run_command(words, environment, REPOSITORY, 900, one_core=True)
    assert status == 0, printed + errors
    table = (output / "table.md").read_text()
    for name in STEPS:
        if name in NEEDING_DATASETS:
            assert f"| {name} | needs datasets, which this machine lacks |" in table
        else:
            record = json.loads((output / f"{name}.json").read_text())
            assert record["status"] == "done", record.get("error")
            assert record["figures"]
    cells = all_figures(output)
    assert "fp16 can't be used on a CPU" in cells["mnist_mlp fp16"]["refused"]
    for name in ("mnist_mlp fp32", "resnet fp32"):
        assert cells[name]["samples_per_second"] > 0, name
    (smoke,) = [cells[name] for name in cells if "test_smoke" in name]
    assert {*smoke} == {"seconds"}, smoke


def write_small_data(folder: Path) -> None:
    """Write two data sets that are laid out as MNIST and MRPC, and a checkpoint."""
    images = {"train": grey_images(640, seed=0), "test": grey_images(60, seed=1)}
    write_image_parquet(folder / "mnist", images)
    for split, count in (("train", 96), ("validation", 8), ("test", 40)):
        labels = [number % 2 for number in range(count)]
        words = [WORDS["colours"][number % 9 : number % 9 + 2] for number in range(count)]
        columns = {
            "sentence1": [" ".join(pair) for pair in words],
            "sentence2": [WORDS["numbers" if label else "animals"][label] for label in labels],
            "label": labels,
            "idx": list(range(count)),
        }
        write_parquet(folder / "mrpc" / f"{split}.parquet", columns)
    write_tiny_bert(folder / "checkpoint")


# By workload and contestant.
EPOCHS = {
    ("mnist", "recipe mnist_mlp"): 20,
    ("mnist", "PyTorch, MLP fp32"): 20,
    ("mrpc", "recipe bert"): 5,
    ("mrpc", "Accelerate, fp32"): 3,
    ("mrpc", FAST_TRAINER): 5,
}


@pytest.mark.slow
@pytest.mark.usefixtures("forking_python")
def test_time_to_accuracy_of_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe and its peers write down an evaluation after each epoch, and the same operations."""
    write_small_data(tmp_path)
    versions = {"torch": "2", "accelerate": "1", "transformers": "5"}
    machine = {"hardware": {"processor": "a CPU"}, "versions": versions}
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(time_to_accuracy, "measure_machine_apart", lambda: machine)
    for module in (harness_materials, accuracy_materials):
        monkeypatch.setattr(module, "CACHE", tmp_path / "cache")
    options = time_to_accuracy.Options(
        datasets=("mnist", "mrpc"),
        contestants=tuple(name for _, name in EPOCHS),
        data=tmp_path,
        bert_checkpoint=tmp_path / "checkpoint",
        output=tmp_path / "results.json",
        picture=tmp_path / "picture.svg",
        keep_runs=tmp_path / "kept",
        to_the_end=True,
    )
    time_to_accuracy.main(options)
    results = Results.read(options.output)
    assert results is not None
    assert {key[:2] for key in results.runs} == {*EPOCHS}
    assert_each_epoch_is_evaluated(results)
    assert_both_sides_count_the_same_operations(results)
    summary = tmp_path / "kept" / "mrpc" / "recipe-bert" / "seed-0" / "summary.json"
    assert "test/f1" in json.loads(summary.read_text())
    assert "MRPC 80 %, F1 86 %" in capsys.readouterr().out


def assert_each_epoch_is_evaluated(results: Results) -> None:
    """Check the evaluations of each run: their epochs, their times, and their figures."""
    for (name, contestant, _), run in results.runs.items():
        entries = results.evaluations(WORKLOADS[name], run)
        assert [entry.epoch for entry in entries] == [*range(1, EPOCHS[name, contestant] + 1)]
        seconds = [entry.seconds for entry in entries]
        assert seconds[0] > 0
        assert seconds == sorted(seconds)
        assert max(entry.figures["accuracy"] for entry in entries) > 0.4
        assert all(("f1" in entry.figures) == (name == "mrpc") for entry in entries)


def assert_both_sides_count_the_same_operations(results: Results) -> None:
    """Check the operations of a forward pass, by recipe and peer."""
    mlp_operations = 2 * (64 * 512 + 512 * 512 + 512 * 3)
    costs = {key[:2]: run.forward for key, run in results.runs.items()}
    assert costs["mnist", "recipe mnist_mlp"].per_sample == mlp_operations
    assert costs["mnist", "PyTorch, MLP fp32"].per_sample == mlp_operations
    assert costs["mrpc", "recipe bert"].per_token == pytest.approx(
        costs["mrpc", "Accelerate, fp32"].per_token, rel=0.01
    )


def test_picture_shows_what_stood_in_the_terminal() -> None:
    """A line that rich has rewritten appears once, with its last text."""
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=40, height=10, color_system=None)
    with Live("begun", console=console, auto_refresh=False) as live:
        console.print("above")
        live.update("one\ntwo", refresh=True)
        console.print("later")
        live.update("two thirds", refresh=True)
    assert screen_of(written.getvalue().replace("\n", "\r\n")) == "above\nlater\ntwo thirds"


@pytest.mark.exhaustive
@pytest.mark.usefixtures("forking_python")
def test_kills_of_the_recipe_and_of_a_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed twice, the recipe leaves no trace; Accelerate's example repeats and loses samples."""
    machine = {"hardware": {"processor": "a CPU"}, "versions": {"torch": "2"}}
    monkeypatch.setattr(resume_peers, "lasting_machine_facts", lambda: machine)
    options = resume_peers.Options(
        contestants=("recipe", "Accelerate, checkpointing.py"),
        kills=("24@0.50", "29"),
        processes=(1,),
        output=tmp_path / "results.json",
    )
    resume_peers.main(options)
    results = ResumeResults.read(options.output)
    assert results is not None
    ours = {result.kill: result for result in results.in_order() if result.contestant == "recipe"}
    assert all(result.is_exact for result in ours.values()), capsys.readouterr().out
    # The recipe writes checkpoints in the background, so that of update 24 may be incomplete.
    assert ours["29"].resumed_at in ([17], [25])
    assert ours["24@0.50"].resumed_at == [17], "the checkpoint was complete before the kill"
    # The kill comes with half of the bytes written, or a few updates later on a slow disk.
    (share,) = ours["24@0.50"].written_shares
    assert share > 0
    peer = results.results["Accelerate, checkpointing.py", 1, "29"]
    assert peer.resumed_at == [25]
    assert peer.repeated == peer.lost > 0
    assert not peer.same_bits
    resume_peers.main(options)
    assert capsys.readouterr().out.count(": kept") == 4
