"""Runs whose files are damaged: a sentence that names the file, or a comparison; nothing else."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import UserError
from common.tools.compare.command import main
from tests.unit.damage import broken, wrong
from tests.unit.tools.compare.run_folders import rows, write_run

NAMES = ("config.json", "status.json", "summary.json", "metrics.jsonl")


def changed(name: str, whole: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield what may be in the place of a run's file, and how it came about."""
    if name == "metrics.jsonl":
        first, *others = whole.splitlines(keepends=True)
        for what, row in wrong(json.loads(first)):
            yield what, b"".join([json.dumps(row).encode() + b"\n", *others])
        yield "no row is an object", b"[1]\n" + whole
    else:
        for what, value in wrong(json.loads(whole)):
            yield what, json.dumps(value).encode()
    for number, content in enumerate(broken(whole, 200)):
        yield f"broken {number}", content
    for content in (b"", b"\xff\xfe", b"[" * 10**5, b"null", b'"text"', b"\n" * 3):
        yield repr(content[:9]), content


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    """Two runs, of which the first is to be damaged."""
    logged = rows([0.5, 0.7])
    return [write_run(tmp_path / name, logged=logged) for name in ("damaged", "whole")]


@pytest.mark.parametrize("name", NAMES)
def test_damaged_file_is_named_or_borne(
    name: str, sources: list[str], tmp_path: Path, thorough: bool
) -> None:
    """Whatever stands in a run's files, as the baseline and beside one; some with pictures."""
    path = Path(sources[0]) / name
    refused = taken = 0
    cases = [*changed(name, path.read_bytes())][:: 1 if thorough else 5]
    for number, (what, content) in enumerate(cases):
        path.write_bytes(content)
        form = [*reversed(sources)] if number % 2 else [*sources, "--markdown"]
        forms = [[*sources, "--json"], form]
        if number % 150 == 0:
            forms.append([*sources, "--plot", str(tmp_path / "runs.png")])
        problem = compare(forms, f"{name}: {what}")
        taken, refused = taken + (problem is None), refused + (problem is not None)
        if problem is not None:
            assert str(path) in problem.message or "nothing to compare" in problem.message, what
            assert "\n" not in problem.message, what
    assert min(refused, taken) > (20 if thorough else 10)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_damaged_file_is_drawn_or_named(name: str, sources: list[str], tmp_path: Path) -> None:
    """The same with pictures, of a part."""
    path, picture = Path(sources[0]) / name, str(tmp_path / "runs.png")
    ends = set()
    for what, content in [*changed(name, path.read_bytes())][::120]:
        path.write_bytes(content)
        ends.add(compare([[*sources, "--json", "--plot", picture]], f"{name}: {what}") is None)
    assert ends == {True, False}


def compare(forms: list[list[str]], what: str) -> UserError | None:
    """Compare in each form, the first of them JSON; return the sentence that ended it, if any."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            for words in forms:
                main(words)
    except UserError as problem:
        return problem
    except Exception as problem:
        raise AssertionError(what) from problem
    json.JSONDecoder(parse_constant=pytest.fail).raw_decode(said.getvalue())
    return None


def test_numbers_too_large_for_64_bits_are_drawn(tmp_path: Path) -> None:
    """As real ones: an integer of JSON has no limit."""
    logged = rows([0.5, 0.9])
    for row in logged:
        row |= {"val/loss": 10**30, "time/train_seconds": -(10**25)}
    huge = {"perf/samples_per_second": 10**20}
    run = write_run(tmp_path / "huge", logged=logged, summary=huge)
    picture = tmp_path / "plot.png"
    main([run, write_run(tmp_path / "run"), "--plot", str(picture)])
    assert picture.stat().st_size > 10_000
