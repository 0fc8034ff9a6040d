"""`recipes prove` finds the mistake in a broken copy of a recipe, and names the cause.

Five copies run by default among the slow tests. All run with RECIPE_TESTS_BROKEN=all.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.harness.mistaken_copies import BROKEN, BY_DEFAULT, Broken
from common.tools.prove.command import main
from common.tools.prove.receipt import read_receipt

VARIABLE = "RECIPE_TESTS_BROKEN"
OTHERS = pytest.mark.skipif(os.environ.get(VARIABLE) != "all", reason=f"{VARIABLE} is not all")


def test_each_copy_has_its_mistake(tmp_path: Path) -> None:
    """The texts that the mistakes replace are in the recipes, and each copy is valid Python."""
    names = {broken.name for broken in BROKEN}
    assert len(names) == len(BROKEN) >= 20
    for broken in BROKEN:
        path = broken.write(tmp_path)
        compile(path.read_text(), broken.name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(broken, marks=[] if number < BY_DEFAULT else OTHERS, id=broken.name)
        for number, broken in enumerate(BROKEN)
    ],
)
@pytest.mark.usefixtures("forking_python")
def test_broken_copy_fails_for_its_cause(broken: Broken, tmp_path: Path) -> None:
    """The check for the mistake fails and names it. A check of something else passes."""
    recipe = broken.write(tmp_path)
    output = tmp_path / "proof.json"
    names = [name for name in (broken.check, broken.passes) if name is not None]
    words = [str(recipe), *broken.flags, "--checks", ",".join(names), "--output", str(output)]
    words += ["--folder", str(tmp_path / "runs"), "--updates", str(broken.updates)]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 1
    results = {result.name: result for result in read_receipt(output).checks}
    failed = results[broken.check]
    assert failed.passed is False, failed
    causes = "\n".join(failed.causes)
    for words_of_cause in broken.words:
        assert words_of_cause in causes, failed
    if broken.passes is not None:
        assert results[broken.passes].passed is True, results[broken.passes]
