"""The web page of a comparison: its curves, its text, and that runs can't put code into it."""

from __future__ import annotations

import json
import math
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from common.objective import Objective
from common.run_directory.records import RunConfig
from common.system.printable import printable
from common.tools.compare import output_formats, page
from common.tools.compare.command import main
from common.tools.compare.comparison import Comparison, compare
from common.tools.compare.page import page_of
from common.tools.compare.page_data import page_data
from common.tools.compare.readers.run_record import RunRecord
from common.tools.compare.report import report_of
from tests.launch import REPOSITORY
from tests.unit.tools.compare.run_folders import FACTS, rows, write_run

STEP = "progress/global_step"
SAMPLES = "progress/samples"
TIME = "time/train_seconds"
# Each of them would act if a part of the page did not escape it.
ATTACKS = (
    "</script><img src=http://attack.invalid/x onerror=\"document.title='attacked'\">",
    "<!--<script>",
    "\"><script>document.title='attacked'</script>",
    "' onfocus=document.title='attacked' autofocus='",
    "</style></title><svg onload=alert(1)>",
    "{{script}}",
    "\u2028]]>&lt;b&gt;\x00\x1b[31m",
)


def record(
    name: str, logged: Sequence[dict[str, float]], seed: int = 0, **changes: Any
) -> RunRecord:
    """Return a finished run with these rows."""
    facts = {**FACTS, "config": {**FACTS["config"], "seed": seed}, **changes}
    saved_config = RunConfig(**facts)
    objective = Objective.parse(saved_config.objective)
    return RunRecord(name, f"runs/{name}", saved_config, objective, [*logged], {}, "finished")


class Reader(HTMLParser):
    """Collects the elements and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}  # by the element that they are directly in
        self.path: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag not in ("meta", "input"):
            self.path.append(tag)
        key = self.key
        if tag == "script" and attributes.get("type") == "application/json":
            self.path[-1] = "data"
            key = self.key
        self.texts.setdefault(key, []).append("")

    def handle_endtag(self, tag: str) -> None:
        self.path.pop()

    def handle_data(self, data: str) -> None:
        if self.path:
            self.texts.setdefault(self.key, [""])[-1] += data

    @property
    def key(self) -> str:
        return self.path[-1]

    @property
    def data(self) -> Any:
        (text,) = self.texts["data"]
        return json.loads(text, parse_constant=pytest.fail)


# The curves


NUMBER = st.one_of(
    st.floats(-1e9, 1e9), st.sampled_from([math.nan, math.inf, -math.inf, 1e99, 0.0, 1])
)
ROW = st.fixed_dictionaries(
    {},
    optional={
        "train/loss": NUMBER,
        "val/loss": NUMBER,
        "val/accuracy": NUMBER,
        "perf/mfu": NUMBER,
        "toString": NUMBER,
        SAMPLES: st.integers(0, 2**53),
        TIME: NUMBER,
    },
)
ROWS = st.lists(ROW, max_size=12).map(
    lambda drawn: [{STEP: 10 * number} | row for number, row in enumerate(drawn, start=1)]
)


def finite(value: float | None) -> float | None:
    """Return a value; None instead of NaN and infinities."""
    return value if value is not None and math.isfinite(value) else None


@given(all_rows=st.lists(ROWS, min_size=1, max_size=4))
def test_curves_are_those_of_the_rows(all_rows: list[list[dict[str, float]]]) -> None:
    """Rows without a value, and values that are not numbers, have no point."""
    runs = [record(str(number), logged, number) for number, logged in enumerate(all_rows)]
    data = page_data(compare(runs))
    json.dumps(data, allow_nan=False)
    names = {series["name"] for chart in data["charts"] for series in chart["series"]}
    for logged, run in zip(all_rows, data["runs"], strict=True):
        assert names >= run["curves"].keys()
        for name in ("train/loss", "val/loss", "val/accuracy", "perf/mfu", "toString"):
            expected = [row for row in logged if finite(row.get(name)) is not None]
            assert (name in run["curves"]) == bool(expected)
            if not expected:
                continue
            curve = run["curves"][name]
            assert curve["y"] == pytest.approx([row[name] for row in expected], rel=1e-5)
            places = curve["places"]
            for x_name in (STEP, SAMPLES, TIME):
                column = run["x"][x_name]
                shown = column if places is None else [column[place] for place in places]
                assert len(shown) == len(expected)
                for x, row in zip(shown, expected, strict=True):
                    known = finite(row.get(x_name))
                    assert x == known if known is None else x == pytest.approx(known, abs=0.001)


@given(all_rows=st.lists(ROWS, min_size=2, max_size=4))
def test_means_cover_the_updates_that_all_seeds_logged(
    all_rows: list[list[dict[str, float]]],
) -> None:
    """The page has the means and standard deviations of the picture, at each of these updates."""
    runs = [record(str(number), logged, number) for number, logged in enumerate(all_rows)]
    (group,) = page_data(compare(runs))["groups"]
    for name in ("train/loss", "val/accuracy"):
        curves = []
        for logged in all_rows:
            points = {row[STEP]: row[name] for row in logged if finite(row.get(name)) is not None}
            if points:
                curves.append(points)
        steps = sorted(set.intersection(*map(set, curves))) if len(curves) > 1 else []
        assert (name in group["means"]) == bool(steps)
        if not steps:
            continue
        mean = group["means"][name]
        assert mean["count"] == len(curves)
        assert mean["x"][STEP] == steps
        for step, y, deviation in zip(steps, mean["y"], mean["deviation"], strict=True):
            values = [curve[step] for curve in curves]
            size = max(map(abs, values))
            assert y == pytest.approx(statistics.fmean(values), rel=1e-5, abs=1e-12 * size)
            assert deviation == pytest.approx(statistics.stdev(values), rel=1e-5, abs=1e-12 * size)


def test_charts_begin_with_the_loss_and_the_objective() -> None:
    """Others can be chosen. A metric has one chart for training and evaluation."""
    data = page_data(compare([record("run", rows([0.5, 0.6]))]))
    shown = [chart for chart in data["charts"] if chart["is_shown"]]
    assert [chart["heading"] for chart in shown] == ["loss", "accuracy"]
    assert [series["name"] for series in shown[0]["series"]] == ["train/loss", "val/loss"]
    assert [series["stage"] for series in shown[0]["series"]] == ["training", "validation"]
    others = [chart["heading"] for chart in data["charts"] if not chart["is_shown"]]
    assert "throughput, samples/s" in others
    assert not [heading for heading in others if "global step" in heading]


def test_charts_with_equal_headings_have_their_full_names() -> None:
    """The recipe's own metrics may look alike."""
    row = {STEP: 1, "own/score": 1.0, "other/score": 2.0}
    headings = [chart["heading"] for chart in page_data(compare([record("run", [row])]))["charts"]]
    assert headings == ["score (own/score)", "score (other/score)"]


