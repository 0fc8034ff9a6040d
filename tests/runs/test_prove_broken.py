"""`recipes prove` finds the mistake in a broken copy of a recipe, and names the cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness.mistaken_copies import BROKEN, Broken
from common.tools.prove.command import main
from common.tools.prove.receipt import read_receipt
from tests.conftest import first


def test_each_copy_has_its_mistake(tmp_path: Path) -> None:
    """The texts that the mistakes replace are in the recipes, and each copy is valid Python."""
    names = {broken.name for broken in BROKEN}
    assert len(names) == len(BROKEN) >= 20
    for broken in BROKEN:
        path = broken.write(tmp_path)
        compile(path.read_text(), broken.name, "exec")


@pytest.mark.parametrize(
    "broken", first(0, BROKEN, in_ci=5), ids=[broken.name for broken in BROKEN]
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
