"""The programme for a GPU and its parts, as far as a CPU can run them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live

from benchmarks import gpu, gpu_step, guarded, transfer
from benchmarks.gpu_steps import STEPS
from benchmarks.isolation import isolated
from benchmarks.options import Options
from benchmarks.pictures import screen_of
from benchmarks.recipe_side import load_recipe, train_recipe
from benchmarks.rounds import Training
from common.errors import UserError
from tests.launch import REPOSITORY, Runner, clean_environment, run_command

TINY = {"dataset": "synthetic", "image_size": 8, "batch_size": 64, "hidden_sizes": (8,)}


def test_copies_are_measured_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU from memory to memory; each size once, the largest as asked."""
    output, plot = tmp_path / "transfer.json", tmp_path / "transfer.svg"
    transfer.main(transfer.Options(largest=6, repeats=1, output=output, plot=plot))
    (rows,) = json.loads(output.read_text()).values()
    assert [row["megabytes"] for row in rows] == [1, 4, 6]
    assert all(row["gigabytes_per_second"] > 0 for row in rows)
    assert "</svg>" in plot.read_text()
    assert "6 MB" in capsys.readouterr().out


def test_waits_are_errors_in_the_loop_and_allowed_in_what_logs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the update that is named on; and no longer after the run, however it ended."""
    modes, during = ["default"], dict[str, set[str]]()
    recipe = load_recipe("mnist_mlp")
    monkeypatch.setattr(guarded, "set_mode", modes.append)

    def noting(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def note(*arguments: Any, **named: Any) -> Any:
            during.setdefault(name, set()).add(modes[-1])
            return function(*arguments, **named)

        monkeypatch.setattr(owner, name, note)

    for owner, name in (
        *((recipe, "compute_loss"), (recipe.Run, "clip_grad_norm_"), (recipe.Run, "record")),
        *((recipe.Run, "log_training"), (guarded.Stopwatch, "stop")),
    ):
        noting(owner, name)
    settings = {**TINY, "mixed_precision": "no", "log_every": 2}
    with isolated(1), guarded.without_waiting(recipe, settled=3):
        train_recipe(recipe, 8, **settings)
    for name in ("compute_loss", "clip_grad_norm_", "record"):
        assert during[name] == {"default", "error"}, name
    for name in ("log_training", "stop"):
        assert during[name] == {"default"}, name
    assert modes[-1] == "default"
    monkeypatch.setattr(recipe, "compute_loss", lambda *unused: 1 / 0)
    with isolated(1), guarded.without_waiting(recipe, settled=0), pytest.raises(ZeroDivisionError):
        train_recipe(recipe, 8, **settings)
    assert modes[-1] == "default"


@pytest.mark.slow
def test_a_wait_in_the_loop_is_told_beside_the_figures_of_a_run_without_the_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a precision can't do is told too, and is no end of the step."""
    wait = RuntimeError("called a synchronizing CUDA operation")
    refusal, done = (
        UserError("no such arithmetic here"),
        Training(2, 8, 0.5, None, {"perf/mfu": 0.4}),
    )
    answers: Iterator[Any] = iter([wait, done, refusal, ZeroDivisionError("broken"), done])

    def train(*unused: Any, **settings: Any) -> Training:
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(gpu_step, "train_recipe", train)
    step = gpu_step.Step(tmp_path / "step.json", True, Options(), None)
    for name in ("waits", "refused", "failed", "well"):
        step.cell(name, "mnist_mlp", 8)
    found = json.loads(step.file.read_text())["figures"]
    figures = {"samples_per_second": 4, "perf/mfu": 0.4}
    assert found["well"] == figures
    assert found["waits"].pop("waits").endswith(f"{wait}\n")
    assert found["waits"] == figures
    assert found["refused"] == {"refused": refusal.message}
    assert "ZeroDivisionError: broken" in found["failed"]["failed"]


