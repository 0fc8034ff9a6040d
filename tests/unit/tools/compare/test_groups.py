"""Groups of seeds: which runs belong together, and what may be said about a difference."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from common.objective import Objective
from common.tools.compare.command import main
from common.tools.compare.comparison import Comparison, compare
from common.tools.compare.group_table import group_cells
from common.tools.compare.missing_values import missing_value_warnings
from common.tools.compare.objective_text import difference_text
from common.tools.compare.plot import EVALUATION, draw_group
from common.tools.compare.readers.sources import read_runs
from common.tools.compare.report import as_markdown
from common.tools.compare.run_table import run_cells
from common.tools.compare.throughput_text import ratio_text_of_single_runs
from common.tools.compare.verdict_lines import verdict_lines
from common.tools.compare.verdicts import GroupVerdict, verdicts_of
from common.tools.compare.warnings_and_notes import load_warnings, notes
from common.tools.statistics.contrasts import contrast_by_seeds, welch_contrast
from common.tools.statistics.samples import ConfidenceInterval, Sample
from tests.unit.tools.compare.run_folders import rows, write_run

LOW = (0.970, 0.972, 0.974)
HIGH = (0.976, 0.978, 0.980)
HIGHEST = (0.982, 0.984, 0.986)
CLOSE = (0.971, 0.975, 0.976)


def write_seeds(
    folder: Path,
    values: Sequence[float],
    changes: dict[str, Any] | None = None,
    speeds: Sequence[float] | None = None,
    metric: str = "accuracy",
    first_seed: int = 0,
) -> list[str]:
    """Write a run for each value of the final metric, with seeds that follow each other."""
    sources = []
    for number, value in enumerate(values):
        seed = first_seed + number
        speed = 1000.0 if speeds is None else speeds[number]
        sources.append(
            write_run(
                folder / f"seed-{seed}",
                {"config.seed": seed, "config.dropout": 0.0, **(changes or {})},
                rows([value - 0.01, value], speed=speed, metric=metric),
                {f"test/{metric}": value},
            )
        )
    return sources


def logged_at(speeds: Sequence[float]) -> list[dict[str, Any]]:
    """Return a row for each of these throughputs."""
    logged = rows([0.5] * len(speeds))
    for row, speed in zip(logged, speeds, strict=True):
        row["perf/samples_per_second"] = speed
    return logged


def compared(*groups: Sequence[str]) -> Comparison:
    """Compare runs that stand in groups."""
    return compare(read_runs([source for group in groups for source in group]))


def verdict_of(comparison: Comparison, figure: str) -> GroupVerdict:
    """Return the only verdict on a figure."""
    (verdict,) = [verdict for verdict in verdicts_of(comparison) if verdict.figure == figure]
    return verdict


# Which runs are one group


@pytest.mark.parametrize(
    "changes",
    [
        {"config.seed": 7},
        {"config.output_dir": "elsewhere"},
        {"config.run_name": "mine", "config.tags": ["other"]},
        {"config.tracker": "none", "config.project": "other"},
        {"config.target": 0.5},
        {"config.own_note": "text"},  # a copy's flag with the role "record"
    ],
)
def test_what_never_matters_keeps_runs_together(changes: dict[str, Any], tmp_path: Path) -> None:
    """The seed may matter, but it is not a setting of a group."""
    roles = {"compared": {"own_note": False}}
    first = write_run(tmp_path / "first", {**roles, "config.own_note": "", "config.target": None})
    second = write_run(tmp_path / "second", {**roles, **changes})
    (group,) = compare(read_runs([first, second])).groups
    assert group.run_indices == (0, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"config.learning_rate": 0.2},
        {"config.log_every": 7},  # it may change the throughput
        {"environment.mixed_precision": "no"},
        {"environment.world_size": 2},
        {"environment.device": "Another GPU"},
        {"environment.versions": {"torch": "2.11.0", "accelerate": "1.15.0"}},
        {"environment.git_commit": "fedcba9876543210"},
        {"data.fingerprint": "other"},
        {"source": {"sha256": "a" * 64}},
        {"recipe": "bert"},
        {"plan.total_steps": 50},
    ],
    ids=str,
)
def test_what_may_matter_makes_another_group(changes: dict[str, Any], tmp_path: Path) -> None:
    """Otherwise its effect would pass for chance."""
    sources = [write_run(tmp_path / "first"), write_run(tmp_path / "second", changes)]
    assert len(compare(read_runs(sources)).groups) == 2


def test_commits_do_not_matter_if_the_code_is_known(tmp_path: Path) -> None:
    """A commit of a page changes no code, and code may change without a commit."""
    sources = [
        write_run(
            tmp_path / f"{digest}-{commit}",
            {"environment.code_sha256": digest * 64, "environment.git_commit": commit * 40},
        )
        for digest, commit in ("ac", "ad", "bd")
    ]
    groups = compare(read_runs(sources)).groups
    assert [group.run_indices for group in groups] == [(0, 1), (2,)]
    older = write_run(tmp_path / "older", {"environment.git_commit": "c" * 40})
    groups = compare(read_runs([*sources, older])).groups
    assert [group.run_indices for group in groups] == [(0, 3), (1, 2)]


def test_comments_in_a_recipe_do_not_matter(tmp_path: Path) -> None:
    """A resume ignores them, too."""
    sources = [
        write_run(tmp_path / text, {"source": {"sha256": text * 32, "code_sha256": code * 32}})
        for text, code in (("ab", "ee"), ("cd", "ee"), ("ef", "dd"))
    ]
    groups = compare(read_runs(sources)).groups
    assert [group.run_indices for group in groups] == [(0, 1), (2,)]
    older = write_run(tmp_path / "older", {"source": {"sha256": "ab" * 32}})
    groups = compare(read_runs([*sources, older])).groups
    assert [group.run_indices for group in groups] == [(0, 3), (1,), (2,)]


def test_groups_are_called_by_what_differs(tmp_path: Path) -> None:
    """A group's label is the flag and its value, and not the run's folder."""
    first = write_seeds(tmp_path / "a", LOW)
    second = write_seeds(tmp_path / "b", HIGH, {"config.dropout": 0.1})
    comparison = compared([first[0], second[0]], first[1:], second[1:])
    assert [group.label for group in comparison.groups] == ["dropout=0", "dropout=0.1"]
    assert [group.run_indices for group in comparison.groups] == [(0, 2, 3), (1, 4, 5)]


def test_groups_with_long_settings_are_called_by_their_runs(tmp_path: Path) -> None:
    """A table has no room for a whole list of settings."""
    first = write_seeds(tmp_path / "a", LOW)
    changes = {"environment.device": "a device with a very long name " * 2}
    comparison = compared(first, write_seeds(tmp_path / "b", HIGH, changes)[:1])
    assert [group.label for group in comparison.groups] == [
        f"{comparison.runs[0].name} and 2 more",
        comparison.runs[3].name,
    ]


# What counts in a group


def test_runs_that_differ_in_the_seed_alone_have_no_ratio(tmp_path: Path) -> None:
    """Their throughputs are one mean with its deviation."""
    comparison = compared(write_seeds(tmp_path, LOW[:2], speeds=(1000.0, 790.0)))
    assert "×" not in as_markdown(comparison)
    assert verdicts_of(comparison) == []
    cells = {label: values for label, *values in group_cells(comparison)}
    assert cells["throughput, samples/s"] == ["895 ± 148"]
    assert cells["final accuracy, test"] == ["0.9710 ± 0.0014"]
    assert cells["runs"] == ["2"]
    assert cells["seeds"] == ["0 1"]


def test_unfinished_runs_are_left_out_of_means(tmp_path: Path) -> None:
    """Unfinished runs trained for less time."""
    sources = write_seeds(tmp_path, LOW)
    unfinished = write_run(
        tmp_path / "short",
        {"config.seed": 9, "config.dropout": 0.0},
        rows([0.1], speed=9999.0),
        status="preempted",
    )
    cells = {label: values for label, *values in group_cells(compared(sources, [unfinished]))}
    assert cells["runs"] == ["3 (1 left out)"]
    assert cells["seeds"] == ["0 1 2"]
    assert cells["throughput, samples/s"] == ["1,000 ± 0"]


def test_repeated_seed_counts_once_for_quality(tmp_path: Path) -> None:
    """The same seed again says nothing about other seeds, but it is a further measured speed."""
    first = write_seeds(tmp_path / "a", (0.9, 0.9), {"config.seed": 3}, (1000.0, 1100.0))
    second = write_seeds(
        tmp_path / "b", (0.8, 0.8), {"config.seed": 3, "config.dropout": 0.1}, (500.0, 510.0)
    )
    comparison = compared(first, second)
    quality = verdict_of(comparison, "final accuracy, test")
    assert (quality.samples.other.count, quality.is_distinguishable) == (1, None)
    speed = verdict_of(comparison, "throughput")
    assert (speed.samples.other.count, speed.is_distinguishable) == (2, True)


def test_cells_without_ratios_keep_their_other_suffixes(tmp_path: Path) -> None:
    """The model card of a variant has no baseline, but still says which runs were left out."""
    first = write_seeds(tmp_path / "a", LOW)
    second = write_seeds(tmp_path / "b", HIGH, {"config.dropout": 0.1})
    comparison = compared([*first, *first], second)
    relative = {label: values for label, *values in group_cells(comparison)}
    assert relative["throughput, samples/s"][1].endswith(" (1.00×)")
    rows_for_cards = group_cells(comparison, relative=False)
    assert "baseline" not in rows_for_cards[0][1]
    cells = {label: values for label, *values in rows_for_cards}
    assert cells["throughput, samples/s"] == ["1,000 ± 0", "1,000 ± 0"]
    assert cells["runs"] == ["3 (3 left out)", "3"]


def test_run_that_is_named_twice_counts_once(tmp_path: Path) -> None:
    """A copy of a figure is not a second measurement."""
    sources = write_seeds(tmp_path, LOW[:2])
    cells = {label: values for label, *values in group_cells(compared(sources, sources))}
    assert cells["runs"] == ["2 (2 left out)"]


def test_copy_of_a_run_counts_once(tmp_path: Path) -> None:
    """A folder that was copied, linked or published is no further measurement."""
    sources = write_seeds(tmp_path, LOW[:2], {"run_id": "0123456789abcdef"})
    sources[1] = write_seeds(tmp_path / "other", LOW[:1], first_seed=7)[0]
    copies = [str(tmp_path / "copy"), str(tmp_path / "link")]
    shutil.copytree(sources[0], copies[0])
    Path(copies[1]).symlink_to(sources[0])
    comparison = compared(sources, copies)
    cells = {label: values for label, *values in group_cells(comparison)}
    assert cells["runs"] == ["2 (2 left out)"]
    assert cells["seeds"] == ["0 7"]
    assert "copy and seed-0 are one run: groups count it once" in notes(comparison)


# Verdicts on the objective


def test_clear_difference_has_its_interval(tmp_path: Path) -> None:
    """Welch's interval: 2.776 standard errors of 0.163 points at 4 degrees of freedom."""
    first = write_seeds(tmp_path / "a", LOW)
    second = write_seeds(tmp_path / "b", HIGH, {"config.dropout": 0.1})
    for groups, word in (((first, second), "better"), ((second, first), "worse")):
        verdict = verdict_of(compared(*groups), "final accuracy, test")
        assert verdict.text == f"0.60 points {word} (95 % interval 0.15 to 1.05)"
        assert verdict.is_distinguishable


