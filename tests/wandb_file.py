"""Read a W&B run's file back with W&B's own reader."""

from __future__ import annotations

import json
from typing import Any

from tests.launch import Finished


def records(run: Finished) -> dict[str, Any]:
    """Return what the one W&B run of a launch wrote, by kind of record.

    Returns:
        ``run`` and ``artifact``: the records themselves; ``metric``: definitions by name;
        ``history``: rows; ``history_keys``: all keys in them; ``summary``: the last values;
        ``config``.
    """
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    (file,) = (run.wandb_folder / "wandb").glob("*run-*/*.wandb")
    store = DataStore()
    store.open_for_scan(str(file))
    found: dict[str, Any] = {"artifact": [], "history": [], "summary": {}, "metric": {}}
    found["config"] = {}
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found["run"] = record.run
            update_from(found["config"], record.run.config.update)
        elif kind == "config":
            update_from(found["config"], record.config.update)
        elif kind == "artifact":
            found["artifact"].append(record.artifact)
        elif kind == "metric":
            name = record.metric.name or record.metric.glob_name
            found["metric"][name] = record.metric
        elif kind == "history":
            row: dict[str, Any] = {}
            update_from(row, record.history.item)
            found["history"].append(row)
        elif kind == "summary":
            update_from(found["summary"], record.summary.update)
        elif kind == "request" and record.request.HasField("log_artifact"):
            found["artifact"].append(record.request.log_artifact.artifact)
    found["history_keys"] = {key for row in found["history"] for key in row}
    return found


def update_from(target: dict[str, Any], items: Any) -> None:
    """Put the values of W&B's items into a dictionary."""
    for item in items:
        keys = list(item.nested_key) or [item.key]
        here = target
        for key in keys[:-1]:
            here = here.setdefault(key, {}) if isinstance(here.get(key, {}), dict) else {}
        here[keys[-1]] = json.loads(item.value_json)
