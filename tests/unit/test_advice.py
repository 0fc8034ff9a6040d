"""Each error that a user can mend says what to do, in the argument `advice`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import errors

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path for folder in ("common", "recipes", "examples") for path in ROOT.glob(f"{folder}/**/*.py")
)


def classes_without_advice_of_their_own(trees: list[ast.Module]) -> set[str]:
    """Return the names of `UserError` and of those subclasses that inherit its constructor."""
    definitions = [
        node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    names = {errors.UserError.__name__}
    for _ in definitions:  # a subclass of a subclass takes another round
        for definition in definitions:
            bases = {ast.unparse(base).rpartition(".")[2] for base in definition.bases}
            methods = {item.name for item in definition.body if isinstance(item, ast.FunctionDef)}
            if bases & names and "__init__" not in methods:
                names.add(definition.name)
    return names


def calls_of(tree: ast.Module, names: set[str]) -> Iterator[ast.Call]:
    """Yield the calls of these classes, and of the constructor that a subclass extends."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in names:
            yield node
    for definition in ast.walk(tree):
        if not isinstance(definition, ast.ClassDef):
            continue
        if not any(ast.unparse(base).rpartition(".")[2] in names for base in definition.bases):
            continue
        for node in ast.walk(definition):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__":
                yield node


def has_advice(call: ast.Call) -> bool:
    """Whether a call passes `advice`, and something else than an empty text."""
    for keyword in call.keywords:
        if keyword.arg == "advice":
            value = keyword.value
            is_empty = isinstance(value, ast.Constant) and not value.value
            return not is_empty
    return False


def mistakes_in(tree: ast.Module, names: set[str]) -> list[int]:
    """Return the lines of the errors that do not say what to do."""
    return [call.lineno for call in calls_of(tree, names) if not has_advice(call)]


def test_each_error_of_a_user_says_what_to_do() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
    names = classes_without_advice_of_their_own(list(trees.values()))
    assert {"UserError", "TrainingError", "EditedConfigError"} <= names
    assert sum(len(list(calls_of(tree, names))) for tree in trees.values()) > 200
    places = [
        f"{path.relative_to(ROOT)}:{line}"
        for path, tree in trees.items()
        for line in mistakes_in(tree, names)
    ]
    assert places == [], 'pass advice="what the user can do" here'


@pytest.mark.parametrize(
    "source",
    [
        'raise UserError("it is empty")',
        'raise UserError("it is empty: fill it")',
        'raise UserError("it is empty", advice="")',
        'raise errors.UserError("it is empty", resumable=True)',
        'class Other(UserError):\n    def __init__(self):\n        super().__init__("it is empty")',
    ],
)
def test_an_error_without_advice_is_found(source: str) -> None:
    assert len(mistakes_in(ast.parse(source), {"UserError"})) == 1


@pytest.mark.parametrize("source", ['UserError("it is empty", advice="fill it")', "TypeError(1)"])
def test_an_error_with_advice_passes(source: str) -> None:
    assert mistakes_in(ast.parse(source), {"UserError"}) == []