def test_unclear_difference_says_how_many_seeds_would_tell(tmp_path: Path) -> None:
    """Neither the verdict nor the table names a winner."""
    first = write_seeds(tmp_path / "a", LOW)
    second = write_seeds(tmp_path / "b", CLOSE, {"config.dropout": 0.1}, first_seed=3)
    comparison = compared(first, second)
    verdict = verdict_of(comparison, "final accuracy, test")
    assert verdict.text.startswith(
        "not distinguishable with n = 3; about 23 seeds each would be needed (0.20 points better, "
    )
    assert verdict.is_distinguishable is False
    assert verdict.contrast.runs_needed == 23
    assert "**" not in as_markdown(comparison)


def test_equal_seeds_are_compared_in_pairs(tmp_path: Path) -> None:
    """The seeds differ from each other by more than each pair does."""
    first = write_seeds(tmp_path / "a", LOW)
    second = write_seeds(tmp_path / "b", CLOSE, {"config.dropout": 0.1})
    verdict = verdict_of(compared(first, second), "final accuracy, test")
    assert verdict.text == (
        "not distinguishable with n = 3; about 5 seeds each would be needed (0.20 points better, "
        "95 % interval -0.05 to 0.45, paired by seed)"
    )
    assert verdict.contrast.is_paired


