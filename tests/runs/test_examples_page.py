"""The page about the examples is correct, and each command in it or in an example runs."""

from __future__ import annotations

import difflib
import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import first
from tests.examples import EXAMPLES, Example
from tests.launch import REPOSITORY, Runner

PAGE = REPOSITORY / "examples" / "README.md"
ROW = re.compile(
    r"^\| \[`(?P<name>\w+)\.py`\]\((?P=name)\.py\) \|.*\| (?P<result>[^|]+) "
    r"\| `(?P<origin>\w+)\.py` \+(?P<added>\d+) −(?P<removed>\d+) \|$",
    re.MULTILINE,
)
ROWS = {row["name"]: row for row in ROW.finditer(PAGE.read_text())}
OF_THE_PAGE = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


def docstring(example: Example) -> str:
    """Return the docstring of an example, as it stands in the file."""
    return example.path.read_text().split('"""')[1]


def documented_commands(example: Example) -> list[str]:
    """Return the indented lines of an example's docstring."""
    return re.findall(r"^    (\S.*)$", docstring(example), re.MULTILINE)


def test_the_page_lists_each_example() -> None:
    """The page has one row for each example and no others."""
    assert ROWS.keys() == {example.name for example in EXAMPLES}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_row_is_true(example: Example) -> None:
    """A row has the right number of changed lines and the result that the example states."""
    row = ROWS[example.name]
    assert row["origin"] == example.origin
    origin = (REPOSITORY / "recipes" / f"{example.origin}.py").read_text().splitlines()
    lines = [*difflib.ndiff(origin, example.path.read_text().splitlines())]
    assert int(row["added"]) == sum(line.startswith("+ ") for line in lines)
    assert int(row["removed"]) == sum(line.startswith("- ") for line in lines)
    assert f"Result: {row['result']}." in docstring(example)
    assert f"A copy of recipes/{example.origin}.py" in docstring(example)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example_documents_one_command(example: Example) -> None:
    """An example's docstring documents its own launch, which the test below runs."""
    assert documented_commands(example) == [f"python examples/{example.name}.py"]


def test_links_lead_somewhere() -> None:
    """Each file that the page links to exists."""
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", PAGE.read_text()):
        assert (PAGE.parent / link).exists(), link


@pytest.mark.parametrize(
    "command",
    first(
        0,
        [*OF_THE_PAGE, *(line for example in EXAMPLES for line in documented_commands(example))],
        in_ci=9,
    ),
)
def test_command_runs(command: str, runner: Runner) -> None:
    """A documented command trains with its default data and model, here for two updates."""
    words = shlex.split(command)
    script, *flags = words[words.index(next(word for word in words if word.endswith(".py"))) :]
    assert Path(script).parts[0] == "examples"
    if "--help" in flags:
        shown = runner.run(REPOSITORY / script, *flags, output_directory=False)
        assert "--learning-rate" in shown.output
        return
    launcher = {"python": "fork", "accelerate": "two forks"}[words[0]]
    if launcher == "two forks":
        assert words[2:4] == ["--config_file", "accelerate_configs/multi_cpu.yaml"]
    run = runner.run(
        *(REPOSITORY / script, *flags, "--max-steps", 2, "--tracker", "none"),
        launcher=launcher,  # type: ignore[arg-type]
    )
    assert run.summary["progress/global_step"] == 2
