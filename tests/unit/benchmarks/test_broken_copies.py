"""The benchmark of broken copies: which copies it proves, and its table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import broken_copies
from benchmarks.broken_copies import (
    RESULTS,
    BrokenProof,
    CorrectProof,
    chosen_copies,
    main,
    markdown,
    update_results,
)
from benchmarks.harness.correct_copies import CORRECT
from benchmarks.harness.mistaken_copies import BROKEN
from tests.launch import REPOSITORY


def proof(*, names_the_cause: bool) -> BrokenProof:
    return BrokenProof(
        mistake="EMA not kept",
        recipe="examples/averaged",
        check="resumes",
        failed=True,
        names_the_cause=names_the_cause,
        causes=["average | is in no checkpoint", "another cause"],
        seconds=9.5,
    )


def test_named_copies_are_chosen_in_order() -> None:
    broken_names = [BROKEN[2].name, BROKEN[0].name]
    broken, correct = chosen_copies([*broken_names, CORRECT[1].name])
    assert [copy.name for copy in broken] == broken_names
    assert correct == [CORRECT[1]]
    assert chosen_copies([]) == (list(BROKEN), list(CORRECT))


def test_an_unknown_copy_is_refused() -> None:
    with pytest.raises(SystemExit, match="no copy is named 'nothing': choose from EMA not"):
        chosen_copies(["nothing"])


def test_updated_results_replace_those_of_the_same_copies(tmp_path: Path) -> None:
    """They have a commit of their own, and the order stays that of the copies."""
    file = tmp_path / "results.json"
    earlier = [{"mistake": copy.name, "seconds": 1.0} for copy in BROKEN]
    results = {"machine": {"git_commit": "old"}, "proofs": earlier, "correct": []}
    file.write_text(json.dumps(results))
    update_results(file, [proof(names_the_cause=True)], [])
    updated = json.loads(file.read_text())
    assert updated["machine"] == results["machine"]
    assert [entry["mistake"] for entry in updated["proofs"]] == [copy.name for copy in BROKEN]
    changed = [entry for entry in updated["proofs"] if entry["seconds"] != 1.0]
    assert [(entry["mistake"], "commit" in entry) for entry in changed] == [("EMA not kept", True)]


@pytest.mark.parametrize(
    ("words", "file"),
    [
        ([], RESULTS.name),
        ([BROKEN[0].name], None),
        ([BROKEN[0].name, "--output", "mine.json"], "mine.json"),
    ],
)
def test_results_of_some_copies_do_not_replace_those_of_all(
    monkeypatch: pytest.MonkeyPatch, words: list[str], file: str | None
) -> None:
    outputs: list[Path | None] = []

    def prove_nothing(broken: object, correct: object, output: Path | None) -> tuple[list, list]:
        outputs.append(output)
        return [], []

    monkeypatch.setattr(sys, "argv", ["broken_copies.py", *words])
    monkeypatch.setattr(broken_copies, "prove_all", prove_nothing)
    broken_copies.main()
    assert [output and output.name for output in outputs] == [file]


def test_table_has_the_first_cause() -> None:
    """A bar in a cause would end the cell."""
    (*_, row) = markdown([proof(names_the_cause=True)], []).splitlines()
    first_cells = "| EMA not kept | `examples/averaged.py` | `resumes` |"
    assert row == rf"{first_cells} average \| is in no checkpoint |"


def test_table_says_that_a_mistake_was_not_found() -> None:
    (*_, row) = markdown([proof(names_the_cause=False)], []).splitlines()
    assert row.endswith("| **not named** |")


@pytest.mark.parametrize(
    ("failed", "cell"), [(["waits"], "`memory`"), (["memory", "waits"], "**none**")]
)
def test_table_of_correct_copies_has_the_checks_that_pass(failed: list[str], cell: str) -> None:
    correct = CorrectProof(
        edit="a bounded list",
        recipe="recipes/mnist_mlp",
        checks=["memory", "waits"],
        skipped=[],
        failed=failed,
        causes=[],
        seconds=1.0,
    )
    (*_, row) = markdown([], [correct]).splitlines()
    assert row == f"| a bounded list | `recipes/mnist_mlp.py` | {cell} |"


def test_table_of_correct_copies_has_the_checks_that_do_not_apply() -> None:
    correct = CorrectProof(
        edit="noise",
        recipe="recipes/mnist_mlp",
        checks=["processes"],
        skipped=["accumulation"],
        failed=[],
        causes=[],
        seconds=1.0,
    )
    (*_, row) = markdown([], [correct]).splitlines()
    assert row.endswith("| `processes` (`accumulation` does not apply) |")


def test_page_has_the_measured_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each mistake of the code was proven, and the page has what `--show` prints."""
    monkeypatch.setattr(sys, "argv", ["broken_copies.py", "--show"])
    main()
    page = (REPOSITORY / "benchmarks" / "broken-copies.md").read_text()
    assert capsys.readouterr().out.strip() in page
    results = json.loads(RESULTS.read_text())
    proofs = results["proofs"]
    correct_proofs = results["correct"]
    assert [proof["mistake"] for proof in proofs] == [broken.name for broken in BROKEN]
    assert f"proves {len(BROKEN)} recipes with one mistake" in (
        (REPOSITORY / "benchmarks" / "proofs.md").read_text()
    )
    named = [proof for proof in proofs if proof["names_the_cause"]]
    assert len(named) == len(proofs), "benchmarks/proofs.md says that all were found"
    assert [proof["edit"] for proof in correct_proofs] == [correct.name for correct in CORRECT]
    assert not any(proof["failed"] for proof in correct_proofs)