SHIFT = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 10))


@given(
    counts=st.lists(st.integers(20, 340), min_size=10, max_size=10),
    shifts=st.lists(SHIFT, min_size=1, max_size=5),
    has_same_seeds=st.booleans(),
)
def test_equal_means_need_no_further_seeds(
    counts: list[int], shifts: list[tuple[int, int, int]], has_same_seeds: bool
) -> None:
    """Both groups have as many hits in all, and only rounding makes their means differ."""
    shifted = [*counts]
    for source, target, hits in shifts:
        if hits <= shifted[source]:
            shifted[source] -= hits
            shifted[target] += hits
    baseline = {str(seed): count / 360 for seed, count in enumerate(counts)}
    first_seed = 0 if has_same_seeds else 10
    group = {str(first_seed + seed): count / 360 for seed, count in enumerate(shifted)}
    contrast = contrast_by_seeds(baseline, group, 0.95)
    samples = Sample.of([*baseline.values()]), Sample.of([*group.values()])
    text = difference_text(Objective("accuracy", "max"), *samples, contrast)
    assert "the means are equal" in text or text == "equal in all runs"


@given(hits=st.integers(0, 360), seeds=st.integers(2, 9), other_seeds=st.integers(2, 9))
def test_equal_constants_are_equal_in_all_runs(hits: int, seeds: int, other_seeds: int) -> None:
    """A mean of equal values may be rounded."""
    samples = Sample.of([hits / 360] * seeds), Sample.of([hits / 360] * other_seeds)
    contrast = welch_contrast(*samples, 0.95)
    text = difference_text(Objective("accuracy", "max"), *samples, contrast)
    assert text == "equal in all runs"


