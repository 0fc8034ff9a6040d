"""Searches with damaged files: each damage gives one sentence, and nothing else goes wrong."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest

from common.errors import UserError
from common.objective import Objective
from common.tools.recipe import load_recipe
from common.tools.tune.command import main, read_command_line
from common.tools.tune.search import Search
from common.tools.tune.settings import SearchSettings
from common.tools.tune.space import parse_space
from common.tools.tune.study import open_study, using_study
from tests.damage import broken, wrong
from tests.unit.tools.compare.run_folders import write_run
from tests.unit.tools.tune.test_search import STUB

FLAGS = ["--learning-rate", "0.05,0.1", "--epochs", "1"]
GOAL = Objective.parse("accuracy:max")


def ends_well(action: Callable[[], object], description: str) -> bool:
    """Return whether an action succeeds, and check that a failure is told in one sentence."""
    try:
        action()
    except UserError as problem:
        if "\n" in problem.message:
            raise AssertionError(description) from problem
        return False
    except SystemExit as problem:
        if problem.code != 2:
            raise AssertionError(description) from problem
        return False
    except Exception as problem:
        raise AssertionError(description) from problem
    return True


@pytest.fixture
def searched(tmp_path: Path) -> Callable[[], Search]:
    """Return a function that makes a search whose first trial was left running and has finished."""
    recipe = load_recipe(STUB)
    settings = SearchSettings(str(STUB), FLAGS, trials=1, config_file=None)
    space, shared = parse_space(settings.flags, recipe)
    write_run(tmp_path / "trial-000")

    def new_search() -> Search:
        study = optuna.create_study(direction="maximize")
        study.ask(dict(space))
        return Search(tmp_path, settings, space, shared, recipe.objective, study)

    return new_search


@pytest.mark.parametrize("name", ["config.json", "status.json", "summary.json", "metrics.jsonl"])
def test_damaged_trial_is_named_or_tolerated(
    name: str,
    searched: Callable[[], Search],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    thorough: bool,
) -> None:
    """A trial fails if its files do not tell its result and its process is gone."""
    (tmp_path / "trial-000.log").write_text("error: nothing\n")
    ended = SimpleNamespace(poll=lambda: 1, returncode=1)
    monkeypatch.setattr("common.tools.launching.launched_run.psutil.Popen", lambda *_, **__: ended)
    path = tmp_path / "trial-000" / name
    whole = path.read_bytes()
    first, *others = whole.splitlines(keepends=True) if name.endswith("l") else [whole]
    damaged = [
        (description, json.dumps(value).encode()) for description, value in wrong(json.loads(first))
    ]
    damaged += [(f"broken {number}", part) for number, part in enumerate(broken(first, 100))]
    ends = []
    for description, content in damaged[:: 1 if thorough else 3]:
        path.write_bytes(b"".join([content, b"\n", *others]))
        ends.append(ends_well(searched().run, f"{name}: {description}"))
    assert True in ends
    assert False in ends


def test_damaged_settings_are_named_or_tolerated(tmp_path: Path) -> None:
    """Damaged contents of `search.json` give one sentence, or do not matter."""
    path = tmp_path / "search.json"
    value = dataclasses.asdict(SearchSettings(str(STUB), FLAGS, config_file=None))
    whole = json.dumps(value).encode()

    def read() -> None:
        _, settings = read_command_line(["--study", str(tmp_path)])
        parse_space(settings.flags, load_recipe(Path(settings.recipe)))

    damaged = [(description, json.dumps(other).encode()) for description, other in wrong(value)]
    damaged += [(f"broken {number}", part) for number, part in enumerate(broken(whole, 50))]
    ends = []
    for description, content in damaged:
        path.write_bytes(content)
        ends.append(ends_well(read, description))
    assert True in ends
    assert False in ends


def test_damaged_study_is_named_or_tolerated(tmp_path: Path, thorough: bool) -> None:
    """Damaged contents of `study.db` give one sentence, or do not matter."""
    space, _ = parse_space(FLAGS, load_recipe(STUB))
    path = tmp_path / "study.db"
    study = open_study(tmp_path, GOAL, True, space)
    for value in (0.1, 0.2, 0.3):
        study.tell(study.ask(dict(space)), value)
    whole = path.read_bytes()

    def go_on() -> None:
        with using_study(path):
            study = open_study(tmp_path, GOAL, True, space)
            study.tell(study.ask(dict(space)), 0.4)

    texts = [b"text", b"", b"SQLite format 3\x00", whole[:100] + bytes(len(whole) - 100)]
    ends = []
    for number, content in enumerate([whole, *texts, *broken(whole, 100 if thorough else 30)]):
        path.write_bytes(content)
        ends.append(ends_well(go_on, f"{number}"))
    assert ends[0]
    assert False in ends


def test_study_of_another_search_is_refused(tmp_path: Path) -> None:
    """The other search tried other values."""
    space, _ = parse_space(FLAGS, load_recipe(STUB))
    other, _ = parse_space(["--learning-rate", "0.05:0.1"], load_recipe(STUB))
    open_study(tmp_path, GOAL, True, space).ask(dict(space))
    with pytest.raises(
        UserError,
        match=r"study\.db has trials of other flags than .*: if search\.json is right, move study",
    ):
        open_study(tmp_path, GOAL, True, other)


@pytest.mark.slow
def test_command_names_damaged_files_and_leaves_them(tmp_path: Path) -> None:
    """The command changes neither the damaged file nor the others."""
    study = tmp_path / "study"
    main([str(STUB), *FLAGS, "--trials", "1", "--study", str(study)])
    kept = {path: path.read_bytes() for path in study.glob("*.*") if path.is_file()}
    for name in ("search.json", "study.db"):
        shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
        shutil.copytree(study, tmp_path / "damaged")
        (tmp_path / "damaged" / name).write_bytes(b"damaged")
        with pytest.raises(UserError, match=name):
            main(["--study", str(tmp_path / "damaged"), "--trials", "2"])
        assert (tmp_path / "damaged" / name).read_bytes() == b"damaged"
    assert {path: path.read_bytes() for path in kept} == kept


LONG = "x" * 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([str(STUB), *FLAGS, "--study", LONG], LONG),
        ([str(STUB), *FLAGS, "--study", "file"], "--study"),
        ([str(STUB), *FLAGS, "--study", "file/in"], "--study"),
        ([str(STUB), *FLAGS, "--config-file", LONG], "--config-file"),
        ([str(STUB), *FLAGS, "--config-file", "."], "--config-file"),
        (["--study", LONG], LONG),
        ([LONG, *FLAGS], "there is no file"),
        ([".", *FLAGS], ". is a folder: pass the path of a recipe"),
        (["file/in.py", *FLAGS], "there is no file file/in.py"),
    ],
)
def test_impossible_paths_are_refused(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the flag of a path that is too long, or a file where a folder belongs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as refused:
        main(arguments)
    assert message in refused.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
