"""`compare` on damaged files of runs: it names the file or compares, and never fails otherwise."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import UserError
from common.tools.compare.command import main
from tests.damage import broken, wrong
from tests.unit.tools.compare.run_folders import rows, write_run

NAMES = ("config.json", "status.json", "summary.json", "metrics.jsonl")


def changed(name: str, whole: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield damaged contents of a run's file, each after a description of the damage."""
    if name == "metrics.jsonl":
        first, *others = whole.splitlines(keepends=True)
        for description, row in wrong(json.loads(first)):
            yield description, b"".join([json.dumps(row).encode() + b"\n", *others])
        yield "no row is an object", b"[1]\n" + whole
    else:
        for description, value in wrong(json.loads(whole)):
            yield description, json.dumps(value).encode()
    for number, content in enumerate(broken(whole, 200)):
        yield f"broken {number}", content
    for content in (b"", b"\xff\xfe", b"[" * 10**5, b"null", b'"text"', b"\n" * 3):
        yield repr(content[:9]), content


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    """Return the paths of two runs. Tests damage the first."""
    logged = rows([0.5, 0.7])
    return [write_run(tmp_path / name, logged=logged) for name in ("damaged", "whole")]


@pytest.mark.parametrize("name", NAMES)
def test_damaged_file_is_named_or_tolerated(
    name: str, sources: list[str], tmp_path: Path, thorough: bool
) -> None:
    """The damaged run is the baseline or stands beside it. Some cases draw a picture, too."""
    path = Path(sources[0]) / name
    refused = 0
    compared = 0
    # Few changes of the small `status.json` can be tolerated, so all of them are tried.
    is_sampled = not thorough and name != "status.json"
    cases = [*changed(name, path.read_bytes())][:: 5 if is_sampled else 1]
    for number, (description, content) in enumerate(cases):
        path.write_bytes(content)
        form = [*reversed(sources)] if number % 2 else [*sources, "--markdown"]
        forms = [[*sources, "--json"], form]
        if number % 150 == 0:
            forms.append([*sources, "--plot", str(tmp_path / "runs.png")])
        problem = compare(forms, f"{name}: {description}")
        if problem is None:
            compared += 1
        else:
            refused += 1
            assert str(path) in problem.message, description
            assert "\n" not in problem.message, description
    assert min(refused, compared) > (20 if thorough else 10)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_damaged_file_is_drawn_or_named(name: str, sources: list[str], tmp_path: Path) -> None:
    """A sample of the same cases, each with a picture."""
    path = Path(sources[0]) / name
    picture = str(tmp_path / "runs.png")
    ends = set()
    # Few changes of `status.json` can be tolerated, so its sample is larger.
    sample = slice(None, None, 12 if name == "status.json" else 120)
    for description, content in [*changed(name, path.read_bytes())][sample]:
        path.write_bytes(content)
        ends.add(
            compare([[*sources, "--json", "--plot", picture]], f"{name}: {description}") is None
        )
    assert ends == {True, False}


def compare(forms: list[list[str]], description: str) -> UserError | None:
    """Compare in each form, the first of which is JSON. Return the UserError, if any."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            for arguments in forms:
                main(arguments)
    except UserError as problem:
        return problem
    except Exception as problem:
        raise AssertionError(description) from problem
    json.JSONDecoder(parse_constant=pytest.fail).raw_decode(output.getvalue())
    return None


def test_numbers_too_large_for_64_bits_are_drawn(tmp_path: Path) -> None:
    """JSON limits no integer, so they are drawn as floats."""
    logged = rows([0.5, 0.9])
    for row in logged:
        row |= {"val/loss": 10**30, "time/train_seconds": -(10**25)}
    huge = {"perf/samples_per_second": 10**20}
    run = write_run(tmp_path / "huge", logged=logged, summary=huge)
    picture = tmp_path / "plot.png"
    main([run, write_run(tmp_path / "run"), "--plot", str(picture)])
    assert picture.stat().st_size > 10_000