def test_minimised_objective_is_better_if_it_is_lower(tmp_path: Path) -> None:
    """Its differences have no unit, because points are for proportions."""
    changes = {"objective": "rmse:min"}
    first = write_seeds(tmp_path / "a", LOW, changes, metric="rmse")
    second = write_seeds(tmp_path / "b", HIGH, {**changes, "config.dropout": 0.1}, metric="rmse")
    verdict = verdict_of(compared(first, second), "final RMSE, test")
    assert verdict.text == "0.0060 worse (95 % interval 0.0015 to 0.0105)"


def test_equal_seeds_give_no_interval(tmp_path: Path) -> None:
    """Without any spread, nothing is known about chance."""
    first = write_seeds(tmp_path / "a", (0.9, 0.9))
    other = write_seeds(tmp_path / "b", (0.91, 0.91), {"config.dropout": 0.1})
    same = write_seeds(tmp_path / "c", (0.9, 0.9), {"config.dropout": 0.2})
    texts = [verdict.text for verdict in verdicts_of(compared(first, other, same))]
    assert texts[0].startswith("1 point better; there is no interval")
    assert texts[2] == "equal in all runs"


def test_single_runs_get_no_verdict(tmp_path: Path) -> None:
    """The text has the standard error from the number of samples, and advice to repeat the runs."""
    (first,) = write_seeds(tmp_path / "a", LOW[:1])
    (second,) = write_seeds(tmp_path / "b", HIGH[:1], {"config.dropout": 0.1})
    comparison = compared([first], [second])
    verdict = verdict_of(comparison, "final accuracy, test")
    assert verdict.is_distinguishable is None
    assert verdict.text == (
        "0.9760 against 0.9700 with one seed each (standard errors of the samples 0.0108 and "
        "0.0121): repeat both with several seeds to tell which is better"
    )
    cells = {label: values for label, *values in run_cells(comparison)}
    assert cells["  standard error, 200 samples"] == ["0.0121", "0.0108"]
    pair = write_seeds(tmp_path / "c", LOW[:2], {"config.dropout": 0.2})
    several = compared(pair, [second])
    text = verdict_of(several, "final accuracy, test").text
    assert " with 1 seed against 2 seeds (" in text
    assert text.endswith("): repeat the single one with other seeds to tell which is better")
    text = verdict_of(several, "throughput").text
    assert "× as fast, in 1 run against 2 runs" in text
    assert text.endswith(": repeat the single one to see how much runs differ by chance")
    for word in ("points better", "points worse"):
        assert word not in as_markdown(comparison)


