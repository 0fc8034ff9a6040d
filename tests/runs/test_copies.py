"""Recipes copied for other tasks: each learns, resumes, scales, compares and can be searched."""

from __future__ import annotations

import ast
import difflib
import json
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from common.checkpoints.folders import step_folders
from common.objective import Objective
from common.tools.compare.command import main
from common.tools.recipe import load_recipe
from common.tools.tune.command import main as search
from common.tools.tune.space import parse_space
from tests.conftest import first
from tests.examples import COPIES, Copy
from tests.jobs import Job, assert_same_result, killed_and_resumed, newest_step
from tests.launch import REPOSITORY, Finished, Launcher, Runner

EACH = pytest.mark.parametrize("copy", COPIES, ids=lambda copy: copy.name, indirect=True)
# By default the first ones alone: all others are slow tests.
TWO = pytest.mark.parametrize("copy", first(1, COPIES), ids=lambda copy: copy.name, indirect=True)
# For these, the test edits a copy of a whole run into the state that a kill leaves.
RESUMED = COPIES[:4]
QUIET = ("--tracker", "none", "--log-every", 2, "--keep-checkpoints", 100)
# The parts of the recipe's loop that each copy keeps, in this order.
KEPT = (
    "Run(config, __file__, OBJECTIVE",
    "run.loaders(data)",
    "run.keep(model=",
    "run.start(",
    "in run.batches(train_loader):",
    "if run.should_evaluate:",
    "run.log(",
    "accelerator.accumulate(",
    "accelerator.backward(",
    "optimizer",
    ".step()",
    "zero_grad()",
    "run.record(",
    "if run.should_save:",
    "run.save()",
    "run.finish(evaluate(",
)


@pytest.fixture
def copy(request: pytest.FixtureRequest) -> Copy:
    """One of the listed copies, with its data set added to its flags."""
    return with_data(request.param, request)


def with_data(copy: Copy, request: pytest.FixtureRequest) -> Copy:
    """Return the copy with its data set added to its flags, if a fixture provides one."""
    if copy.dataset is None:
        return copy
    return replace(copy, flags=(*copy.flags, "--dataset", request.getfixturevalue(copy.dataset)))


def whole(runner: Runner, copy: Copy, launcher: Launcher = "fork") -> Finished:
    """Return the run of a copy that nothing stops."""
    if launcher == "fork":
        return runner.shared(copy.path, *copy.flags, *QUIET)
    return runner.shared(copy.path, *copy.flags, *QUIET, launcher=launcher)


def test_each_copy_is_listed() -> None:
    """Each file in `examples/` is in the list, so that the tests below run it."""
    files = {path.stem for path in (REPOSITORY / "examples").glob("[!_]*.py")}
    assert files - {"listed"} == {copy.name for copy in COPIES}


@EACH
def test_copy_is_short_and_has_the_same_loop(copy: Copy) -> None:
    """A copy keeps the recipe's loop and sections, so that people can read both side by side."""
    text = copy.path.read_text()
    assert len(text.splitlines()) <= copy.most_lines
    (main,) = [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name == "main"
    ]
    source = ast.unparse(main)
    position = 0
    for call in KEPT:
        position = source.find(call, position) + len(call)
        assert position >= len(call), call
    origin = (REPOSITORY / "recipes" / f"{copy.origin}.py").read_text()
    banners = [line for line in origin.splitlines() if line.startswith("# ---")]
    assert [line for line in text.splitlines() if line.startswith("# ---")] == banners
    changes = difflib.ndiff(origin.splitlines(), text.splitlines())
    assert sum(line.startswith("+ ") for line in changes) <= copy.most_changed


