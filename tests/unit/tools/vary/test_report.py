"""The report on variants: the split that it goes by, what it says, and missing seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from common.tools.vary.report import report_on_variants
from tests.unit.tools.compare.run_folders import rows, write_run

SPLITS = {"data.sizes": {"train": 1000, "validation": 100, "test": 200}}
TEST_ONLY = {"data.sizes": {"train": 1000, "test": 200}}


def write_variant(
    folder: Path,
    dropout: float,
    validation: list[float],
    test: list[float],
    changes: dict[str, Any] | None = None,
) -> list[str]:
    """Write a variant's runs, one for each pair of a validation and a test accuracy."""
    split = "test" if TEST_ONLY.items() <= (changes or {}).items() else "val"
    sources = []
    for seed, (best, final) in enumerate(zip(validation, test, strict=True)):
        settings = {"config.seed": seed, "config.dropout": dropout, **(changes or {})}
        logged = rows([0.5, best], split=split)
        summary = {"test/accuracy": final}
        sources.append(write_run(folder / f"{dropout}-{seed}", settings, logged, summary))
    return sources


def report_text(folder: Path, finished: dict[str, list[str]], seeds: int) -> str:
    """Return the table that a report writes."""
    report_on_variants(folder, finished, seeds)
    assert (folder / "picture.png").stat().st_size > 10_000
    return (folder / "table.md").read_text()


def test_variants_go_by_validation_data(tmp_path: Path) -> None:
    """The test figures are shown, and they would say the opposite."""
    finished = {
        "dropout=0": write_variant(tmp_path, 0.0, [0.90, 0.91, 0.92], [0.99, 0.98, 0.97]),
        "dropout=0.1": write_variant(tmp_path, 0.1, [0.95, 0.96, 0.97], [0.90, 0.91, 0.92]),
    }
    text = report_text(tmp_path, finished, 3)
    assert text.startswith(
        "resnet on digits (train 1,000, validation 100, test 200), compared on validation data\n"
    )
    assert "best accuracy, validation: 5.0 points better (95 % interval 2.7 to 7.3)" in text
    assert "| final accuracy, test | 0.9800 ± 0.0100 | 0.9100 ± 0.0100 |" in text
    assert "worse" not in text
    assert "--validation-share" not in text


def test_test_figures_are_called_so(tmp_path: Path) -> None:
    """Without validation data, the final figures count, and a sentence says what they are for."""
    finished = {
        "dropout=0": write_variant(tmp_path, 0.0, [0.99, 0.99], [0.90, 0.91], TEST_ONLY),
        "dropout=0.1": write_variant(tmp_path, 0.1, [0.99, 0.99], [0.95, 0.96], TEST_ONLY),
    }
    text = report_text(tmp_path, finished, 2)
    assert "compared on test data" in text.splitlines()[0]
    assert "final accuracy, test: 5.0 points better" in text
    assert "there is no validation data, so these are test figures" in text
    assert "to choose, add --validation-share 0.1" in text


def test_share_that_the_recipe_ignored_is_not_advised(tmp_path: Path) -> None:
    """The command already has the flag, so only the data can help."""
    facts = {**TEST_ONLY, "config.validation_share": 0.1}
    finished = {
        "dropout=0": write_variant(tmp_path, 0.0, [0.99, 0.99], [0.90, 0.91], facts),
        "dropout=0.1": write_variant(tmp_path, 0.1, [0.99, 0.99], [0.95, 0.96], facts),
    }
    text = report_text(tmp_path, finished, 2)
    assert "to choose, add a validation split to the data" in text
    assert "--validation-share" not in text


@pytest.mark.parametrize(
    ("sets_seed", "advice"),
    [
        (False, "the same command with --seeds 3 keeps these runs and adds others"),
        (True, "pass --seeds 3 instead of --seed; if you pass --output-dir, name another folder"),
    ],
)
def test_advice_on_seeds_can_be_followed(sets_seed: bool, advice: str, tmp_path: Path) -> None:
    """The command refuses --seeds beside --seed."""
    finished = {
        "dropout=0": write_variant(tmp_path, 0.0, [0.9], [0.9]),
        "dropout=0.1": write_variant(tmp_path, 0.1, [0.9], [0.9]),
    }
    report_on_variants(tmp_path, finished, 1, sets_seed=sets_seed)
    text = (tmp_path / "table.md").read_text()
    assert f"one seed does not tell a difference from chance: {advice}" in text


def test_single_variant_chooses_nothing(tmp_path: Path) -> None:
    """Several seeds of one command are a measurement on test data, as they should be."""
    runs = write_variant(tmp_path, 0.0, [0.99, 0.99], [0.90, 0.91], TEST_ONLY)
    text = report_text(tmp_path, {"these flags": runs}, 2)
    assert "0.9050 ± 0.0071" in text
    assert "to choose" not in text
    assert "against" not in text