@pytest.mark.parametrize("in_training", [False, True])
@pytest.mark.parametrize("is_unfinished_first", [False, True])
def test_standard_error_is_that_of_a_finished_run(
    tmp_path: Path, is_unfinished_first: bool, in_training: bool
) -> None:
    """An unfinished run of the group has neither its value nor its standard error there."""
    (baseline,) = write_seeds(tmp_path / "a", LOW[:1])
    changes = {"config.dropout": 0.1}
    (finished,) = write_seeds(tmp_path / "b", HIGH[:1], changes)
    other_seed = {"config.dropout": 0.1, "config.seed": 1}
    unfinished = write_run(tmp_path / "c", other_seed, rows([0.1]), {}, status="preempted")
    group = [unfinished, finished] if is_unfinished_first else [finished, unfinished]
    expected = verdicts_of(compared([baseline], [finished]), in_training=in_training)
    verdicts = verdicts_of(compared([baseline], group), in_training=in_training)
    assert [verdict.text for verdict in verdicts] == [verdict.text for verdict in expected]
    assert "standard errors of the samples" in verdicts[0].text


def test_many_single_runs_share_one_sentence(tmp_path: Path) -> None:
    """One sentence stands for all pairs of single runs, which have no verdicts."""
    sources = [
        write_seeds(tmp_path / str(number), LOW[:1], {"config.dropout": number / 10})
        for number in range(4)
    ]
    comparison = compared(*sources)
    (line,) = verdict_lines(verdicts_of(comparison))
    assert line.startswith(f"3 differences from {comparison.runs[0].name} can't be judged")
    repeated = write_seeds(tmp_path / "repeated", HIGH, {"config.dropout": 0.5})
    others = write_seeds(tmp_path / "first", LOW)
    lines = verdict_lines(verdicts_of(compared(others, repeated, *sources[1:])))
    assert lines[0] == "dropout=0.5 against dropout=0:"
    assert lines[1].startswith("  final accuracy, test: 0.60 points better")
    assert lines[3].startswith("3 differences from dropout=0 can't be judged")
    assert len(lines) == 4


def test_other_splits_and_objectives_get_no_verdict(tmp_path: Path) -> None:
    """Test and validation figures are not compared with each other."""
    first = write_seeds(tmp_path / "a", LOW)
    sizes = {"train": 1000, "validation": 100}
    other_split = write_seeds(tmp_path / "b", HIGH, {"data.sizes": sizes})
    other_goal = write_seeds(tmp_path / "c", HIGH, {"objective": "rmse:min"}, metric="rmse")
    figures = {verdict.figure for verdict in verdicts_of(compared(first, other_split, other_goal))}
    assert figures == {"throughput"}


def write_groups(folder: Path, *values: Sequence[float]) -> list[list[str]]:
    """Write a group of runs for each of these lists of values."""
    return [
        write_seeds(folder / str(number), own_values, {"config.dropout": number / 10})
        for number, own_values in enumerate(values)
    ]


def test_each_pair_of_groups_is_compared(tmp_path: Path) -> None:
    """The second and the third group may differ where neither differs from the first."""
    comparison = compared(*write_groups(tmp_path, HIGH, LOW, HIGHEST))
    judged = [verdict for verdict in verdicts_of(comparison) if verdict.figure != "throughput"]
    pairs = [(verdict.baseline, verdict.group) for verdict in judged]
    assert pairs == [
        ("dropout=0", "dropout=0.1"),
        ("dropout=0", "dropout=0.2"),
        ("dropout=0.1", "dropout=0.2"),
    ]
    assert [verdict.is_distinguishable for verdict in judged] == [False, False, True]
    confidences = [verdict.interval.confidence for verdict in judged if verdict.interval]
    assert confidences == pytest.approx([1 - 0.05 / 3] * 3)
    assert "dropout=0.2 against dropout=0.1:" in as_markdown(comparison)


def test_many_pairs_stay_readable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The terminal shows ten pairs and counts the others, which JSON and the page have."""
    comparison = compared(*write_groups(tmp_path, *[LOW] * 5, HIGHEST))
    lines = verdict_lines(verdicts_of(comparison))
    headings = [line for line in lines if " against " in line and not line.startswith(" ")]
    assert len(headings) == 10
    assert lines[-1] == (
        "and 5 further pairs of groups, of which 3 can be told apart: see --json or --html"
    )
    page = tmp_path / "page.html"
    main([*(run.source for run in comparison.runs), "--json", "--html", str(page)])
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    pairs = {(verdict["baseline"], verdict["group"]) for verdict in verdicts}
    assert len(pairs) == 15
    text = page.read_text(encoding="utf-8")
    assert all(f"{group} against {baseline}:" in text for baseline, group in pairs)


def test_single_baseline_leaves_the_other_groups_comparable(tmp_path: Path) -> None:
    """A group that ran once can't be judged, but the others can."""
    single, *repeated = write_groups(tmp_path, LOW[:1], LOW, HIGH)
    lines = verdict_lines(verdicts_of(compared(single, *repeated)))
    assert lines[0] == "dropout=0.2 against dropout=0.1:"
    assert "0.60 points better (95 % interval 0.15 to 1.05)" in lines[1]
    assert lines[3].startswith("2 differences from dropout=0 can't be judged")


