"""The structure of the code: imports run downward, and each module says what it is for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch import REPOSITORY

COMMON = REPOSITORY / "common"
MAX_LINES_OF_A_RECIPE = 240
MAX_LINES_OF_THE_README = 200

# From the bottom up. A part is a package or a single module of `common`. It may import parts on
# lower levels. Modules of one package may import each other.
LEVELS = (
    ("system", "metric_names"),
    ("errors",),
    ("failures", "console"),
    ("flags", "objective", "ranks", "storage"),
    ("output",),
    ("run_directory",),
    ("command_line",),
    ("config",),
    ("data",),
    ("checkpoints",),
    ("models",),
    ("measure",),
    ("training",),
    ("track",),
    ("profile",),
    ("lifecycle",),
    ("run",),
)
LEVEL = {f"common.{part}": level for level, parts in enumerate(LEVELS) for part in parts}
# A large package has parts of its own, with levels that work in the same way.
LEVELS_WITHIN = {
    "common.data": (
        ("evaluated_model", "order", "places", "versions"),
        ("mistakes", "sources"),
        ("prepared_data", "samples"),
        ("labelled_data",),
        ("dataset", "iterable", "stored_samples"),
        ("reading", "unused_flags", "workers"),
        ("loader", "streaming"),
        ("image_decoding", "run_loaders", "tokens"),
        ("image_batches", "text"),
        ("images",),
    ),
    "common.training": (
        ("adversarial", "gradients", "launch", "optim", "out_of_memory", "progress"),
        ("muon", "plan", "precision", "rates", "stop_request", "unequal_weights"),
        ("sharding",),
        ("accelerator", "evaluation", "rank_decisions"),
        ("batch_size",),
    ),
    "common.lifecycle": (
        (
            "added_gradients",
            "crossed_shapes",
            "first_batch",
            "misuse",
            "resolution",
            "tensor_errors",
        ),
        ("stages",),
        (
            "keeping",
            "loading",
            "saving",
            "setup",
            "training_figures",
            "training_watch",
            "trying_loss",
            "unread_flags",
        ),
        ("evaluated_networks", "evaluation_figures", "start"),
        ("evaluations",),
        ("end", "training_loop"),
    ),
    "common.tools.prove": (
        ("records", "verdicts"),
        ("recomputation", "reach"),
        ("observation",),
        ("instruments",),
        ("proof_runs",),
        ("exact_comparison", "layouts"),
        ("checks",),
        ("request", "receipt"),
        ("receipt_making", "report"),
        ("proof",),
        ("command",),
    ),
}
BASE = {f"common.{part}" for parts in LEVELS[: LEVELS.index(("data",))] for part in parts}
TRACKS = {
    f"common.track.{module}"
    for module in ("flat_config", "names", "trackers.tracker", "trackers.wandb_environment")
}
FLAG_WORDS = "common.tools.flag_words"
PARSER = "common.tools.parser"
RECIPE = "common.tools.recipe"
STATISTICS = "common.tools.statistics"
COMPARE = "common.tools.compare"
LAUNCHING = "common.tools.launching"
ROWS = "common.tools.rows"
TENSORS = "common.tools.tensors"
TUNE = "common.tools.tune"
# The tools work on runs from outside. Each has its own list of what it may import besides itself.
# `__main__` names the tools' modules as text, so that it imports only the one that runs.
TOOLS = {
    "common.tools.__main__": BASE,
    FLAG_WORDS: BASE,
    PARSER: BASE,
    STATISTICS: set(),
    COMPARE: BASE | TRACKS | {PARSER, STATISTICS},
    RECIPE: BASE,
    ROWS: BASE | TRACKS,
    TENSORS: set(),
    LAUNCHING: BASE | {COMPARE},
    TUNE: BASE | TRACKS | {FLAG_WORDS, PARSER, RECIPE, COMPARE, LAUNCHING, STATISTICS},
    "common.tools.workspace": BASE | TRACKS | {PARSER, COMPARE},
    "common.tools.vary": BASE | TRACKS | {PARSER, RECIPE, COMPARE, LAUNCHING, TUNE},
    "common.tools.predict": BASE
    | {PARSER, RECIPE}
    | {f"common.{part}" for part in ("data", "checkpoints", "models", "training")},
    "common.tools.reproduce": BASE
    | TRACKS
    | {PARSER, COMPARE, LAUNCHING, ROWS, TENSORS, "common.checkpoints"},
    # It runs a recipe in a process of its own, and observes all that the recipe uses.
    "common.tools.prove": {f"common.{part}" for parts in LEVELS for part in parts}
    | {FLAG_WORDS, PARSER, RECIPE, LAUNCHING, ROWS, TENSORS},
}


def module_of(path: Path) -> str:
    """Return the dotted name of a file of the repository."""
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for path in sorted(COMMON.rglob("*.py"))}
MODULES = {name: path for name, path in FILES.items() if path.name != "__init__.py"}
OTHERS = [
    path
    for folder in ("recipes", "examples", "tests", "benchmarks")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
]


Nodes = dict[str, list[ast.AST]]  # by module
Imports = dict[str, set[str]]  # modules of `common` that a module imports


def nodes_of(path: Path) -> list[ast.AST]:
    """Return the syntax of a file as a flat list."""
    return [*ast.walk(ast.parse(path.read_text()))]


# Parsing takes a second: not while tests are collected, which each of pytest's workers does.
@pytest.fixture(scope="module")
def nodes() -> Nodes:
    """The syntax of all modules of `common`."""
    return {module: nodes_of(path) for module, path in FILES.items()}


@pytest.fixture(scope="module")
def imports(nodes: Nodes) -> Imports:
    """The imports of all modules of `common`."""
    return {module: imported(FILES[module], nodes[module]) for module in FILES}


def imported(path: Path, nodes: list[ast.AST]) -> set[str]:
    """Return the modules of `common` that a file imports anywhere, even for types only."""
    imports = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            # A name imported from a package may be one of its modules.
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = names & FILES.keys()
            imports |= modules
            if len(modules) < len(names):
                imports.add(node.module)
        elif isinstance(node, ast.ImportFrom):
            raise AssertionError(f"{path}: line {node.lineno} imports relative to itself")
    return {name for name in imports if name.split(".")[0] == "common" and name != "common"}


def part_of(module: str) -> str:
    """Return the part of a module: common.data for common.data.order; each tool is a part."""
    depth = 3 if is_tool(module) else 2
    return ".".join(module.split(".")[:depth])


def is_tool(module: str) -> bool:
    return module == "common.tools" or module.startswith("common.tools.")


def test_imports_name_existing_modules(imports: Imports) -> None:
    """Otherwise the tests below would not see them."""
    assert len(MODULES) > 30
    for name, modules in imports.items():
        assert modules <= FILES.keys(), (name, modules - FILES.keys())


def test_every_part_has_a_level() -> None:
    """A new one gets its place in LEVELS or TOOLS."""
    assert {part_of(name) for name in MODULES} == LEVEL.keys() | TOOLS.keys()


def test_imports_run_downward_only(imports: Imports) -> None:
    """This includes imports inside functions and for types only."""
    pairs = [(module, other) for module in FILES for other in imports[module]]
    for module, other in pairs:
        part = part_of(module)
        if part_of(other) == part:
            continue
        if part in TOOLS:
            assert {other, part_of(other)} & TOOLS[part], f"{module} imports {other}"
        elif part in LEVEL:
            assert LEVEL.get(part_of(other), 99) < LEVEL[part], f"{module} imports {other}"


@pytest.mark.parametrize("package", LEVELS_WITHIN)
def test_parts_within_a_package_import_downward_only(package: str, imports: Imports) -> None:
    """Each part within a large package has a level, and imports only parts on lower levels."""
    levels = enumerate(LEVELS_WITHIN[package])
    level = {f"{package}.{part}": number for number, parts in levels for part in parts}
    depth = package.count(".") + 2
    part_by_module = {
        module: ".".join(module.split(".")[:depth])
        for module in FILES
        if module.startswith(f"{package}.")
    }
    assert set(part_by_module.values()) == level.keys()
    for module, part in part_by_module.items():
        for other in imports[module] & part_by_module.keys():
            other_part = part_by_module[other]
            is_lower = level[other_part] < level[part]
            assert is_lower or other_part == part, f"{module} imports {other}"


@pytest.mark.parametrize("package", LEVELS_WITHIN)
def test_package_within_a_package_has_several_modules(package: str) -> None:
    """A package for a single module would only hide it, and its docstring says what it holds."""
    folder = FILES[package].parent
    for path in folder.glob("*/__init__.py"):
        assert len([*path.parent.glob("*.py")]) > 2, path
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_core_imports_no_tool(imports: Imports) -> None:
    """A training process never needs a tool, not even inside a function or for a type."""
    for module in FILES:
        tools = {other for other in imports[module] if is_tool(other)}
        assert is_tool(module) or not tools, f"{module} imports {min(tools)}"


def import_cycles(imports: Imports) -> Iterator[list[str]]:
    """Yield each cycle of imports that a walk through the modules meets."""
    finished: set[str] = set()

    def walk(module: str, path: list[str]) -> Iterator[list[str]]:
        if module in path:
            yield [*path[path.index(module) :], module]
        elif module not in finished:
            for other in sorted(imports.get(module, set())):
                yield from walk(other, [*path, module])
            finished.add(module)

    for module in FILES:
        yield from walk(module, [])


def test_imports_have_no_cycles(imports: Imports) -> None:
    """No module imports itself through others."""
    assert [*import_cycles(imports)] == []


# It observes the methods of a recipe's run, in the process of the recipe.
PROVE = "common.tools.prove."


def test_only_recipes_import_run(nodes: Nodes, imports: Imports) -> None:
    """Nothing in `common` imports `common.run` or names its class, apart from `recipes prove`."""
    for module in FILES:
        if module == "common.run" or module.startswith(PROVE):
            continue
        assert "common.run" not in imports[module], module
        for node in nodes[module]:
            # An annotation may be a string.
            words = (
                getattr(node, "id", ""),
                getattr(node, "attr", ""),
                node.value if isinstance(node, ast.Constant) else "",
            )
            assert "Run" not in words, f"{module}, line {getattr(node, 'lineno', '?')}"


def test_module_has_a_docstring_and_a_telling_name() -> None:
    """No module is called `utils` or the like."""
    for module, path in MODULES.items():
        lines = path.read_text().splitlines()
        assert lines[0].startswith('"""'), module
        assert len(lines[0]) > 20, module
        assert not {"utils", "util", "helpers", "misc"} & set(module.split(".")), module


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "recipes").glob("*.py")), ids=lambda p: p.stem
)
def test_recipes_are_short(path: Path) -> None:
    """Users read and copy them first."""
    assert len(path.read_text().splitlines()) <= MAX_LINES_OF_A_RECIPE


