"""The files of a stored run: read once, and named if they are missing, damaged or edited."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from common.metric_names import STEP
from common.run_directory.identity import signed_config
from common.run_directory.records import METRICS_FILE, MetricsRow
from common.run_directory.stored_run import StoredRun
from common.storage.files import LOCK
from common.storage.json_files import write_json
from common.tools.rows import first_differing_row, step_of_row
from tests.unit.saved_config import contents_with

ROWS = st.lists(
    st.dictionaries(
        st.sampled_from(["train/loss", "val/loss", "note", "perf/samples_per_second"]),
        st.one_of(st.none(), st.booleans(), st.floats(allow_nan=False), st.text(max_size=3)),
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return the directory of a finished run."""
    path = tmp_path / "run"
    path.mkdir()
    write_json(path / "config.json", signed_config(contents_with(run_id="a")))
    write_json(path / "status.json", {"status": "finished", "run_id": "a"})
    write_json(path / "summary.json", {"test/accuracy": 0.5, "test/loss": None})
    (path / METRICS_FILE).write_text(f'{{"{STEP}": 1}}\n')
    return path


def test_files_of_a_finished_run(directory: Path) -> None:
    run = StoredRun(directory)
    assert run.saved_config.recipe == "tiny"
    assert run.objective == ("accuracy", "max")
    assert run.edited_config_error is None
    assert (run.status.status, run.is_complete) == ("finished", True)
    assert run.summary.to_json() == {"test/accuracy": 0.5, "test/loss": None}
    assert run.rows == [{STEP: 1}]


def test_each_file_is_read_once(directory: Path) -> None:
    """What an object has answered once stays, although the run goes on."""
    run = StoredRun(directory)
    before = (run.saved_config, run.status, run.is_complete, run.summary, run.rows)
    for path in directory.iterdir():
        path.unlink()
    assert (run.saved_config, run.status, run.is_complete, run.summary, run.rows) == before


@pytest.mark.parametrize(
    ("status", "is_complete"), [("finished", True), ("failed", True), ("preempted", False)]
)
def test_summary_of_an_unfinished_run_may_be_outdated(
    directory: Path, status: str, is_complete: bool
) -> None:
    """A run that missed its target has failed, and its summary counts."""
    write_json(directory / "status.json", {"status": status})
    run = StoredRun(directory)
    assert run.is_complete is is_complete
    assert bool(run.summary.figures) is is_complete
    (directory / "summary.json").unlink()
    assert StoredRun(directory).summary.figures == {}


def test_killed_run_is_stopped(directory: Path) -> None:
    write_json(directory / "status.json", {"status": "running"})
    assert StoredRun(directory).status.status == "running"  # without a lock file, nobody knows
    (directory / LOCK).touch()
    assert StoredRun(directory).status.status == "stopped"


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", lambda run: run.saved_config),
        ("status.json", lambda run: run.status),
        ("summary.json", lambda run: run.summary),
    ],
)
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "can't be read"),
        ("[1]", "is damaged or was edited, because it does not contain a JSON object"),
    ],
)
def test_damaged_file_is_named(
    directory: Path, name: str, read: Callable[[StoredRun], object], text: str, problem: str
) -> None:
    (directory / name).write_text(text)
    with pytest.raises(UserError) as refused:
        read(StoredRun(directory))
    assert f"{directory / name} {problem}" in refused.value.problem
    assert refused.value.advice == "restore it from a backup, or pass another run"


@pytest.mark.parametrize(
    ("changes", "mistake"),
    [
        ({"recipe": 3}, "recipe is 3, but should be a valid string"),
        ({"objective": "accuracy"}, "objective 'accuracy' does not name a metric and max or min"),
    ],
)
def test_wrong_entry_of_the_configuration_is_named(
    directory: Path, changes: dict[str, object], mistake: str
) -> None:
    write_json(directory / "config.json", contents_with(**changes))
    with pytest.raises(UserError) as refused:
        StoredRun(directory).objective  # noqa: B018
    assert (
        refused.value.message
        == f"{directory / 'config.json'} is damaged or was edited ({mistake}): restore it "
        "from a backup, or pass another run"
    )


