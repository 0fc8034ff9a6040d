"""A published run: its files, no path of this machine, and what can't be published."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from common.errors import UserError
from common.run_directory.provenance import current_attempt
from common.run_directory.records import PROVENANCE
from common.tools.reproduce.code import code_of_run
from common.tools.reproduce.compared_run import ComparedRun, read_compared_run, read_old_run
from common.tools.reproduce.comparison import compare_weights
from common.tools.reproduce.fact_differences import differences_of
from common.tools.reproduce.publishing import name_of_path, publish_run, without_paths
from common.tools.reproduce.receipt import (
    FORMAT,
    Reproduction,
    default_output,
    read_receipt,
    write_receipt,
)
from tests.git_repository import commit_all
from tests.unit.saved_config import saved_config
from tests.unit.tools.reproduce.made_up_runs import write_run

pytestmark = pytest.mark.usefixtures("hidden_test_files")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/data/mnist", "the data"),
        ("train.py --dataset /data/mnist --model '/a b/minilm'", "train.py --dataset the data "),
        (r"C:\users\ada\model", "model"),
        ("--init-from=/runs/first/model", "--init-from=model"),
        ("org/name", "org/name"),
        ("https://example.com/a/b", "https://example.com/a/b"),
        ("samples/s and 1 / 2", "samples/s and 1 / 2"),
    ],
)
def test_paths_are_replaced_by_names(text: str, expected: str) -> None:
    """Only absolute ones; names of repositories and addresses stay."""
    assert str(without_paths(text, {"/data/mnist": "the data"})).startswith(expected)
    assert without_paths({"n": [text, 1, None]}, {})["n"][1:] == [1, None]  # type: ignore[index, call-overload]
    assert name_of_path("/data/mnist/", {}) == "mnist"


def test_published_run_has_no_paths_and_is_signed(tmp_path: Path) -> None:
    """A published run has the records that a reproduction compares, but no weights."""
    run = write_run(
        tmp_path / "first",
        config={"dataset": "/data/My Digits", "model": "/data/minilm", "output_dir": "/runs/first"},
        command="tiny.py --dataset '/data/My Digits' --output-dir /runs/first",
    )
    publish_run(run.directory, tmp_path / "published")
    written = [path for path in (tmp_path / "published").rglob("*") if path.is_file()]
    names = {path.relative_to(tmp_path / "published").as_posix() for path in written}
    assert names == {
        "config.json",
        "status.json",
        "summary.json",
        "metrics.jsonl",
        "provenance/attempts.json",
        "provenance/weights.jsonl",
        "model/model.json",
    }
    texts = "".join(path.read_text() for path in written)
    assert not [place for place in ("/data", "/runs", "/nowhere", str(tmp_path)) if place in texts]
    published = read_old_run(tmp_path / "published")
    assert not published.is_edited
    assert published.is_published
    assert published.saved_config.flags["dataset"] == "digits"
    assert published.saved_config.flags["model"] == "minilm"
    assert published.gaps() == run.gaps()
    flags = {"dataset": "/home/ada/digits", "model": "/home/ada/minilm"}
    again = write_run(tmp_path / "again", config=flags)
    differing = {difference.fact for difference in differences_of(published, again)}
    assert not differing & {"--dataset", "--model", "weights of --init-from"}
    weights = compare_weights(published, run)
    assert (weights.checkpoints, weights.exported_is_equal) == (1, True)
    other = compare_weights(published, write_run(tmp_path / "other", weight=2.0))
    assert "no weights that would show where" in str(other.exported_difference)


def receipt_of(run: ComparedRun, command: str = "") -> Reproduction:
    """Return the receipt of a reproduction of a run that has ended with equal bits."""
    return Reproduction(
        format=FORMAT,
        original=str(run.directory),
        original_run_id=run.saved_config.run_id,
        flags=[],
        result="equal bits",
        command=command,
        tolerance=None,
        began="2026-01-01T00:00:00+00:00",
    )


def test_receipt_is_published_without_paths(tmp_path: Path) -> None:
    """Only a finished receipt of this run counts. Publishing again removes any other."""
    run = write_run(tmp_path / "first")
    folder = tmp_path / "published"
    receipt = receipt_of(run, f"python {tmp_path}/train.py --config {run.directory}/config.json")
    reproduced = default_output(run.directory)
    reproduced.mkdir()
    write_receipt(reproduced, receipt)
    publish_run(run.directory, folder)
    published = read_receipt(folder)
    assert published is not None
    assert (published.original, published.result) == ("first", "equal bits")
    assert published.command == "python train.py --config config.json"
    for changes in ({"result": "running"}, {"original_run_id": "0123456789abcdef"}):
        write_receipt(reproduced, receipt)
        publish_run(run.directory, folder)
        assert read_receipt(folder) is not None
        write_receipt(reproduced, receipt.model_copy(update=changes))
        publish_run(run.directory, folder)
        assert read_receipt(folder) is None


def test_receipt_in_another_format_is_refused(tmp_path: Path) -> None:
    """A later version may mean something else by the same fields."""
    run = write_run(tmp_path / "first")
    write_receipt(tmp_path, receipt_of(run).model_copy(update={"format": FORMAT + 1}))
    with pytest.raises(UserError, match=rf"has format {FORMAT + 1}.*pass another --output-dir"):
        read_receipt(tmp_path)


def test_files_of_an_earlier_published_run_do_not_stay(tmp_path: Path) -> None:
    """An unfinished run has no model, so its folder must not have that of another run."""
    folder = tmp_path / "published"
    publish_run(write_run(tmp_path / "finished").directory, folder)
    unfinished = write_run(tmp_path / "unfinished").directory
    (unfinished / "summary.json").unlink()
    shutil.rmtree(unfinished / "model")
    publish_run(unfinished, folder)
    assert not (folder / "summary.json").exists()
    assert read_old_run(folder).exported_digest is None


def test_place_of_the_same_data_does_not_count(tmp_path: Path) -> None:
    """Their fingerprint says that they are the same."""
    data = {"name": "digits", "fingerprint": "one"}
    first = write_run(tmp_path / "first", config={"dataset": "digits"}, data=data)
    moved = {"config": {"dataset": "/data/numbers"}, "data": {**data, "name": "numbers"}}
    second = write_run(tmp_path / "second", **moved)
    assert differences_of(first, second) == []
    changed = {**moved, "data": {"name": "numbers", "fingerprint": "two"}}
    third = write_run(tmp_path / "third", **changed)
    facts = {difference.fact for difference in differences_of(first, third)}
    assert facts == {"--dataset", "data set", "data's fingerprint"}


def test_code_of_a_published_run_is_found_around_it(tmp_path: Path) -> None:
    """In the repository that it lies in, with its patch."""
    recipe = tmp_path / "code" / "tiny.py"
    recipe.parent.mkdir()
    recipe.write_text("x = 1\n")
    commit_all(recipe.parent)
    recipe.write_text("x = 2\n")
    attempt, trees = current_attempt(recipe, 0, saved_config().environment, {})
    run = write_run(tmp_path / "run", attempt=attempt.to_json())
    with pytest.raises(UserError, match="is missing: restore it from a backup"):
        publish_run(run.directory, recipe.parent / "results")
    for collected in trees:
        if collected.tree.patch is not None:
            (run.directory / PROVENANCE / collected.tree.patch).write_bytes(collected.patch)
    publish_run(run.directory, recipe.parent / "results")
    recipe.write_text("x = 1\n")
    clone = recipe.parent.rename(tmp_path / "clone")
    published = read_compared_run(clone / "results")
    with code_of_run(published, False) as code:
        assert code.recipe.read_text() == "x = 2\n"
    with code_of_run(published, True) as code:
        assert code.recipe == clone / "tiny.py"
    elsewhere = Path(shutil.copytree(clone / "results", tmp_path / "elsewhere"))
    with (
        pytest.raises(UserError, match="is not in"),
        code_of_run(read_compared_run(elsewhere), False),
    ):
        pass


def test_what_cannot_be_published_is_said(tmp_path: Path) -> None:
    """A signature must not hide an edit, and a run must not be overwritten."""
    run = write_run(tmp_path / "first")
    with pytest.raises(UserError, match="would overwrite a run in that folder"):
        publish_run(run.directory, run.directory)
    (tmp_path / "second" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="would overwrite a run in that folder"):
        publish_run(run.directory, tmp_path / "second")
    path = run.directory / "config.json"
    path.write_text(path.read_text().replace('"learning_rate": 0.1', '"learning_rate": 0.2'))
    with pytest.raises(UserError, match="was edited after the run wrote it"):
        publish_run(run.directory, tmp_path / "published")
    assert not (tmp_path / "published").exists()