def test_readme_is_short() -> None:
    """A newcomer reads all of it; the pages under `docs/` have the rest."""
    text = (REPOSITORY / "README.md").read_text()
    assert len(text.splitlines()) <= MAX_LINES_OF_THE_README


def test_common_knows_no_recipe(nodes: Nodes) -> None:
    """The shared code imports no recipe, unpickles nothing, and trusts no code from the Hub."""
    others = {"recipes", "examples", "tests", "benchmarks", "pickle"}
    for module, path in FILES.items():
        text = path.read_text()
        for node in nodes[module]:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not others & {name.split(".")[0] for name in names}, module
        for forbidden in ("torch.load(", "weights_only=False", "trust_remote_code=True"):
            assert forbidden not in text, module


# A class that is made of another object has a method instead of a constructor.
CONSTRUCTORS = {
    "FreezableDDP": ("remember_parameters",),
}
# Attributes that a base class has.
INHERITED = {
    "FreezableDDP": {"_comm_hooks"},
    "UserError": {"code"},
}


def test_objects_have_their_attributes_from_the_start(nodes: Nodes) -> None:
    """A value that does not exist yet is None or empty, so no code asks `hasattr(self, ...)`."""
    for name, node in ((module, node) for module in FILES for node in nodes[module]):
        if isinstance(node, ast.ClassDef):
            late_attributes = attributes_set(node) - attributes_at_start(node)
            assert not late_attributes, (
                f"{name}: {node.name} sets {late_attributes} outside of its constructor"
            )
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("hasattr", "getattr"):
            is_of_self = getattr(node.args[0], "id", "") == "self"
            is_named = isinstance(node.args[1], ast.Constant)
            assert not (is_of_self and is_named), f"{name}, line {node.lineno}"


