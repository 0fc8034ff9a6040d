"""A recipe that trains nothing, in no time: what a search sees of a run, and nothing else.

Tests of `recipes tune` copy and run it. Its accuracy is 1 at a learning rate of 0.1, and less
at any other; where a copy states another objective, to be low, that is -1 there.
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

from common.config import TrainingConfig, parse_config
from common.files import write_json

OBJECTIVE = "accuracy:max"


@dataclass(kw_only=True)
class Config(TrainingConfig):
    learning_rate: float = 0.1  # Best at 0.1.
    hidden_sizes: tuple[int, ...] = (8,)  # Not looked at.
    epoch_seconds: float = 0.0  # Time that an epoch takes.
    fail_above: float = 1e9  # Learning rate from which on the run fails.
    test_only: bool = False  # Have no validation split.


def main(config: Config) -> None:
    directory = Path(config.output_dir or "run")
    directory.mkdir(parents=True, exist_ok=True)
    epochs = config.epochs or 4
    sizes = {"train": 90, "test": 20} | ({} if config.test_only else {"validation": 10})
    facts = {
        "recipe": Path(__file__).stem,
        "objective": OBJECTIVE,
        "config": vars(config),
        "given": vars(config),
        "environment": {
            "device": "none",
            "device_type": "cpu",
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
        "plan": {"total_steps": 10 * epochs, "updates_per_epoch": 10},
    }
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
    write_json(directory / "config.json", facts)
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