def test_intervals_of_several_groups_are_wider(tmp_path: Path) -> None:
    """A sentence says how much wider the intervals are, and why."""
    groups = [
        write_seeds(tmp_path / str(number), values, {"config.dropout": number / 10})
        for number, values in enumerate((LOW, HIGH, CLOSE))
    ]
    comparison = compared(*groups)
    assert "98.3 % interval" in verdicts_of(comparison)[0].text
    assert "3 pairs of groups are compared" in notes(comparison)[0]
    assert not [note for note in notes(compared(*groups[:2])) if "Bonferroni" in note]


# Verdicts on the throughput


def test_throughputs_of_groups_are_compared_by_ratio(tmp_path: Path) -> None:
    """Each run is one measurement."""
    first = write_seeds(tmp_path / "a", LOW, speeds=(1000.0, 1010.0, 990.0))
    changes = {"config.dropout": 0.1}
    second = write_seeds(tmp_path / "b", LOW, changes, speeds=(1500.0, 1520.0, 1480.0))
    verdict = verdict_of(compared(first, second), "throughput")
    assert verdict.text == "1.50 × as fast (95 % interval 1.46 to 1.54)"
    third = write_seeds(tmp_path / "c", LOW, changes, speeds=(1000.0, 1100.0, 800.0))
    verdict = verdict_of(compared(first, third), "throughput")
    assert verdict.text.startswith("not distinguishable with n = 3; about ")
    assert "runs each would be needed (0.96 ×, 95 % interval " in verdict.text


@pytest.mark.parametrize(
    ("speeds", "words"),
    [
        ((790.0, 800.0, 780.0, 795.0), "by the log lines within the runs): repeat both"),
        ((900.0, 1200.0, 800.0, 1300.0), "which even their log lines do not distinguish"),
        ((790.0,), "0.79 × as fast, in single runs: repeat both"),
    ],
)
def test_throughputs_of_single_runs_have_a_remark(
    speeds: tuple[float, ...], words: str, tmp_path: Path
) -> None:
    """Log lines show how much the speed varies within a run, which is not all."""
    first = write_run(tmp_path / "first", logged=logged_at((1000.0, 1005.0, 995.0, 1002.0)))
    second = write_run(tmp_path / "second", {"config.learning_rate": 0.2}, logged_at(speeds))
    verdict = verdict_of(compare(read_runs([first, second])), "throughput")
    assert words in verdict.text
    assert verdict.is_distinguishable is None


@pytest.mark.parametrize("ratio", [0.4, 0.96, 0.99, 1.02, 2.1])
def test_ratio_of_runs_outside_the_interval_of_their_lines_is_explained(ratio: float) -> None:
    """A run that has stalled for a few lines is slower as a whole than at most of its lines."""
    lines = ConfidenceInterval(math.log(0.98), math.log(0.95), math.log(1.01), 0.95, 7.0)
    baseline = Sample(1, math.log(1000.0), None)
    group = Sample(1, math.log(1000.0 * ratio), None)
    text = ratio_text_of_single_runs(baseline, group, lines)
    is_within = 0.95 <= ratio <= 1.01
    assert text.startswith(f"{ratio:.2f} × as fast, in single runs")
    assert ("do not distinguish" in text) == is_within
    assert ("a run was not steady: 0.98 × at the mean log line" in text) == (not is_within)


def test_repeated_group_against_a_single_run_need_not_have_stalled() -> None:
    """The lines are those of one run of each group, and other runs may be faster or slower."""
    lines = ConfidenceInterval(math.log(0.98), math.log(0.95), math.log(1.01), 0.95, 7.0)
    text = ratio_text_of_single_runs(
        Sample(2, math.log(1000.0), 0.1), Sample(1, math.log(500.0), None), lines
    )
    assert text.startswith(
        "0.50 × as fast, in 1 run against 2 runs, but 0.98 × at the mean log line of each group's "
        "first run (95 % interval 0.95 to 1.01): repeat the single one"
    )


