"""Runs whose files are damaged: a sentence that names the file, or a comparison; nothing else."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.compare.__main__ import main
from common.errors import UserError
from tests.unit.compare.run_folders import rows, write_run
from tests.unit.damage import broken, wrong

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


@pytest.mark.parametrize("name", NAMES)
def test_damaged_file_is_named_or_borne(name: str, tmp_path: Path) -> None:
    """Whatever stands in a run's files, as the baseline and beside one, in each form."""
    compare_with_damage(name, tmp_path, plotted_every=150)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_damaged_file_is_drawn_or_named(name: str, tmp_path: Path) -> None:
    """The same with pictures."""
    compare_with_damage(name, tmp_path, plotted_every=20)


def compare_with_damage(name: str, folder: Path, plotted_every: int) -> None:
    """Compare a run that has all kinds of damage in a file with a whole one."""
    logged = rows([0.5, 0.7])
    sources = [write_run(folder / name, logged=logged) for name in ("damaged", "whole")]
    path = Path(sources[0]) / name
    refused = taken = 0
    for number, (what, content) in enumerate(changed(name, path.read_bytes())):
        path.write_bytes(content)
        plot = ("--plot", str(folder / "runs.png")) if number % plotted_every == 0 else ()
        problem = compare_all_ways(sources, plot, f"{name}: {what}")
        taken, refused = taken + (problem is None), refused + (problem is not None)
        if problem is not None:
            assert str(path) in problem.message or "nothing to compare" in problem.message, what
            assert "\n" not in problem.message, what
    assert refused > 20
    assert taken > 20


def compare_all_ways(sources: list[str], plot: tuple[str, ...], what: str) -> UserError | None:
    """Return the sentence that a comparison ended with, if it did."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            main([*sources, "--json", *plot])
            main([*reversed(sources)])
            main([*sources, "--markdown"])
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