@pytest.mark.parametrize(
    ("late", "method"),
    [
        ({"b"}, "def start(self):\n        self.a, self.b = 1, 2"),
        ({"b"}, "async def start(self):\n        self.b: int = 2"),
        ({"b"}, "b: int\n    def start(self):\n        self.b = 2"),
        (set(), "b = 1\n    def start(self):\n        self.b = 2"),
        (set(), "b: int = 1\n    def start(self):\n        self.b += 2"),
    ],
)
def test_late_attribute_is_recognised(late: set[str], method: str) -> None:
    """An annotation alone makes no attribute."""
    source = f"class Part:\n    def __init__(self):\n        self.a = 1\n    {method}\n"
    (owner,) = ast.parse(source).body
    assert isinstance(owner, ast.ClassDef)
    assert attributes_set(owner) - attributes_at_start(owner) == late


def attributes_at_start(owner: ast.ClassDef) -> set[str]:
    """Return the attributes that an object has as soon as it is made."""
    names = set(INHERITED.get(owner.name, ()))
    is_dataclass = any("dataclass" in ast.unparse(item) for item in owner.decorator_list)
    for statement in owner.body:
        if isinstance(statement, ast.Assign):
            names |= {ast.unparse(target) for target in statement.targets}
        elif isinstance(statement, ast.AnnAssign) and (is_dataclass or statement.value):
            names.add(ast.unparse(statement.target))
    for method in CONSTRUCTORS.get(owner.name, ("__init__", "__post_init__")):
        names |= attributes_set(owner, method)
    return names


