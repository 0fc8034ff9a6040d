"""The examples: each one learns, resumes, scales, compares and can be searched."""

from __future__ import annotations

import ast
import difflib
import json
import re
import shutil
import signal
from collections.abc import Container, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.checkpoints.folders import step_folders
from common.objective import Objective
from common.tools.compare.command import main
from common.tools.recipe import load_recipe
from common.tools.tune.command import main as search
from common.tools.tune.space import parse_space
from tests.conftest import first
from tests.examples import EXAMPLES, Example
from tests.jobs import Job, assert_same_result, killed_and_resumed, newest_step
from tests.launch import REPOSITORY, Finished, Launcher, Runner

# For these, the test edits a copy of a whole run into the state that a kill leaves.
RESUMED = EXAMPLES[:4]
QUIET = ("--tracker", "none", "--log-every", 2, "--keep-checkpoints", 100)
# The parts of the recipe's loop that each example keeps, in this order.
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


# Those with the most state of their own: two networks, an average of the weights, an adapter. The
# others are killed and resumed by `benchmarks/proofs.py`, too, which also proves all of them.
KILLED_IN_CI = ("gan", "averaged", "lora", "dqn")
# Tokens with padding, a loss over characters, two losses.
ON_TWO_IN_CI = ("lora", "character_model", "two_heads")


def slow(examples: Iterable[Example], in_ci: Container[str]) -> list[Any]:
    """Return parameters for a slow test, which is exhaustive for examples not in `in_ci`."""
    return [
        pytest.param(
            example,
            marks=pytest.mark.slow if example.name in in_ci else pytest.mark.exhaustive,
        )
        for example in examples
    ]


def each(examples: Iterable[Any]) -> pytest.MarkDecorator:
    """Return a decorator that runs a test once for each example, which may be a `pytest.param`."""
    return pytest.mark.parametrize("example", examples, ids=lambda it: it.name, indirect=True)


@pytest.fixture
def example(request: pytest.FixtureRequest) -> Example:
    """One of the examples, with its data set added to its flags."""
    return with_data(request.param, request)


def with_data(example: Example, request: pytest.FixtureRequest) -> Example:
    """Return the example with its data set added to its flags, if a fixture provides one."""
    if example.dataset is None:
        return example
    folder = request.getfixturevalue(example.dataset)
    return replace(example, flags=(*example.flags, "--dataset", folder))


def whole(runner: Runner, example: Example, launcher: Launcher = "fork") -> Finished:
    """Return the run of an example that nothing stops."""
    if launcher == "fork":
        return runner.shared(example.path, *example.flags, *QUIET)
    return runner.shared(example.path, *example.flags, *QUIET, launcher=launcher)


def test_each_example_is_listed() -> None:
    """Each file in `examples/` is in the list, so that the tests below run it."""
    files = {path.stem for path in (REPOSITORY / "examples").glob("[!_]*.py")}
    assert files == {example.name for example in EXAMPLES}


@each(EXAMPLES)
def test_example_is_short_and_has_the_same_loop(example: Example) -> None:
    """It keeps the recipe's loop and sections, so that people can read both side by side."""
    text = example.path.read_text()
    assert len(text.splitlines()) <= example.most_lines
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
    origin = (REPOSITORY / "recipes" / f"{example.origin}.py").read_text()
    banners = [line for line in origin.splitlines() if line.startswith("# ---")]
    assert [line for line in text.splitlines() if line.startswith("# ---")] == banners
    changes = difflib.ndiff(origin.splitlines(), text.splitlines())
    assert sum(line.startswith("+ ") for line in changes) <= example.most_changed


@each(first(1, EXAMPLES))
def test_example_learns(example: Example, runner: Runner) -> None:
    """The example's objective reaches its target, and the summary has its best value."""
    run = whole(runner, example)
    objective = Objective.parse(run.config["objective"])
    final = run.summary.get(f"test/{objective.metric}", run.summary.get(f"val/{objective.metric}"))
    assert final is not None
    assert objective.reaches(final, example.target), final
    values = run.series(f"val/{objective.metric}").values()
    if "validation" in run.config["data"]["sizes"]:
        assert run.summary[objective.best_key] == pytest.approx(objective.best(values))
    losses = [*run.series("train/loss").values()]
    assert losses != sorted(losses)
    # Where validation stands in for test, the final evaluation repeats a line: it is printed once.
    evaluations = re.findall(r"^epoch .* of [\d,]+: .*", run.output, re.MULTILINE)
    lines = [line.removesuffix("  ★ best") for line in evaluations]
    assert len(lines) == len({*lines}) > 0


@each(first(1, RESUMED))
def test_example_resumes_after_a_kill(example: Example, runner: Runner, tmp_path: Path) -> None:
    """The same command resumes a run that was killed halfway, to the same rows and weights.

    The slow tests below kill every other example for real.
    """
    run = whole(runner, example)
    directory = tmp_path / "run"
    shutil.copytree(run.directory, directory)
    checkpoints = step_folders(directory / "checkpoints")
    middle = len(checkpoints) * 2 // 3
    for folder in (*checkpoints[middle:], directory / "model"):
        shutil.rmtree(folder)
    (directory / "summary.json").unlink()
    (directory / "status.json").write_text(json.dumps({"status": "running", "resumable": True}))
    assert 0 < newest_step(directory) < run.summary["progress/global_step"]
    again = (*example.flags, *QUIET, "--output-dir", directory, "--resume", "auto")
    resumed = runner.run(example.path, *again, output_directory=False)
    assert "resuming" in resumed.output
    assert_same_result(directory, run.directory)


