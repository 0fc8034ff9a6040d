"""Which variables of a loop hold state from before the current pass."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from common.tools.prove.reach.loop_variables import loop_variables, pass_of_loop
from common.tools.prove.records.run_records import LoopPass

# A loop's body, and the variables that it carries from one pass to the next.
BODIES = {
    "mean": ("mean = 0.9 * mean + batch", {"mean"}),
    "sum": ("total += batch", {"total"}),
    "fallback": (
        """
        try:
            mean = 0.9 * mean + batch
        except NameError as error:
            mean = batch
        """,
        {"mean"},
    ),
    "condition": ("mean = 0.9 * mean if 'mean' in locals() else batch", {"mean"}),
    "branches": (
        """
        if 'mean' not in locals():
            mean = batch
        else:
            mean = 0.9 * mean
        """,
        {"mean"},
    ),
    "walrus": ("print(last); (last := batch)", {"last"}),
    "computed again": ("loss = batch + scale\nprint(loss)", set()),
    "set under a condition": (
        """
        if batch:
            norm = batch
        print(norm)
        """,
        set(),
    ),
    "comprehension": ("values = [value for value in batch]\nvalue = values[0]", set()),
    "inner loop": ("for part in batch:\n    print(part)", set()),
    "function": (
        "def closure():\n    return later\nstep = lambda: later\nlater = batch",
        set(),
    ),
    "annotation": ("value: int\nvalue = batch\nother: int = value", set()),
    "import": ("import math\nmath.pi\nmath = math", set()),
    "unpacked": ("loss, logits = batch\nwith open(loss) as file:\n    print(file, logits)", set()),
}


def written(folder: Path, header: str, body: str) -> str:
    """Write a function with a loop, whose header is in line 2, and return the file."""
    path = folder / "loop.py"
    lines = textwrap.indent(textwrap.dedent(body).strip("\n"), "        ")
    path.write_text(f"def main(batches):\n    {header}:\n{lines}\n")
    return str(path)


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("header", ["for batch in batches", "while batch := next(batches)"])
def test_variables_that_a_pass_reads_first_are_carried(
    tmp_path: Path, name: str, header: str
) -> None:
    body, carried = BODIES[name]
    assert loop_variables(written(tmp_path, header, body), 2).carried == carried


@pytest.mark.parametrize(
    ("header", "body", "line", "targets"),
    [
        ("for step, batch in enumerate(batches)", "print(step)", 2, {"step", "batch"}),
        ("for step, batch in enumerate(batches)", "batch = [batch]", 2, {"step"}),
        ("for step, (x, *y) in enumerate(batches)", "step += 1", 2, {"x", "y"}),
        ("for step, batch in enumerate(batches)", "print(step)", 3, set()),
        ("while batch := next(batches)", "print(batch)", 2, set()),
    ],
)
def test_targets_are_set_by_the_for_statement_alone(
    tmp_path: Path, header: str, body: str, line: int, targets: set[str]
) -> None:
    assert loop_variables(written(tmp_path, header, body), line).targets == targets


def test_code_without_a_loop_or_a_file_has_no_variables(tmp_path: Path) -> None:
    file = written(tmp_path, "for batch in batches", "count += 1")
    assert loop_variables(file, 1).carried == set()
    assert loop_variables(str(tmp_path / "missing.py"), 2).carried == set()
    (tmp_path / "broken.py").write_text("for batch in\n")
    assert loop_variables(str(tmp_path / "broken.py"), 1).carried == set()


def passes(folder: Path, header: str, body: str) -> list[LoopPass | None]:
    """Run a loop over two batches in a user's module, and return the record of each pass."""
    file = written(folder, header, body)
    module = ModuleType("loop")
    module.__file__ = file
    exec(compile(Path(file).read_text(), file, "exec"), vars(module))
    ended: list[LoopPass | None] = []

    def batches() -> Any:
        for step, batch in enumerate(["first", "second"]):
            yield batch
            ended.append(pass_of_loop(sys._getframe(1), batch, step, 0))

    sys.modules["loop"] = module
    try:
        module.main(batches())
    finally:
        del sys.modules["loop"]
    return ended


def test_a_pass_has_the_targets_without_the_batch(tmp_path: Path) -> None:
    first, second = passes(tmp_path, "for step, batch in enumerate(batches)", "print(step)")
    assert first is not None
    assert second is not None
    assert first.target_digests.keys() == second.target_digests.keys() == {"step"}
    assert first.target_digests != second.target_digests
    assert first.descriptions["step"].text == "int, loop variable of main()"
    assert first.descriptions["step"].type == "target"
    assert first.carried_variables == []


def test_a_pass_of_a_usual_loop_has_no_record(tmp_path: Path) -> None:
    assert passes(tmp_path, "for batch in batches", "loss = len(batch)") == [None, None]


def test_a_pass_has_the_carried_variables(tmp_path: Path) -> None:
    first, _ = passes(tmp_path, "for batch in batches", BODIES["fallback"][0].replace("0.9 *", ""))
    assert first is not None
    assert first.carried_variables == ["mean"]
    assert first.target_digests == {}