def test_variants_may_lack_seeds(tmp_path: Path) -> None:
    """Failed runs are counted, and the others are compared all the same."""
    finished = {
        "dropout=0": write_variant(tmp_path, 0.0, [0.90, 0.91, 0.92], [0.9, 0.9, 0.9]),
        "dropout=0.1": write_variant(tmp_path, 0.1, [0.91, 0.92], [0.9, 0.9]),
    }
    text = report_text(tmp_path, finished, 3)
    assert "| runs | 3 | 2 |" in text
    assert "not distinguishable with n = 3 and 2" in text
    assert "dropout=0.1: 2 of 3 runs finished, and only these count" in text


def test_variants_that_never_matter_are_still_variants(tmp_path: Path) -> None:
    """A flag that `compare` leaves out may vary as well."""
    sources = [
        write_run(tmp_path / name, {"config.tags": [name], "config.seed": 0}) for name in ("a", "b")
    ]
    text = report_text(tmp_path, {"tags=a": sources[:1], "tags=b": sources[1:]}, 1)
    assert "|  | tags=a (baseline) | tags=b |" in text


def test_seeds_of_other_code_or_versions_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An upgrade between the seeds of a variant is a warning, also in the file."""
    first = write_variant(tmp_path, 0.0, [0.90, 0.91], [0.9, 0.9])
    second = write_variant(tmp_path, 0.1, [0.90, 0.91], [0.9, 0.9])
    config = Path(second[1], "config.json")
    facts = json.loads(config.read_text())
    facts["environment"]["versions"]["torch"] = "2.14.0"
    facts["environment"]["git_commit"] = "fedcba9876543210"
    config.write_text(json.dumps(facts))
    text = report_text(tmp_path, {"dropout=0": first, "dropout=0.1": second}, 2)
    warning = (
        "the runs of dropout=0.1 differ in more than the seed: "
        "version of torch 2.13.0 and 2.14.0; commit 01234567 and fedcba98"
    )
    assert f"> **not a fair comparison** {warning}" in text
    assert f"not a fair comparison: {warning}" in " ".join(capsys.readouterr().out.split())
    assert "the runs of dropout=0 differ" not in text


def test_seeds_with_other_uncommitted_changes_are_named(tmp_path: Path) -> None:
    """An edit of the library changes no commit, and a commit may change no code that trains."""
    runs = write_variant(tmp_path, 0.0, [0.90, 0.91, 0.92], [0.9, 0.9, 0.9])
    for run, digest, commit in zip(runs, "aab", "cdd", strict=True):
        config = Path(run, "config.json")
        facts = json.loads(config.read_text())
        facts["environment"] |= {"code_sha256": digest * 64, "git_commit": commit * 40}
        config.write_text(json.dumps(facts))
    same = report_text(tmp_path, {"these flags": runs[:2]}, 2)
    assert "more than the seed" not in same
    text = report_text(tmp_path, {"these flags": runs}, 3)
    assert (
        "> **not a fair comparison** the runs of these flags differ in more than the seed: "
        "code beside the recipe aaaaaaaa and bbbbbbbb\n"
    ) in text


@pytest.mark.slow
def test_file_has_the_warnings_and_all_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The terminal shows ten pairs, and a file can be read later and elsewhere."""
    finished = {}
    for number in range(6):
        changes = {} if number else {"data.fingerprint": "another"}
        name = f"dropout={number / 10:g}"
        finished[name] = write_variant(
            tmp_path, number / 10, [0.90, 0.91], [0.9, 0.9], {**SPLITS, **changes}
        )
    busy = Path(finished["dropout=0"][0], "summary.json")
    busy.write_text(json.dumps({**json.loads(busy.read_text()), "perf/other_cpu_fraction": 0.4}))
    text = report_text(tmp_path, finished, 2)
    warning = "> **not a fair comparison** dropout=0 and each of dropout=0.1, dropout=0.2"
    assert warning in text
    assert "> **busy machine** other programs used CPU time" in text
    assert ": 40% during dropout=0, seed 0" in text
    assert text.count(" against ") == 15
    printed = " ".join(capsys.readouterr().out.split())
    assert "and 5 further pairs of groups" in printed
    assert "see table.md" in printed


def test_report_of_nothing_is_a_sentence(tmp_path: Path) -> None:
    """All variants may have failed."""
    with pytest.raises(UserError, match="no variant finished"):
        report_on_variants(tmp_path, {}, 2)


def test_warnings_name_runs_by_flag_and_value(tmp_path: Path) -> None:
    """The name of a run's folder has the value alone, such as 0-seed-1."""
    finished = {
        "dropout=0": write_variant(tmp_path, 0.0, [0.90, 0.91], [0.9, 0.9]),
        "dropout=0.1": write_variant(tmp_path, 0.1, [0.90], [0.9]),
    }
    for runs in finished.values():
        file = Path(runs[-1], "summary.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | {"perf/other_cpu_fraction": 0.5}))
    text = report_text(tmp_path, finished, 2)
    assert ": 50% during dropout=0, seed 1, 50% during dropout=0.1" in text