def long_rows(count: int, metrics: int) -> list[dict[str, float]]:
    """Return rows of noise."""
    return [
        {STEP: step, SAMPLES: 128 * step, TIME: 0.0123 * step}
        | {f"train/metric_{number}": math.sin(step * (number + 1.7)) for number in range(metrics)}
        for step in range(1, count + 1)
    ]


@pytest.mark.parametrize(
    ("run_count", "row_count", "metrics"), [(1, 100_000, 2), (3, 6000, 5), (30, 150, 20)]
)
def test_page_of_long_runs_is_small(run_count: int, row_count: int, metrics: int) -> None:
    """The page is small, but it has the extremes of each curve."""
    logged = long_rows(row_count, metrics)
    logged[row_count // 3]["train/metric_0"] = 77.0
    logged[row_count // 2]["train/metric_0"] = -77.0
    runs = [record(str(number), logged, number) for number in range(run_count)]
    comparison = compare(runs)
    data = page_data(comparison)
    for run in data["runs"]:
        for curve in run["curves"].values():
            assert len(curve["y"]) <= 2000
        values = run["curves"]["train/metric_0"]["y"]
        assert (min(values), max(values)) == (-77.0, 77.0)
    assert len(page_of(comparison).encode()) < 2_000_000


def test_page_of_runs_without_rows_is_written(tmp_path: Path) -> None:
    """Runs without rows, or with a single row, have a page."""
    empty = write_run(tmp_path / "empty", logged=[], status="running")
    short = write_run(tmp_path / "short", {"config.seed": 1}, rows([0.5]))
    file = tmp_path / "page.html"
    main([empty, "--html", str(file)])
    assert Reader(file.read_text()).data["charts"] == []
    main([empty, short, "--html", str(file)])
    assert Reader(file.read_text()).data["runs"][1]["curves"]["val/loss"]["y"] == [2.1]


# The text


def attacked() -> Comparison:
    """Return a comparison of runs whose texts are attacks."""
    facts = {
        "recipe": ATTACKS[0],
        "data": {**FACTS["data"], "name": ATTACKS[1]},
        "environment": {**FACTS["environment"], "device": ATTACKS[3]},
    }
    runs = []
    for number, attack in enumerate(ATTACKS):
        logged = [row | {attack: 1.0, f"val/{attack}": 0.5} for row in rows([0.5, 0.6])]
        run = record(attack, logged, **(facts if number else {}))
        flags = {**run.saved_config.flags, "own_flag": attack, attack: attack, "seed": number}
        config = run.saved_config.model_copy(update={"flags": flags})
        assert config.to_json()["config"]["own_flag"] == attack
        runs.append(replace(run, saved_config=config, status="failed", reason=attack))
    twin = replace(runs[-1], name=f"{ATTACKS[0]} twin", source="twin")
    return compare([*runs, twin])


@cache
def structure() -> set[str]:
    """Return the elements and attributes that any page has, from a harmless comparison."""
    runs = [record(name, rows([0.5, 0.6])) for name in ("first", "second")]
    failed = [replace(run, status="failed", reason="no power") for run in runs]
    other = record("third", rows([0.5]), recipe="bert")
    return elements_of(page_of(compare([*runs, *failed, other])))


def elements_of(text: str) -> set[str]:
    """Return each kind of element with the names of its attributes."""
    return {f"{tag} {sorted(attributes)}" for tag, attributes in Reader(text).elements}


def test_texts_of_runs_are_never_markup() -> None:
    """The page has the same elements as that of harmless runs, and shows the texts."""
    text = page_of(attacked())
    assert elements_of(text) <= structure()
    reader = Reader(text)
    names = [run["name"] for run in reader.data["runs"]]
    assert names == [*map(printable, ATTACKS), f"{ATTACKS[0]} twin"]
    shown = "\n".join(line for lines in reader.texts.values() for line in lines)
    for attack in ATTACKS:
        assert printable(attack) in shown
    assert "\x00" not in text
    assert "\x1b" not in text


def test_script_is_allowed_by_its_digest_alone() -> None:
    """Whatever came into the page besides, a browser would not run it, and would load nothing."""
    text = page_of(attacked())
    reader = Reader(text)
    (policy,) = [
        attributes["content"]
        for tag, attributes in reader.elements
        if tag == "meta" and "http-equiv" in attributes
    ]
    assert policy is not None
    (script,) = reader.texts["script"]
    (style,) = reader.texts["style"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'{page.digest_for_policy(script)}'"
    assert rules["style-src"] == f"'{page.digest_for_policy(style)}'"
    assert "data-cursor" in script


def test_page_loads_nothing() -> None:
    """The page has no address, and no element, script or style that loads a file."""
    text = page_of(compare([record("run", rows([0.5, 0.6]))]))
    assert not re.search(r"https?:|//[a-z]+\.|\burl\(|@import|\bimport\b|fetch\(|XMLHttp", text)
    for tag, attributes in Reader(text).elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form", "a")
        assert not {"src", "href", "action", "data"} & attributes.keys()


def test_text_is_that_of_the_terminal() -> None:
    """The same warnings, cells, verdicts and notes stand in the same order."""
    for comparison in (attacked(), compare([record("run", rows([0.5, 0.6]))])):
        report = report_of(comparison)
        reader = Reader(page_of(comparison))
        cells = reader.texts.get("th", []) + reader.texts.get("td", [])
        expected = [cell for table in report.tables for row in table.rows for cell in row]
        assert sorted(filter(None, cells)) == sorted(map(printable, filter(None, expected)))
        titles = [printable(table.title) for table in report.tables if table.title]
        assert reader.texts.get("caption", []) == titles
        # The paragraphs of the page itself come first.
        lines = [printable(line) for line in report.lines]
        assert reader.texts["p"][-len(lines) :] == lines if lines else True
        labels = [warning.label for warning in report.warnings]
        assert reader.texts.get("strong", []) == labels
        warnings = [f" {printable(warning.text)}" for warning in report.warnings]
        assert [text for text in reader.texts.get("li", []) if text] == warnings


# The command


def test_page_is_written_beside_any_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output names the page, except where programs read it."""
    source = write_run(tmp_path / "run")
    file = tmp_path / "page.html"
    for form in ([], ["--markdown"], ["--json"]):
        main([source, "--html", str(file), *form])
        output = capsys.readouterr().out
        assert file.read_text().startswith("<!DOCTYPE html>")
        if form == ["--json"]:
            assert json.loads(output)["baseline"] == "run"
        else:
            assert f"page: {file}" in output.replace("\n", "")
        file.unlink()


@pytest.mark.parametrize("name", ["run", "run/config.json", "missing/page.html", "folder.html"])
def test_page_that_cannot_be_written_gives_one_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's own file, named by mistake, stays as it is. No run is read before the refusal."""
    monkeypatch.setattr(output_formats, "read_runs", lambda _: pytest.fail("a run was read"))
    source = write_run(tmp_path / "run")
    (tmp_path / "folder.html").mkdir()
    before = (tmp_path / "run" / "config.json").read_bytes()
    with pytest.raises(UserError) as refused:
        main([source, "--html", str(tmp_path / name)])
    assert name in refused.value.message
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def test_installed_package_has_the_parts_of_the_page() -> None:
    """`pyproject.toml` lists them."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]
    folder = REPOSITORY / "common" / "tools" / "compare"
    patterns = settings["package-data"]["common.tools.compare"]
    packaged = {path for pattern in patterns for path in folder.glob(pattern)}
    assert {page.FOLDER / f"page.{suffix}" for suffix in ("html", "css", "js")} <= packaged


def test_help_needs_no_large_library() -> None:
    """The readers of runs, which need pydantic, are imported later."""
    code = (
        "import sys\n"
        "from common.tools.__main__ import main\n"
        "try:\n"
        "    main(['compare', '--help'])\n"
        "finally:\n"
        "    print({'pydantic', 'torch', 'numpy', 'safetensors'} & set(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 0
    assert "--html FILE" in answer.stdout
    assert answer.stdout.splitlines()[-1] == "set()"