def test_wrong_entry_of_the_status_is_named(directory: Path) -> None:
    write_json(directory / "status.json", {"status": "done"})
    with pytest.raises(
        UserError, match=r"status\.json is damaged or was edited \(status is 'done'"
    ):
        StoredRun(directory).status  # noqa: B018


def test_edited_configuration_is_named(directory: Path) -> None:
    path = directory / "config.json"
    path.write_text(path.read_text().replace('"learning_rate": 0.1', '"learning_rate": 0.2'))
    run = StoredRun(directory)
    assert run.saved_config.flags["learning_rate"] == 0.2
    assert run.edited_config_error is not None
    assert "was edited after the run wrote it" in run.edited_config_error.problem


def test_lost_configuration_is_missing(directory: Path) -> None:
    """The rows or the status say that the run has trained."""
    (directory / "config.json").unlink()
    expected = r"run/config\.json does not exist: restore it from a backup, or pass another run"
    with pytest.raises(UserError, match=expected):
        StoredRun(directory).saved_config  # noqa: B018
    (directory / METRICS_FILE).unlink()
    with pytest.raises(UserError, match=expected):
        StoredRun(directory).saved_config  # noqa: B018


def test_lost_configuration_matters_more_than_a_damaged_status(directory: Path) -> None:
    """Otherwise a user who restores `status.json` would meet the next error."""
    (directory / "config.json").unlink()
    (directory / "status.json").write_text("{")
    with pytest.raises(UserError, match=r"run/config\.json does not exist"):
        StoredRun(directory).saved_config  # noqa: B018


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ({"status": "running"}, r"\(running\): wait until it has begun, or pass another run"),
        (
            {"status": "failed", "reason": "no such data"},
            r"\(failed: no such data\): repeat the command that started it, or pass another run",
        ),
    ],
)
def test_run_that_has_not_begun_is_named(
    tmp_path: Path, status: dict[str, str], message: str
) -> None:
    write_json(tmp_path / "status.json", status)
    with pytest.raises(UserError, match=f"the run in .* has not begun to train {message}"):
        StoredRun(tmp_path).saved_config  # noqa: B018


def test_other_folders_are_no_runs(directory: Path) -> None:
    with pytest.raises(UserError, match=rf"is a folder of 1 run, .*: pass .* such as {directory}"):
        StoredRun(directory.parent).saved_config  # noqa: B018
    for folder in (directory.parent / "nowhere", directory / METRICS_FILE):
        with pytest.raises(UserError, match=r"is not the directory of a run, because it contains"):
            StoredRun(folder).saved_config  # noqa: B018


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(figures=ROWS, share=st.floats(0, 1, exclude_max=True))
def test_torn_last_line_is_left_out(
    figures: list[MetricsRow], share: float, tmp_path: Path
) -> None:
    rows: list[MetricsRow] = [{STEP: number, **row} for number, row in enumerate(figures)]
    lines = [json.dumps(row) for row in rows]
    torn = lines[-1][: int(share * len(lines[-1]))]
    path = tmp_path / METRICS_FILE
    path.write_text("".join(f"{line}\n" for line in lines[:-1]) + torn)
    assert [*map(step_of_row, StoredRun(tmp_path).rows)] == [*range(len(rows) - 1)]
    path.write_text("".join(f"{line}\n" for line in lines))
    assert first_differing_row(StoredRun(tmp_path).rows, StoredRun(tmp_path).rows) is None


def test_run_without_rows_has_none(tmp_path: Path) -> None:
    assert StoredRun(tmp_path).rows == []


def test_damaged_line_is_told(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text(f'half\n{{"{STEP}": 1}}\n')
    with pytest.raises(UserError, match="line 1, is damaged: remove this line"):
        StoredRun(tmp_path).rows  # noqa: B018