@TWO
def test_copy_learns(copy: Copy, runner: Runner) -> None:
    """The copy's objective reaches its target, and the summary has its best value."""
    run = whole(runner, copy)
    objective = Objective.parse(run.config["objective"])
    final = run.summary.get(f"test/{objective.metric}", run.summary.get(f"val/{objective.metric}"))
    assert final is not None
    assert objective.reaches(final, copy.target), final
    values = run.series(f"val/{objective.metric}").values()
    if "validation" in run.config["data"]["sizes"]:
        assert run.summary[objective.best_key] == pytest.approx(objective.best(values))
    losses = [*run.series("train/loss").values()]
    assert losses != sorted(losses)
    # Where validation stands in for test, the final evaluation repeats a line: it is printed once.
    evaluations = re.findall(r"^epoch .* of [\d,]+: .*", run.output, re.MULTILINE)
    lines = [line.removesuffix("  ★ best") for line in evaluations]
    assert len(lines) == len({*lines}) > 0


@pytest.mark.parametrize("copy", first(1, RESUMED), ids=lambda copy: copy.name, indirect=True)
def test_copy_resumes_after_a_kill(copy: Copy, runner: Runner, tmp_path: Path) -> None:
    """The same command resumes a run that was killed halfway, to the same rows and weights.

    The slow tests below kill every other copy for real.
    """
    run = whole(runner, copy)
    directory = tmp_path / "run"
    shutil.copytree(run.directory, directory)
    checkpoints = step_folders(directory / "checkpoints")
    middle = len(checkpoints) * 2 // 3
    for folder in (*checkpoints[middle:], directory / "model"):
        shutil.rmtree(folder)
    (directory / "summary.json").unlink()
    (directory / "status.json").write_text(json.dumps({"status": "running", "resumable": True}))
    assert 0 < newest_step(directory) < run.summary["progress/global_step"]
    again = (*copy.flags, *QUIET, "--output-dir", directory, "--resume", "auto")
    resumed = runner.run(copy.path, *again, output_directory=False)
    assert "resuming" in resumed.output
    assert_same_result(directory, run.directory)


@pytest.mark.slow
@pytest.mark.parametrize(
    "copy",
    [copy for copy in COPIES if copy not in RESUMED and not copy.is_killed_on_two],
    ids=lambda copy: copy.name,
    indirect=True,
)
def test_copy_survives_kill_9(copy: Copy, runner: Runner, tmp_path: Path) -> None:
    """A run that is really killed after its first checkpoint resumes to the same rows and bits."""
    resumed = kill_and_resume(copy, runner, tmp_path / "run", "fork")
    assert_same_result(resumed.directory, whole(runner, copy).directory)


@pytest.mark.slow
@pytest.mark.parametrize(
    "copy",
    [copy for copy in COPIES if copy.is_killed_on_two],
    ids=lambda copy: copy.name,
    indirect=True,
)
def test_copy_survives_kill_9_on_two_processes(copy: Copy, runner: Runner, tmp_path: Path) -> None:
    """A run whose two processes are killed at once, as by a power cut, resumes to the same bits."""
    resumed = kill_and_resume(copy, runner, tmp_path / "run", "two forks")
    assert_same_result(resumed.directory, whole(runner, copy, "two forks").directory)


def kill_and_resume(copy: Copy, runner: Runner, directory: Path, launcher: Launcher) -> Job:
    """Kill a run after a third of its updates and resume it to its end."""
    total_steps = whole(runner, copy, launcher).summary["progress/global_step"]
    return killed_and_resumed(
        runner,
        copy.path,
        *copy.flags,
        *QUIET,
        directory=directory,
        kill_at=total_steps // 3,
        total_steps=total_steps,
        launcher=launcher,
    )


@pytest.mark.parametrize(
    "copy",
    first(0, [copy for copy in COPIES if copy.same_on_two is not None]),
    ids=lambda copy: copy.name,
    indirect=True,
)
def test_copy_on_two_processes_is_the_copy_on_one(copy: Copy, runner: Runner) -> None:
    """Two processes make the same updates as one with twice the accumulation or batch."""
    assert copy.same_on_two is not None
    flags = (*copy.flags, *copy.same_on_two, *QUIET, "--log-every", 1, "--mixed-precision", "no")
    on_one = runner.run(copy.path, *flags, *copy.same_on_one)
    on_two = runner.run(copy.path, *flags, launcher="two forks")
    assert on_two.config["environment"]["world_size"] == 2
    assert on_one.series("train/loss") == pytest.approx(on_two.series("train/loss"), rel=1e-3)
    objective = Objective.parse(on_one.config["objective"])
    for prefix in ("val", "test"):
        for name in (f"{prefix}/{objective.metric}", f"{prefix}/count"):
            if name in on_one.summary and (copy.evaluated_same_on_two or name.endswith("count")):
                assert on_one.summary[name] == pytest.approx(on_two.summary[name], rel=2e-3), name


