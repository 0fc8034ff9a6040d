"""The common shape of the recipes, whose loop people copy."""

from __future__ import annotations

import ast
import difflib
import re
from itertools import combinations
from pathlib import Path

import pytest

from tests.launch import RECIPES, REPOSITORY

HEADINGS = ["Config", "Data", "Model", "Evaluation", "Main"]
# All recipes, including new ones.
FILES = sorted((REPOSITORY / "recipes").glob("*.py"))
PAIRS = list(combinations(FILES, 2))

# All lines in which one `main` may differ from another. They concern compilation, the optimizer,
# the length of warm-up, label smoothing, and test-time augmentation.
ALLOWED = {
    "compile_model(model, config)",
    'compile_layers(model.get_submodule("bert.encoder.layer").children())',
    "optimizer = build_optimizer(model, config)",
    "optimizer = build_optimizer(model, config, data)",
    "scheduler = run.plan.schedule(optimizer, warmup_share=WARMUP_SHARE[config.optimizer])",
    "scheduler = run.plan.schedule(optimizer, warmup_share=0.1)",
    "scheduler = run.plan.schedule(optimizer, warmup_share=0.0)",
    "loss, logits = compute_loss(model, batch)",
    "loss, logits = compute_loss(model, batch, config.label_smoothing)",
    "run.finish(evaluate(run, model, test_loader))",
    "# Views come first, because the run exports the model that is evaluated last.",
    "views = Views(accelerator.unwrap_model(model))  # test-time augmentation",
    'accuracy_tta = evaluate(run, views, test_loader)["accuracy"]',
    'run.finish(evaluate(run, model, test_loader) | {"accuracy_tta": accuracy_tta})',
}


def source_of(path: Path, function: str) -> list[str]:
    """Return the lines of a function in a file."""
    text = path.read_text()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return text.splitlines()[node.lineno - 1 : node.end_lineno]
    raise AssertionError(f"{path} has no function {function}")


def test_three_recipes_are_compared() -> None:
    """Otherwise the comparisons below would prove little."""
    assert len(FILES) >= 3
    assert {path.stem for path in FILES} >= set(RECIPES)
    assert len(ALLOWED) <= 20


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda path: path.stem)
def test_main_is_the_same(first: Path, second: Path) -> None:
    """`main` differs between recipes only in the allowed lines."""
    lines = difflib.ndiff(source_of(first, "main"), source_of(second, "main"))
    differing = [line for line in lines if line.startswith(("+ ", "- "))]
    unexpected = [line for line in differing if line[2:].strip() not in ALLOWED]
    # A lone bracket belongs to a call that differs.
    assert not [line for line in unexpected if line[2:].strip() not in ("(", ")")], unexpected
    assert len(differing) <= 20


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_main_holds_the_loop(path: Path) -> None:
    """Forward, backward, clipping, step, schedule and logging come in this order."""
    main = "\n".join(source_of(path, "main"))
    calls = [
        "Run(config, __file__, OBJECTIVE)",
        "run.loaders(data)",
        "accelerator.prepare(",
        "run.keep(model=model, optimizer=optimizer, scheduler=scheduler",
        "run.start(",
        "in run.batches(train_loader):",
        "if run.should_evaluate:",
        "run.log(evaluate(",
        "accelerator.accumulate(model)",
        "compute_loss(model, batch",
        "accelerator.backward(loss)",
        "if accelerator.sync_gradients:",
        "run.clip_grad_norm_(model, optimizer)",
        "optimizer.step()",
        "scheduler.step()",
        "optimizer.zero_grad()",
        "run.record(loss, metrics(logits, batch))",
        "if run.should_save:",
        "run.save()",
        "if run.should_evaluate:",
        "run.log(evaluate(",
        "run.finish(evaluate(",
    ]
    position = 0
    for call in calls:
        position = main.find(call, position) + len(call)
        assert position >= len(call), call
    for absent in ("try:", "except", ".item()", "print(", "%", "is_main_process"):
        assert absent not in main


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_headings_are_the_same(path: Path) -> None:
    """Headings come in the same order and have the same width in all recipes."""
    banners = re.findall(r"^# -+ \w+$", path.read_text(), re.MULTILINE)
    assert [banner.split()[-1] for banner in banners] == HEADINGS
    assert len({len(banner) for banner in banners}) == 1


@pytest.mark.parametrize("name", ["metrics", "evaluate"])
def test_evaluation_is_the_same(name: str) -> None:
    """The recipes evaluate alike, during training and at the end."""
    sources = {"\n".join(source_of(path, name)) for path in FILES}
    assert len(sources) == 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_recipe_is_one_short_file(path: Path) -> None:
    """Lines have at most 100 characters, an objective is stated, and no recipe imports another."""
    lines = path.read_text().splitlines()
    assert max(map(len, lines)) <= 100
    tree = ast.parse(path.read_text())
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in imported if name and name.startswith("recipes")]
    objectives = [line for line in lines if re.fullmatch(r'OBJECTIVE = "\w+:(max|min)"', line)]
    assert len(objectives) == 1
    docstring = ast.get_docstring(tree)
    assert docstring
    assert "accelerate launch" in docstring
