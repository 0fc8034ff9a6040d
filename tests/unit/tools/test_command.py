"""The command `recipes`: subcommands, help, and unknown commands."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib

import pytest

from common.errors import UserError
from common.tools.__main__ import TOOLS, main
from tests.launch import REPOSITORY

# Libraries that take a second or more to load, which help must not wait for.
LARGE_LIBRARIES = {
    "torch",
    "transformers",
    "datasets",
    "accelerate",
    "optuna",
    "sqlalchemy",
    "matplotlib",
    "numpy",
    "wandb",
    "wandb_workspaces",
}


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_overview_names_every_tool(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has a line with its summary."""
    main(arguments)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "usage: recipes COMMAND [options]"
    for name, tool in TOOLS.items():
        assert any(line.split() == [name, *tool.summary.split()] for line in lines), name


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize(
    ("words", "place"), [(["", "a"], ""), (["a", "--output", " "], " after --output")]
)
def test_empty_word_is_refused(name: str, words: list[str], place: str) -> None:
    """It is probably a variable of the shell that is not set, and would be the current folder."""
    with pytest.raises(UserError) as refused:
        main([name, *words])
    expected = f"an argument of recipes {name} is empty{place}: pass a value, or leave it out"
    assert expected in refused.value.message


@pytest.mark.parametrize("name", TOOLS)
def test_help_of_each_tool_is_complete(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The usage line starts with the command as users type it, and each option has a help text."""
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    usage, *lines = capsys.readouterr().out.splitlines()
    assert usage.startswith(f"usage: recipes {name} ")
    assert usage.endswith("[options]")
    assert not any("python -m" in line for line in lines)
    options = [index for index, line in enumerate(lines) if line.startswith("  --")]
    assert options
    for index in options:
        has_help = len(lines[index].split("  ")) > 2
        assert has_help or lines[index + 1].startswith(" " * 10), lines[index]


def test_help_loads_no_large_library() -> None:
    """No tool may load a library only to describe itself. One process runs them all."""
    code = (
        "import contextlib, sys\n"
        "from common.tools.__main__ import TOOLS, main\n"
        "for words in [[], *([name, '--help'] for name in TOOLS)]:\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main(words)\n"
        f"print({LARGE_LIBRARIES!r} & set(sys.modules))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.count("usage: recipes ") == 1 + len(TOOLS)
    assert answer.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("comparre", r"did you mean recipes compare\?$"),
        ("train", "use compare, vary, tune, predict, prove, reproduce or workspace$"),
        ("--version", "use compare, vary, tune, predict, prove, reproduce or workspace$"),
    ],
)
def test_unknown_command_gives_one_sentence(word: str, advice: str) -> None:
    """The sentence suggests the most similar command, or lists all commands."""
    with pytest.raises(UserError, match=f"there is no command recipes {word}: {advice}"):
        main([word])


def test_module_is_the_same_command() -> None:
    """`python -m common.tools` works without the installed script."""
    command = [sys.executable, "-m", "common.tools", "comparre"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert answer.stderr == (
        "error: there is no command recipes comparre: did you mean recipes compare?\n"
    )


def test_installed_script_is_this_command() -> None:
    """`pip install` makes the script `recipes` from this entry point."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["recipes"].partition(":")
    assert getattr(importlib.import_module(module), function) is main
