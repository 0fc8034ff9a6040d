"""The page `docs/reference.md` names all that a recipe may use, and only what exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

from common.errors import Preempted
from common.failures.outcomes import RunStatus
from common.flags import ROLES
from common.run_directory import records
from tests.launch import REPOSITORY
from tests.unit.test_structure import FILES, attributes_at_start, imported, nodes_of

PAGE = REPOSITORY / "docs" / "reference.md"
TEXT = PAGE.read_text(encoding="utf-8")
IMPORT = re.compile(r"\bfrom common[\w.]* import [\w, ]+")
COPIED = [
    path
    for folder in ("recipes", "examples")
    for path in sorted((REPOSITORY / folder).glob("*.py"))
]

# Public attributes of a run that are not for recipes: `recipes prove` and the benchmarks read them.
INTERNAL = {"context", "stages", "loaded", "kept", "evaluations"}


def attributes_of(module: str, class_name: str) -> set[str]:
    """Return the public attributes of a class: its methods, its properties, and its values."""
    (owner,) = (
        node
        for node in nodes_of(FILES[module])
        if isinstance(node, ast.ClassDef) and node.name == class_name
    )
    methods = {node.name for node in owner.body if isinstance(node, ast.FunctionDef)}
    names = methods | attributes_at_start(owner)
    return {name for name in names if not name.startswith("_")}


def named_after(words: str, text: str) -> set[str]:
    """Return the attributes that a text names after `words`, such as ``epoch`` after ``run``."""
    return set(re.findall(rf"\b{re.escape(words)}\.([A-Za-z]\w*)", text))


def test_all_that_a_recipe_may_call_is_named() -> None:
    """Each public attribute of a run is on the page, unless it is listed as internal."""
    public = attributes_of("common.run", "Run")
    assert public >= INTERNAL
    assert named_after("run", TEXT) == public - INTERNAL


@pytest.mark.parametrize(
    ("attribute", "module", "class_name"),
    [
        ("plan", "common.training.plan", "Plan"),
        ("progress", "common.training.progress", "Progress"),
        ("directory", "common.run_directory.directory", "RunDirectory"),
    ],
)
def test_parts_of_a_run_have_what_is_named(attribute: str, module: str, class_name: str) -> None:
    """The page also names some attributes of a run's attributes."""
    named = named_after(f"run.{attribute}", TEXT)
    assert named
    assert named <= attributes_of(module, class_name)


@pytest.mark.parametrize("path", COPIED, ids=lambda path: path.stem)
def test_what_recipes_use_is_named(path: Path) -> None:
    """A reader of a recipe finds each attribute of its run and each import on the page."""
    source = path.read_text(encoding="utf-8")
    assert named_after("run", source) <= named_after("run", TEXT)
    modules = imported(path, nodes_of(path)) - {"common.run"}
    assert modules <= imported(PAGE, nodes_of_imports())


def nodes_of_imports() -> list[ast.AST]:
    """Return the syntax of all imports on the page, as a flat list."""
    return [*ast.walk(ast.parse("\n".join(IMPORT.findall(TEXT))))]


def names_in(body: list[ast.stmt]) -> set[str]:
    """Return the names that the statements of a module define or import."""
    names: set[str] = set()
    for statement in body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef):
            names.add(statement.name)
        elif isinstance(statement, ast.ImportFrom):
            names |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.Assign):
            names |= {ast.unparse(target) for target in statement.targets}
        elif isinstance(statement, ast.If):  # imports for types
            names |= names_in(statement.body)
    return names


def test_imports_exist() -> None:
    """Each import on the page names a module of `common`, and names that the module has."""
    nodes = [node for node in nodes_of_imports() if isinstance(node, ast.ImportFrom)]
    assert len(nodes) > 20
    for node in nodes:
        assert node.module in FILES, node.module
        tree = ast.parse(FILES[node.module].read_text())
        missing = {alias.name for alias in node.names} - names_in(tree.body)
        assert not missing, f"{node.module} has no {missing}"


def test_roles_are_those_of_the_code() -> None:
    """The table has each role of a flag, with what it allows."""
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ ((?:\| (?:yes|no) )+)\|$", TEXT, re.MULTILINE)
    expected = []
    for name, role in ROLES.items():
        allowed = (role.free_on_resume, role.repeated, role.compared, role.searched)
        expected.append((name, "".join(f"| {'yes' if each else 'no'} " for each in allowed)))
    assert rows == expected


def test_files_are_named() -> None:
    """The tree has the files that have a record."""
    (tree,) = re.findall(r"^```text\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    named = {line.split()[0] for line in tree.splitlines()}
    for path in (
        records.CONFIG,
        records.STATUS,
        records.SUMMARY,
        records.METRICS_FILE,
        records.MEMORY,
        records.MODEL_JSON,
        records.ATTEMPTS,
        records.CHECKPOINT_DIGESTS,
    ):
        assert Path(path).name in named
    assert f"{records.PROVENANCE}/" in named


def test_statuses_are_those_of_the_code() -> None:
    """The page explains each status that a run writes, and the exit status of a stopped run."""
    explained = re.findall(r"^\| `(\w+)` \| (?:true|false)", TEXT, re.MULTILINE)
    assert sorted(explained) == sorted(get_args(RunStatus))
    assert f"\n| {Preempted('', is_by_ctrl_c=False).code} |" in TEXT