@each(slow([it for it in EXAMPLES if it not in RESUMED and not it.is_killed_on_two], KILLED_IN_CI))
def test_example_survives_kill_9(example: Example, runner: Runner, tmp_path: Path) -> None:
    """A run that is really killed after its first checkpoint resumes to the same rows and bits."""
    resumed = kill_and_resume(example, runner, tmp_path / "run", "fork")
    assert_same_result(resumed.directory, whole(runner, example).directory)


@each(slow([example for example in EXAMPLES if example.is_killed_on_two], KILLED_IN_CI))
def test_example_survives_kill_9_on_two_processes(
    example: Example, runner: Runner, tmp_path: Path
) -> None:
    """A run whose two processes are killed at once, as by a power cut, resumes to the same bits."""
    resumed = kill_and_resume(example, runner, tmp_path / "run", "two forks")
    assert_same_result(resumed.directory, whole(runner, example, "two forks").directory)


def kill_and_resume(example: Example, runner: Runner, directory: Path, launcher: Launcher) -> Job:
    """Kill a run after a third of its updates and resume it to its end."""
    total_steps = whole(runner, example, launcher).summary["progress/global_step"]
    return killed_and_resumed(
        runner,
        example.path,
        *example.flags,
        *QUIET,
        directory=directory,
        kill_at=total_steps // 3,
        total_steps=total_steps,
        launcher=launcher,
    )


@each(slow([example for example in EXAMPLES if example.same_on_two is not None], ON_TWO_IN_CI))
def test_example_on_two_processes_is_the_example_on_one(example: Example, runner: Runner) -> None:
    """Two processes make the same updates as one with twice the accumulation or batch."""
    assert example.same_on_two is not None
    exact = ("--log-every", 1, "--mixed-precision", "no")
    flags = (*example.flags, *example.same_on_two, *QUIET, *exact)
    on_one = runner.run(example.path, *flags, *example.same_on_one)
    on_two = runner.run(example.path, *flags, launcher="two forks")
    assert on_two.config["environment"]["world_size"] == 2
    assert on_one.series("train/loss") == pytest.approx(on_two.series("train/loss"), rel=1e-3)
    objective = Objective.parse(on_one.config["objective"])
    for prefix in ("val", "test"):
        for name in (f"{prefix}/{objective.metric}", f"{prefix}/count"):
            if name in on_one.summary and (example.evaluated_same_on_two or name.endswith("count")):
                assert on_one.summary[name] == pytest.approx(on_two.summary[name], rel=2e-3), name


@each(first(1, EXAMPLES))
def test_example_is_exported(example: Example, runner: Runner) -> None:
    """The exported model reproduces the figures of the run's final evaluation."""
    run = whole(runner, example)
    again = runner.run(
        *(example.path, *example.flags, *QUIET, "--evaluate-only", "--init-from", run.directory)
    )
    split = "test/" if "test" in run.config["data"]["sizes"] else "val/"
    figures = {name: value for name, value in again.summary.items() if name.startswith(split)}
    figures = {name: value for name, value in figures.items() if "best" not in name}
    assert figures == {name: run.summary[name] for name in figures} != {}


@each(first(1, EXAMPLES))
def test_example_is_compared(
    example: Example, runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    """`recipes compare` shows the final value of the example's own objective."""
    run = whole(runner, example)
    main([str(run.directory), str(run.directory), "--json"])
    shown = json.loads(capsys.readouterr().out)
    metric = Objective.parse(run.config["objective"]).metric
    final = run.summary.get(f"test/{metric}", run.summary.get(f"val/{metric}"))
    assert json.dumps(final) in json.dumps(shown)


@pytest.mark.slow
def test_examples_are_compared_with_each_other(
    runner: Runner, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """`recipes compare` shows each example's objective and warns that the objectives differ."""
    runs = [whole(runner, with_data(example, request)) for example in EXAMPLES]
    main([*(str(run.directory) for run in runs), "--json"])
    shown = json.loads(capsys.readouterr().out)
    objectives = [run.config["objective"] for run in runs]
    assert [compared["objective"] for compared in shown["runs"]] == objectives
    assert len(set(objectives)) > 1
    assert "objective" in json.dumps(shown["unfair"])


@each(first(1, EXAMPLES, in_ci=5))
def test_example_can_be_searched(example: Example, runner: Runner) -> None:
    """`recipes tune` can read the example's flags, and a run gives the objective's best value."""
    recipe = load_recipe(example.path)
    words = [example.searched, example.space, *map(str, example.flags)]
    searched, shared = parse_space(words, recipe)
    assert list(searched) == [example.searched.removeprefix("--")]
    flags = (*shared, *QUIET, "--validation-share", 0.1, "--max-steps", 2, "--eval-every", 1)
    assert recipe.objective.best_key in runner.run(example.path, *flags).summary


@pytest.mark.slow
@each([example for example in EXAMPLES if example.name == "regression"])
@pytest.mark.usefixtures("forking_python")
def test_example_is_searched(
    example: Example,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`recipes tune` takes the objective and its direction, here a minimum, from the example."""
    study = tmp_path / "study"
    handler = signal.getsignal(signal.SIGTERM)
    searched = (example.path, example.searched, example.space)
    limits = ("--eval-every", 10, "--max-steps", 20, "--trials", 2)
    words = (*searched, *example.flags, *QUIET, *limits, "--study", study)
    monkeypatch.chdir(tmp_path)
    try:
        search([str(word) for word in words])
    finally:
        signal.signal(signal.SIGTERM, handler)
    trials = sorted(study.glob("trial-*/summary.json"))
    assert len(trials) == 2
    facts = json.loads((trials[0].parent / "config.json").read_text())
    objective = Objective.parse(facts["objective"])
    values = [json.loads(path.read_text())[objective.best_key] for path in trials]
    best = trials[values.index(objective.best(values))].parent.name
    assert f"best: {best}" in capsys.readouterr().out