@TWO
def test_copy_is_exported(copy: Copy, runner: Runner) -> None:
    """The exported model reproduces the figures of the run's final evaluation."""
    run = whole(runner, copy)
    again = runner.run(
        *(copy.path, *copy.flags, *QUIET, "--evaluate-only", "--init-from", run.directory)
    )
    split = "test/" if "test" in run.config["data"]["sizes"] else "val/"
    figures = {name: value for name, value in again.summary.items() if name.startswith(split)}
    figures = {name: value for name, value in figures.items() if "best" not in name}
    assert figures == {name: run.summary[name] for name in figures} != {}


@TWO
def test_copy_is_compared(copy: Copy, runner: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    """`recipes compare` shows the final value of the copy's own objective."""
    run = whole(runner, copy)
    main([str(run.directory), str(run.directory), "--json"])
    shown = json.loads(capsys.readouterr().out)
    metric = Objective.parse(run.config["objective"]).metric
    final = run.summary.get(f"test/{metric}", run.summary.get(f"val/{metric}"))
    assert json.dumps(final) in json.dumps(shown)


@pytest.mark.slow
def test_copies_are_compared_with_each_other(
    runner: Runner, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """`recipes compare` shows each copy's objective and warns that the objectives differ."""
    runs = [whole(runner, with_data(copy, request)) for copy in COPIES]
    main([*(str(run.directory) for run in runs), "--json"])
    shown = json.loads(capsys.readouterr().out)
    objectives = [run.config["objective"] for run in runs]
    assert [compared["objective"] for compared in shown["runs"]] == objectives
    assert len(set(objectives)) > 1
    assert "objective" in json.dumps(shown["unfair"])


@pytest.mark.parametrize("copy", first(1, COPIES), ids=lambda copy: copy.name, indirect=True)
def test_copy_can_be_searched(copy: Copy, runner: Runner) -> None:
    """`recipes tune` can read the copy's flags, and a run gives the objective's best value."""
    recipe = load_recipe(copy.path)
    searched, shared = parse_space([copy.searched, copy.space, *map(str, copy.flags)], recipe)
    assert list(searched) == [copy.searched.removeprefix("--")]
    flags = (*shared, *QUIET, "--validation-share", 0.1, "--max-steps", 2, "--eval-every", 1)
    assert recipe.objective.best_key in runner.run(copy.path, *flags).summary


@pytest.mark.slow
@pytest.mark.parametrize(
    "copy",
    [copy for copy in COPIES if copy.name == "regression"],
    ids=lambda copy: copy.name,
    indirect=True,
)
@pytest.mark.usefixtures("forking_python")
def test_copy_is_searched(
    copy: Copy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`recipes tune` takes the objective and its direction, here a minimum, from the copy."""
    study = tmp_path / "study"
    handler = signal.getsignal(signal.SIGTERM)
    words = [copy.path, copy.searched, copy.space, *copy.flags, *QUIET, "--eval-every", 10]
    monkeypatch.chdir(tmp_path)
    try:
        search([str(word) for word in (*words, "--max-steps", 20, "--trials", 2, "--study", study)])
    finally:
        signal.signal(signal.SIGTERM, handler)
    trials = sorted(study.glob("trial-*/summary.json"))
    assert len(trials) == 2
    facts = json.loads((trials[0].parent / "config.json").read_text())
    objective = Objective.parse(facts["objective"])
    values = [json.loads(path.read_text())[objective.best_key] for path in trials]
    best = trials[values.index(objective.best(values))].parent.name
    assert f"best: {best}" in capsys.readouterr().out
