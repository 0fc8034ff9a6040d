"""A recipe that trains nothing and only writes the files that a search reads of a run.

Tests of `recipes tune` copy and run it. Its accuracy is 1 at a learning rate of 0.1, and lower
at any other. In a copy with an objective to minimise, the value is -1 there, and higher elsewhere.
"""

import json
import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from common.config import TrainingConfig, parse_config
from common.run_directory.identity import signed_config
from common.storage.json_files import write_json

OBJECTIVE = "accuracy:max"


@dataclass(kw_only=True)
class Config(TrainingConfig):
    learning_rate: float = 0.1  # Best at 0.1.
    hidden_sizes: tuple[int, ...] = (8,)  # Not used.
    epoch_seconds: float = 0.0  # Duration of an epoch.
    fail_above: float = 1e9  # The run fails at a higher learning rate.
    test_only: bool = False  # Report no validation split.


def facts_of(config: Config, epochs: int) -> dict[str, Any]:
    """Return the contents of `config.json`."""
    sizes = {"train": 90, "test": 20}
    if not config.test_only:
        sizes["validation"] = 10
    return {
        "recipe": Path(__file__).stem,
        "objective": OBJECTIVE,
        "config": vars(config),
        "given": vars(config),
        "environment": {
            "device": "none",
            "device_type": "cpu",
            "processor": "none",
            "world_size": 1,
            "mixed_precision": "no",
            "effective_batch_size": config.batch_size,
            "threads_per_process": 1,
            "python": "3",
            "versions": {},
            "git_commit": None,
        },
        "data": {"name": "stub", "sizes": sizes},
        "architecture": {"name": "stub", "parameters": 1},
        "plan": {
            "total_steps": 10 * epochs,
            "updates_per_epoch": 10,
            "log_every": 1,
            "eval_every": 10,
        },
    }


def main(config: Config) -> None:
    directory = Path(config.output_dir or "run")
    directory.mkdir(parents=True, exist_ok=True)
    epochs = config.epochs or 4
    step = 0
    if config.resume:
        step = json.loads((directory / "status.json").read_text())["global_step"]
    print(f"begins after step {step} as {os.getpid()}", flush=True)

    def say(status: str, reason: str | None = None) -> None:
        value = {"status": status, "reason": reason, "global_step": step}
        write_json(directory / "status.json", value)

    def stop(number: int, frame: FrameType | None) -> None:
        say("preempted", "stopped by a signal")
        sys.exit(75)

    say("running")
    signal.signal(signal.SIGTERM, stop)
    write_json(directory / "config.json", signed_config(facts_of(config, epochs)))
    if config.learning_rate > config.fail_above:
        say("failed", f"learning rate {config.learning_rate} is too high")
        raise SystemExit("error: something else")
    metric, _, mode = OBJECTIVE.partition(":")
    reached = 1 - abs(math.log10(config.learning_rate / 0.1)) / 4
    reached = reached if mode == "max" else -reached
    row: dict[str, float] = {}
    while step < 10 * epochs:
        time.sleep(config.epoch_seconds)
        value = reached * (step + 10) / (10 * epochs)
        row = {f"val/{metric}": value, "train/loss": 1 - value}
        row |= {"progress/global_step": step + 10, "progress/epoch": (step + 10) / 10}
        with (directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        step += 10
        say("running")
    end = row | {f"val/best_{metric}": reached, "time/total_seconds": 1.0}
    write_json(directory / "summary.json", end)
    say("finished")


if __name__ == "__main__":
    main(parse_config(Config, __doc__))