def attributes_set(owner: ast.ClassDef, method: str | None = None) -> set[str]:
    """Return the attributes that a class sets on itself, in one method or in any."""
    names = set()
    for function in owner.body:
        is_function = isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        if not is_function or method not in (None, function.name):
            continue
        for node in ast.walk(function):
            is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if is_set and getattr(node.value, "id", "") == "self":
                names.add(node.attr)
    return names


COLLECTIVES = {
    "gather_object",
    "broadcast_object_list",
    "all_reduce",
    "all_gather",
    "broadcast",
    "all_gather_object",
    "wait_for_everyone",
    "barrier",
    "reduce",
    "_get_default_store",
}
# Besides `common.ranks.agreement`, these exchange gradients, buffers and rows of training, or
# profiles.
HAS_COLLECTIVES = {
    "common.ranks.agreement",
    "common.checkpoints.checksums",  # the bits of sharded weights
    "common.profile.profiler",
    "common.training.evaluation.mode",
    "common.training.gradients.averaging",
    "common.training.gradients.gathering",
    "common.training.sharding.networks",
}


def test_ranks_agree_in_one_module(nodes: Nodes) -> None:
    """Other code calls the functions of `common.ranks.agreement`."""
    users = set()
    for module in FILES:
        for node in nodes[module]:
            name = getattr(node, "attr", None) or getattr(node, "id", None)
            if name in COLLECTIVES:
                users.add(module)
    assert users == HAS_COLLECTIVES


def unused_parameters(test: ast.FunctionDef) -> set[str]:
    """Return the parameters of a test that its body does not mention."""
    nodes = [node for part in test.body for node in ast.walk(part)]
    mentioned = {node.id for node in nodes if isinstance(node, ast.Name)}
    return {argument.arg for argument in test.args.args} - mentioned


def test_tests_use_their_parameters() -> None:
    """A fixture that a test needs for its side effect is named by `pytest.mark.usefixtures`."""
    for path in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                assert not unused_parameters(node), (path, node.name)


# `common.storage.digests`, and the other modules that its docstring lists with their reasons.
HAS_DIGESTS = {
    "common.storage.digests",
    "common.storage.value_digests",
    "common.data.versions.fingerprint",
    "common.data.streaming.parquet_files",
    "common.tools.compare.page",
}


def test_digests_are_made_in_one_module(nodes: Nodes) -> None:
    """Other code calls the functions of `common.storage.digests` and `value_digests`."""
    users = set()
    for module in FILES:
        for node in nodes[module]:
            names: set[str | None] = set()
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {node.module}
            if names & {"hashlib", "zlib", "binascii"}:
                users.add(module)
    assert users == HAS_DIGESTS
    docstring = ast.get_docstring(ast.parse(FILES["common.storage.digests"].read_text()))
    assert docstring is not None
    for module in HAS_DIGESTS - {"common.storage.digests"}:
        assert f"`{module}`" in docstring


def test_other_code_imports_existing_modules() -> None:
    """Recipes, tests and benchmarks name only modules of `common` that exist."""
    for path in OTHERS:
        unknown = {name for name in imported(path, nodes_of(path)) if name not in FILES}
        assert not unknown, (path, unknown)
