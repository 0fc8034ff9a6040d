"""A stand-in for the package trackio, which few machines have: its calls, and its database.

`trackio_tracker.py` uses no more of trackio than this. The tests that run with the stand-in run
with the real package, too, where it is installed.
"""

from __future__ import annotations

import json
import os
import sqlite3
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import huggingface_hub.constants

TABLES = """
CREATE TABLE IF NOT EXISTS metrics (run_id TEXT, run_name TEXT, step INTEGER, metrics TEXT);
CREATE TABLE IF NOT EXISTS configs (run_id TEXT UNIQUE, config TEXT);
"""


class Project:
    """A project, whose runs are in one database."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def runs(self) -> list[SimpleNamespace]:
        """Return the runs that have rows, oldest first."""
        with sqlite3.connect(self.path) as connection:
            rows = connection.execute(
                "SELECT run_name, run_id, config FROM metrics JOIN configs USING (run_id) "
                "GROUP BY run_id ORDER BY MIN(metrics.rowid)"
            ).fetchall()
        connection.close()
        return [
            SimpleNamespace(name=name, id=key, config=json.loads(text)) for name, key, text in rows
        ]

    def begin(self, name: str, group: str | None, config: Mapping[str, Any]) -> Run:
        """Continue the newest run of this name, or begin one."""
        with sqlite3.connect(self.path) as connection:
            connection.executescript(TABLES)
        connection.close()
        ids = [run.id for run in self.runs() if run.name == name]
        run_id = ids[-1] if ids else uuid.uuid4().hex
        return Run(self.path, name, run_id, {**config, "_Group": group})


class Run:
    """A run that writes each row at once."""

    def __init__(self, path: Path, name: str, run_id: str, config: Mapping[str, Any]) -> None:
        self.path = path
        self.name = name
        self.id = run_id
        self.config = dict(config)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write a row, and the configuration."""
        with sqlite3.connect(self.path) as connection:
            values = (self.id, self.name, step, json.dumps(metrics, default=vars))
            connection.execute("INSERT INTO metrics VALUES (?, ?, ?, ?)", values)
            configuration = (self.id, json.dumps(self.config))
            connection.execute("INSERT OR REPLACE INTO configs VALUES (?, ?)", configuration)
        connection.close()

    def finish(self) -> None:
        """Print, as trackio does."""
        print("* Run finished.")


def stand_in(folder: Path) -> ModuleType:
    """Return a module with trackio's names, whose data are in `folder`.

    Its list `started` has the state of the process at each start of a run: the variables of the
    environment, and whether the Hub is out of reach.
    """

    def database(project: str) -> Path:
        return folder / f"{project}.db"

    def runs(project: str) -> list[SimpleNamespace]:
        return Project(database(project)).runs()

    def init(
        project: str, name: str, group: str | None, config: Mapping[str, Any], **other: object
    ) -> Run:
        print("* Trackio project initialized")
        assert other["resume"] == "allow"
        module.started.append((dict(os.environ), huggingface_hub.constants.HF_HUB_OFFLINE))
        return Project(database(project)).begin(name, group, config)

    module: Any = ModuleType("trackio")
    module.TRACKIO_DIR = folder
    module.started = []
    module.init = init
    module.finish = lambda: print("* Run finished.")
    module.Api = lambda: SimpleNamespace(runs=runs)
    module.Image = Image
    module.Table = Table
    module.Histogram = Histogram
    module.fragments = SimpleNamespace(import_inbox_dir=lambda: 0)
    storage = SimpleNamespace(get_project_db_path=database)
    module.sqlite_storage = SimpleNamespace(SQLiteStorage=storage)
    return module


class Image:
    """An image from a file."""

    def __init__(self, value: str, caption: str) -> None:
        assert Path(value).is_file()
        self._type = "trackio.image"
        self.caption = caption


class Table:
    """A table, as a list of rows by column."""

    def __init__(self, columns: Sequence[str], data: Sequence[Sequence[object]]) -> None:
        self._type = "trackio.table"
        self._value = [dict(zip(columns, row, strict=True)) for row in data]


class Histogram:
    """A histogram of counts and edges."""

    def __init__(self, np_histogram: tuple[Any, Any]) -> None:
        counts, edges = np_histogram
        self._type = "trackio.histogram"
        self.values = counts.tolist()
        self.bins = edges.tolist()