def test_steady_runs_are_not_called_unsteady() -> None:
    """The interval is narrower than the digits of the ratio."""
    lines = ConfidenceInterval(math.log(0.5), math.log(0.4999), math.log(0.5001), 0.95, 7.0)
    runs = (Sample(1, math.log(1000.0), None), Sample(1, math.log(501.0), None))
    text = ratio_text_of_single_runs(*runs, lines)
    assert "(95 % interval 0.50 to 0.50 by the log lines within the runs)" in text


def test_machine_with_other_load_is_named(tmp_path: Path) -> None:
    """A single run needs no such warning, and neither do quiet machines."""
    name = "perf/other_cpu_fraction"
    quiet = write_run(tmp_path / "quiet", summary={name: 0.02})
    busy = write_run(tmp_path / "busy", {"config.learning_rate": 0.2}, summary={name: 0.45})
    unknown = write_run(tmp_path / "unknown", {"config.learning_rate": 0.3})
    comparison = compare(read_runs([quiet, busy, unknown]))
    (warning,) = load_warnings(comparison)
    assert warning.endswith(": 45% during busy, and at most 2% during others")
    assert f"> **busy machine** {warning}" in as_markdown(comparison)
    cells = {label: values for label, *values in run_cells(comparison)}
    assert cells["CPU used by other programs"] == ["2%", "45%", "–"]
    assert load_warnings(compare(read_runs([busy]))) == []
    assert load_warnings(compare(read_runs([quiet, unknown]))) == []


def test_mfu_names_the_precision_of_its_peak(tmp_path: Path) -> None:
    """The same share of two peaks is not the same speed."""
    mfu = {"perf/mfu": 0.72}
    changes = {"environment.mixed_precision": "bf16"}
    first = write_run(tmp_path / "first", changes, summary=mfu)
    second = write_run(tmp_path / "second", {**changes, "config.seed": 1}, summary=mfu)
    cells = {label: values for label, *values in run_cells(compare(read_runs([first, second])))}
    assert cells["MFU, of the bf16 peak"] == ["72.0%", "72.0%"]
    changes = {"environment.mixed_precision": "no", "peak": {"tflops": 0.1, "source": "measured"}}
    third = write_run(tmp_path / "third", changes, summary=mfu)
    cells = {label: values for label, *values in run_cells(compare(read_runs([first, third])))}
    assert cells["MFU"] == ["72.0% (of the bf16 peak)", "72.0% (of the measured fp32 peak)"]


def test_mfu_above_one_is_explained(tmp_path: Path) -> None:
    """The note names the run, also where the table shows only the mean of a group."""
    changes = {"peak": {"tflops": 0.1, "source": "measured"}}
    runs = []
    for seed, mfu in enumerate([0.95, 1.002, 1.0]):
        run_changes = {**changes, "config.seed": seed}
        runs.append(write_run(tmp_path / f"run{seed}", run_changes, summary={"perf/mfu": mfu}))
    (note,) = [line for line in notes(compare(read_runs(runs))) if "MFU" in line]
    assert note.startswith("run1: an MFU above 100% means that the device's peak was measured too")


# Output


