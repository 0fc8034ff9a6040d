"""`recipes prove` does not fail a recipe that is unusual but correct."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness.correct_copies import CORRECT, Correct
from common.tools.prove.command import main
from common.tools.prove.receipt import read_receipt
from tests.conftest import first


def test_each_copy_has_its_edits(tmp_path: Path) -> None:
    """The texts that the edits replace are in the recipes, and each copy is valid Python."""
    assert len({correct.name for correct in CORRECT}) == len(CORRECT) >= 4
    for correct in CORRECT:
        path = correct.write(tmp_path)
        compile(path.read_text(), correct.name, "exec")


@pytest.mark.parametrize(
    "correct", first(0, CORRECT, in_ci=1), ids=[correct.name for correct in CORRECT]
)
@pytest.mark.usefixtures("forking_python")
def test_correct_copy_passes(correct: Correct, tmp_path: Path) -> None:
    """The checks that the edits concern pass."""
    recipe = correct.write(tmp_path)
    output = tmp_path / "proof.json"
    checks = ",".join([*correct.checks, *correct.skipped])
    words = [str(recipe), *correct.flags, "--checks", checks]
    words += ["--output", str(output), "--folder", str(tmp_path / "runs")]
    main([*words, "--updates", str(correct.updates)])
    results = {result.name: result for result in read_receipt(output).checks}
    for name in correct.checks:
        assert results[name].passed is True, results[name]
    for name in correct.skipped:
        assert results[name].passed is None, results[name]
