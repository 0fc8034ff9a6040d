"""Unusable paths for every flag that takes one: a run ends with one sentence and makes no file."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import UserError
from common.tools.predict.predictor import finished_model_folder
from common.tools.recipe import load_recipe
from tests.small_run import FLAGS, prepared, run

PATH_FLAGS = ("--output-dir", "--resume", "--init-from", "--config")
NOBODY = 65534
PLACES = {
    "a long name": "x" * 300,
    "a long path": "/".join(["x" * 200] * 30),
    "a long component": f"there/{'x' * 300}/run",
    "a file": "file",
    "in a file": "file/run",
    "a dangling link": "dangling",
    "in a dangling link": "dangling/run",
    "a loop of links": "loop",
    "in a loop of links": "loop/run",
    "a device": "/dev/null",
    "in a device": "/dev/full/run",
    "of the system": "/proc/self/run",
    "forbidden": "closed/run",
    "not UTF-8": "\udcff",
    "empty": "",
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in a folder that has each of the unusable paths."""
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "there").mkdir()
    (tmp_path / "closed").mkdir(mode=0o000)
    (tmp_path / "runs").mkdir(mode=0o777)
    monkeypatch.chdir(tmp_path)
    with prepared():
        yield


@contextlib.contextmanager
def somebody_else() -> Iterator[None]:
    """Act as a user other than root, whom file permissions can stop."""
    if os.geteuid() != 0:
        yield
        return
    run(*FLAGS, "--output-dir", "there/warm")  # imports files that the other user may not read
    for path in (Path(), Path("runs")):
        path.chmod(0o777)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("flag", PATH_FLAGS)
def test_unusable_path_is_refused(flag: str, place: str) -> None:
    """Each unusable path is refused, also with `--evaluate-only` and `--resume auto`."""
    if (flag, place) == ("--output-dir", "empty"):
        pytest.skip("the folder that one is in, which is one")
    others: list[tuple[str, ...]] = [(), ("--evaluate-only",), ("--resume", "auto")]
    for other in others[:2] if flag == "--resume" else others:
        with somebody_else() if place == "forbidden" else contextlib.nullcontext():
            before = sorted(Path().rglob("*"))
            error, _ = run(*FLAGS, flag, PLACES[place], *other)
            after = sorted(Path().rglob("*"))
        assert isinstance(error, UserError), repr(error)
        assert "\n" not in error.message
        assert after == before


@pytest.mark.parametrize(
    "text",
    [
        "x = (",
        "import nothing_of_this_name",
        "1 / 0",
        "\0",
        "\udcff",
        "",
        "Config = 3",
        "from common.config import TrainingConfig as Config",
        *(
            f"from common.config import TrainingConfig as Config\nOBJECTIVE = {objective}"
            for objective in ("3", "None", "'accuracy'", "'accuracy:up'", "[]", "'\\n:max:'")
        ),
    ],
)
def test_file_that_is_not_a_recipe_is_refused(tmp_path: Path, text: str) -> None:
    """A file that is not a recipe is refused by the tools that import recipes."""
    path = tmp_path / "recipe.py"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError) as refused:
        load_recipe(path)
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("text", ["a\0b", "\ud800", "x" * 300])
@pytest.mark.parametrize("name", ["init_from", "dataset", "project", "tags"])
def test_characters_that_nobody_can_type_are_refused(tmp_path: Path, name: str, text: str) -> None:
    """A `config.json` with NUL or half a surrogate pair is refused; nobody can type these."""
    config = {"recipe": "regression", "config": {name: [text] if name == "tags" else text}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    error, _ = run("--config", tmp_path / "config.json", *FLAGS, "--output-dir", "there/run")
    if len(text) < 300:
        assert isinstance(error, UserError)
        assert error.message.startswith(f"{tmp_path}/config.json contains ")
        assert f"--{name.replace('_', '-')}" in error.message
    else:
        assert error is None or isinstance(error, UserError)


@pytest.mark.parametrize("place", PLACES)
def test_unusable_path_of_a_run_is_refused(place: str) -> None:
    """A prediction refuses an unusable path instead of a run."""
    with pytest.raises(UserError) as refused:
        finished_model_folder(Path(PLACES[place]))
    assert "\n" not in refused.value.message