def test_groups_are_printed_in_three_formats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The terminal, Markdown and JSON have the groups and the verdicts."""
    first = write_seeds(tmp_path / "a", LOW)
    second = write_seeds(tmp_path / "b", HIGH, {"config.dropout": 0.1})
    sentence = "final accuracy, test: 0.60 points better (95 % interval 0.15 to 1.05)"
    for form in ([], ["--markdown"]):
        main([*first, *second, *form])
        output = capsys.readouterr().out
        assert "groups of runs that differ in the seed alone" in output
        assert "dropout=0 (baseline)" in output
        assert "0.9780 ± 0.0020" in output
        assert "dropout=0.1 against dropout=0:" in output
        assert sentence in output
    main([*first, *second, "--json"])
    values = json.loads(capsys.readouterr().out)
    assert [group["name"] for group in values["groups"]] == ["dropout=0", "dropout=0.1"]
    assert [len(group["runs"]) for group in values["groups"]] == [3, 3]
    verdict = values["verdicts"][0]
    assert verdict["text"] in sentence
    assert verdict["distinguishable"] is True
    assert verdict["difference"] == pytest.approx(0.006)
    assert (verdict["low"], verdict["high"]) == pytest.approx((0.001466, 0.010534), abs=1e-6)


def test_verdicts_fit_into_narrow_terminals(tmp_path: Path) -> None:
    """A verdict wraps at most once at 80 columns."""
    first = write_seeds(tmp_path / "a", LOW)
    second = write_seeds(tmp_path / "b", CLOSE, {"config.dropout": 0.1})
    lines = verdict_lines(verdicts_of(compared(first, second)))
    assert max(map(len, lines)) <= 160


def test_picture_has_all_seeds_their_mean_and_a_band() -> None:
    """The mean and the band are those of the values at each step."""
    curves = [{10: (1.0, 0.2), 20: (2.0, 0.6)}, {10: (3.0, 0.4), 20: (4.0, 1.0), 30: (5.0, 1.0)}]
    axes = Figure().subplots()
    draw_group(axes, [*curves, {}], {"color": "#000000", "linestyle": "-"}, EVALUATION)
    *seeds, mean = axes.lines
    assert [line.get_xydata().tolist() for line in seeds] == [
        [[1.0, 0.2], [2.0, 0.6]],
        [[3.0, 0.4], [4.0, 1.0], [5.0, 1.0]],
    ]
    assert mean.get_xydata().tolist() == [[2.0, pytest.approx(0.3)], [3.0, pytest.approx(0.8)]]
    (band,) = axes.collections
    (outline,) = band.get_paths()
    heights = outline.vertices[:, 1]
    assert heights.min() == pytest.approx(0.3 - 0.1 * 2**0.5)
    assert heights.max() == pytest.approx(0.8 + 0.2 * 2**0.5)


def test_picture_of_groups_is_written(tmp_path: Path) -> None:
    """Groups may have one run, or only unfinished ones."""
    groups = [*write_seeds(tmp_path / "a", LOW)]
    groups += write_seeds(tmp_path / "b", HIGH[:1], {"config.dropout": 0.1})
    groups.append(write_run(tmp_path / "c", {"config.dropout": 0.2}, rows([0.5]), status="running"))
    picture = tmp_path / "groups.png"
    main([*groups, "--plot", str(picture)])
    assert picture.stat().st_size > 10_000


# Runs without a value of the objective


def test_run_without_a_value_is_named(tmp_path: Path) -> None:
    """The table counts three runs, and the mean has two of them."""
    sources = write_seeds(tmp_path / "a", LOW)
    lose_objective(sources[1])
    comparison = compared(sources)
    assert missing_value_warnings(comparison) == [
        "seed-1 finished with a final accuracy that is NaN or missing: "
        "the mean of seed-0 and 2 more leaves out 1 run"
    ]
    assert "> **missing values** seed-1 finished with" in as_markdown(comparison)


def test_group_without_any_value_is_named(tmp_path: Path) -> None:
    """There is no verdict on it, and the warning says why."""
    low = write_seeds(tmp_path / "a", LOW)
    lost = write_seeds(tmp_path / "b", LOW, {"config.dropout": 0.1})
    for source in lost:
        lose_objective(source)
        lose_objective(source, "val/best_accuracy")
    comparison = compared(low, lost)
    (warning,) = missing_value_warnings(comparison)
    assert "with a final accuracy that is NaN or missing" in warning
    assert warning.endswith("there is no value of dropout=0.1 to compare")


def test_runs_without_missing_values_have_no_such_warning(tmp_path: Path) -> None:
    """Neither have runs that were never evaluated, nor those that did not finish."""
    assert missing_value_warnings(compared(write_seeds(tmp_path / "a", LOW))) == []
    stopped = write_run(tmp_path / "stopped", status="preempted")
    assert missing_value_warnings(compare(read_runs([stopped]))) == []
    logged = [{"progress/global_step": 1, "train/loss": 1.0}]
    never = write_run(tmp_path / "never", {"data.sizes": {"train": 1000}}, logged)
    for name in ("val/accuracy", "val/loss", "val/count"):
        lose_objective(never, name)
    assert missing_value_warnings(compare(read_runs([never]))) == []


def lose_objective(source: str, name: str = "test/accuracy") -> None:
    """Make a figure in the summary of a run NaN, which is null in the file."""
    file = Path(source, "summary.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: None}))
