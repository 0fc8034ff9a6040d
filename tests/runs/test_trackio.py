"""trackio over kills and resumes: one run has exactly the rows of `metrics.jsonl`."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.jobs import CHECKPOINT_EVERY, MLP, Job
from tests.launch import Runner
from tests.runs.test_tracking_resume import halting

FLAGS = (*MLP, "--epochs", 4, "--tracker", "trackio", "--project", "tests")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("trackio") is None,
        reason='trackio is not installed: pip install "trackio>=0.43"',
    ),
]


def test_killed_and_resumed_is_one_run_with_the_rows_of_the_file(
    runner: Runner, tmp_path: Path
) -> None:
    """A run killed before and after its first checkpoint loses no row and doubles none."""
    directory = tmp_path / "run"
    database = tmp_path / "trackio" / "tests.db"
    environment = {"TRACKIO_DIR": str(database.parent)}
    path = halting(tmp_path, CHECKPOINT_EVERY - 1)
    flags = (*FLAGS, "--output-dir", directory)
    job = Job(runner, path, *flags, directory=directory, environment=environment)
    job.wait_until(lambda: (directory / "metrics.jsonl").exists())
    job.kill()
    path = halting(tmp_path, 14)
    job = Job(runner, path, "--resume", directory, directory=directory, environment=environment)
    job.wait_for_step(12)
    job.kill()
    job = Job(
        *(runner, "mnist_mlp", "--resume", directory), directory=directory, environment=environment
    )
    assert job.end() == 0, job.printed()
    assert "trackio show --project tests" in job.printed()
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").open()]
    with closing(sqlite3.connect(database)) as connection:
        stored = connection.execute(
            "SELECT run_name, metrics FROM metrics ORDER BY step"
        ).fetchall()
    assert {name for name, _ in stored} == {"run"}
    assert [json.loads(row) for _, row in stored] == rows
