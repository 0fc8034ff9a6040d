"""Made-up runs with what a reproduction reads: rows, digests, weights, and the machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from common.run_directory.identity import signed_config
from common.run_directory.records import ATTEMPTS, CHECKPOINT_DIGESTS, PROVENANCE
from common.storage.json_files import write_json
from common.tools.reproduce.compared_run import ComparedRun, read_compared_run
from tests.unit.saved_config import contents_with

ATTEMPT: dict[str, Any] = {
    "global_step": 0,
    "recipe": "tiny.py",
    "trees": [{"folder": "/nowhere", "commit": "ab" * 20}],
    "packages": {"torch": "2.13.0", "rich": "14.0"},
    "libraries": {"cpu instructions": "AVX512"},
    "processor": "Some CPU",
    "cores": 2,
    "system": "Linux",
}
LOSSES = (1.5, 1.25, 1.0)


def write_rows(run: ComparedRun, rows: dict[int, dict[str, float | None]]) -> ComparedRun:
    """Replace the rows of a run, and return it as it is read.

    Args:
        rows: the figures of each row, by update.
    """
    lines = [json.dumps({"progress/global_step": step} | row) for step, row in rows.items()]
    (run.directory / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return read_compared_run(run.directory)


def write_run(
    folder: Path,
    *,
    losses: tuple[float | None, ...] = LOSSES,
    speed: float = 100.0,
    accuracy: float = 0.5,
    weight: float = 1.0,
    attempt: dict[str, Any] | None = None,
    **changes: Any,
) -> ComparedRun:
    """Write a run that logged a row each 2 updates, and return it as it is read.

    Args:
        speed: samples a second, which no comparison may look at.
        weight: the only weight of the exported model.
        attempt: entries of the attempt that are not those of `ATTEMPT`.
        changes: of `config.json`.
    """
    folder.mkdir(parents=True)
    changes.setdefault("initial_weights", "ef" * 32)
    write_json(folder / "config.json", signed_config(contents_with(run_id=folder.name, **changes)))
    write_json(folder / "status.json", {"status": "finished", "run_id": folder.name})
    rows = [
        {"progress/global_step": 2 * n, "train/loss": loss, "perf/samples_per_second": speed}
        for n, loss in enumerate(losses, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_json(folder / "summary.json", {"test/accuracy": accuracy, "perf/goodput": speed})
    (folder / PROVENANCE).mkdir()
    write_json(folder / ATTEMPTS, {"attempts": [{**ATTEMPT, **(attempt or {})}]})
    digests = {"progress/global_step": 4, "files": {"model.safetensors": f"digest of {weight}"}}
    (folder / CHECKPOINT_DIGESTS).write_text(json.dumps(digests) + "\n")
    (folder / "model").mkdir()
    save_file({"w": torch.tensor([weight])}, folder / "model" / "model.safetensors")
    write_json(folder / "model" / "model.json", {"weights_sha256": f"export of {weight}"})
    return read_compared_run(folder)
