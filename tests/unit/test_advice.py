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
    inheriting = [definition for definition in definitions if not has_constructor(definition)]
    names: set[str] = set()
    more = {errors.UserError.__name__}
    while more != names:  # a subclass of a subclass takes another round
        names = set(more)
        for definition in inheriting:
            if {*map(last_name, definition.bases)} & names:
                more.add(definition.name)
    return names


def has_constructor(definition: ast.ClassDef) -> bool:
    """Whether a class has a constructor of its own."""
    methods = [item.name for item in definition.body if isinstance(item, ast.FunctionDef)]
    return "__init__" in methods


def last_name(expression: ast.expr) -> str:
    """Return the last part of a dotted name, or nothing for another expression."""
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""


def is_call_of_the_super_constructor(node: ast.AST) -> bool:
    """Whether a node is a call of ``super().__init__``."""
    if not isinstance(node, ast.Call) or last_name(node.func) != "__init__":
        return False
    return ast.unparse(node.func) == "super().__init__"


def calls_of(tree: ast.Module, names: set[str]) -> Iterator[ast.Call]:
    """Yield the calls of these classes, and of the constructor that a subclass extends."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and last_name(node.func) in names:
            yield node
    for definition in ast.walk(tree):
        if not isinstance(definition, ast.ClassDef):
            continue
        if {*map(last_name, definition.bases)} & names:
            yield from filter(is_call_of_the_super_constructor, ast.walk(definition))


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
    assert {"UserError", "TrainingError"} <= names
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