@pytest.mark.slow
def test_a_step_that_fails_or_takes_too_long_is_noted_and_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also what is not begun for lack of time; given again, only those are taken."""
    scripts = {
        "tests": "raise SystemExit('broken')",
        "mnist_mlp": 'file.write_text(\'{"figures": {"mlp fp16": {"failed": "so"}}}\')\n'
        "time.sleep(60)",
        "resnet": "file.write_text('{}')",
    }
    preamble = "import pathlib, sys, time\nfile = pathlib.Path(sys.argv[2])\n"
    steps = {"tests": (None, 60), "mnist_mlp": (None, 3), "resnet": (None, 60)}
    monkeypatch.setattr(gpu, "STEPS", steps)
    monkeypatch.setattr(gpu, "LEAST_SECONDS", 1)
    started = []
    popen = gpu.subprocess.Popen

    def start(command: list[str], **named: Any) -> Any:
        started.append(command[3])
        words = [sys.executable, "-c", preamble + scripts[command[3]], *command[3:]]
        return popen(words, **named)

    monkeypatch.setattr(gpu.subprocess, "Popen", start)
    options = gpu.Options(output=tmp_path, budget_minutes=5)
    assert gpu.main(options) == 2
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in steps}
    assert [one["status"] for one in found.values()] == ["failed", "ended after 3 s", "done"]
    assert "broken" in found["tests"]["said"]
    table = (tmp_path / "table.md").read_text()
    assert "| mnist_mlp | ended after 3 s |" in table
    assert "| mlp fp16 " in table, "what it found before it was ended is lost"
    assert "failed: so" in table
    started.clear()
    gpu.main(options)
    assert started == ["tests", "mnist_mlp"]
    gpu.main(gpu.Options(output=tmp_path, budget_minutes=0, only=("resnet",)))
    assert started == ["tests", "mnist_mlp"]
    with pytest.raises(SystemExit, match="resnet50x"):
        gpu.main(gpu.Options(output=tmp_path, only=("resnet50x",)))


FORKED_STEP = """
import os, sys
os.environ["PYTHONPATH"] = sys.argv.pop(1)
sys.path.insert(0, os.environ["PYTHONPATH"])
from benchmarks.gpu_steps import main
main(*sys.argv[1:])
"""


@pytest.mark.slow
def test_programme_for_a_gpu_runs_to_its_end(
    tmp_path: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step comes to its end and has found what it is for; what a CPU can't do is noted.

    The command itself is given with the first step; the others are forks, without its imports.
    """
    output, script = tmp_path / "found", tmp_path / "step.py"
    words = ["benchmarks/gpu.py", "--tiny", "--output", str(output), "--only", "tests"]
    environment = clean_environment(runner.folder) | {"TMPDIR": str(tmp_path)}
    status, said, errors = run_command(
        [sys.executable, *words], environment, REPOSITORY, 900, one_core=True
    )
    assert status == 0, said + errors
    script.write_text(FORKED_STEP)

    def fork(command: list[str], stdout: Any, **named: Any) -> Any:
        step = [str(script), str(REPOSITORY), *command[3:]]
        return runner.start(step, "python", environment, REPOSITORY, stdout, stdout)

    offered = {"DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(gpu, "subprocess", SimpleNamespace(Popen=fork, **offered))
    left = gpu.main(gpu.Options(output=output, tiny=True))
    assert left == 0, (output / "table.md").read_text()
    found = {name: json.loads((output / f"{name}.json").read_text()) for name in STEPS}
    assert {one["status"] for one in found.values()} == {"done"}
    assert all(one["figures"] for one in found.values())
    skipped = found["tests"]["figures"].values()
    assert all("no CUDA GPU" in test["skipped"] for test in skipped)
    (resumed,) = found["resume"]["figures"].values()
    assert {*resumed} == {"seconds"}
    cells = {name: cell for one in found.values() for name, cell in one["figures"].items()}
    assert "fp16 needs a CUDA GPU" in cells["mnist_mlp fp16"]["refused"]
    chosen = f"resnet {Options().precision}"
    for name in ("mnist_mlp fp32 compiled", chosen, "bert fp32", "resnet50 fp32"):
        assert cells[name]["samples_per_second"] > 0, name
        assert "failed" not in cells[name]
    for name in ("resnet50", "bert", "mnist"):
        assert all(row["ratio"]["median"] > 0 for row in cells[name]["comparisons"])
    assert (output / "transfer.png").stat().st_size > 0


def test_picture_shows_what_stood_in_the_terminal() -> None:
    """Lines that rich has gone back to and written anew stand once, with their last text."""
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=40, height=10, color_system=None)
    with Live("begun", console=console, auto_refresh=False) as live:
        console.print("above")
        live.update("one\ntwo", refresh=True)
        console.print("later")
        live.update("two thirds", refresh=True)
    assert screen_of(written.getvalue().replace("\n", "\r\n")) == "above\nlater\ntwo thirds"
