"""Trackers: W&B offline without a key or server, TensorBoard, none; `metrics.jsonl` always."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import UNREACHABLE, Finished, Runner

# Of the length that W&B expects of a key.
SECRET = "0badc0de" * 5


@pytest.fixture(scope="module")
def unreachable(runner: Runner) -> Finished:
    """Two processes with a key for a server that does not answer."""
    return runner.run(
        *(
            "mnist_mlp",
            "--dataset",
            "digits",
            "--max-steps",
            6,
            "--log-every",
            2,
            "--eval-every",
            3,
        ),
        *("--project", "some-project", "--run-name", "some-run", "--tags", "first", "second"),
        launcher="two",
        environment={"WANDB_API_KEY": SECRET, "WANDB_BASE_URL": UNREACHABLE},
    )


def wandb_runs(run: Finished) -> list[Path]:
    """Return the folders of W&B runs that a launch made."""
    return sorted((run.wandb_folder / "wandb").glob("*run-*"))


def inspect(folder: Path, *flags: str) -> str:
    """Return what `wandb leet inspect` says of a run."""
    (file,) = folder.glob("*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *flags, str(file)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_without_a_key_wandb_is_offline(learned_mlp: Finished) -> None:
    """Without a key, and nobody to ask, a run trains to its end and logs to W&B's offline files."""
    (folder,) = wandb_runs(learned_mlp)
    assert folder.name.startswith("offline-run-")
    assert "no API key" in learned_mlp.output
    assert len(learned_mlp.series("train/loss")) == len(range(20, 165, 20)) + 1


def test_terminal_ends_with_commands_for_the_offline_run(learned_mlp: Finished) -> None:
    """The summary shows how to look at the offline run, and how to upload it, with its path."""
    (folder,) = wandb_runs(learned_mlp)
    table = learned_mlp.output[learned_mlp.output.rindex("accuracy") :]
    text = re.sub(r"[\s│└┘─┴]+", " ", table)
    for command in ("wandb leet", "wandb sync"):
        assert re.search(rf"{command} (\S*{re.escape(folder.name)})", text), text


def test_wandb_has_the_summary_of_the_run(learned_mlp: Finished) -> None:
    """W&B's summary is `summary.json`, not the last interval's figures; its config is the run's."""
    (folder,) = wandb_runs(learned_mlp)
    shown = json.loads(inspect(folder, "--summary"))
    assert shown["config"]["environment"] == learned_mlp.config["environment"]
    for name, value in learned_mlp.summary.items():
        assert shown["summary"][name] == pytest.approx(value), name


def test_wandb_has_the_metrics_of_the_run(learned_mlp: Finished) -> None:
    """W&B's file holds the metrics of `metrics.jsonl` under the same names, by global step."""
    (folder,) = wandb_runs(learned_mlp)
    history: dict[int, dict[str, float]] = {}
    for line in inspect(folder).splitlines():
        record = json.loads(line)
        if record["type"] == "history":
            values = record["history"]["item"]
            history[values["progress/global_step"]] = values
    for name in ("train/loss", "eval/accuracy", "train/learning_rate"):
        logged = {step: values[name] for step, values in history.items() if name in values}
        assert logged == pytest.approx(learned_mlp.series(name)), name


def test_unreachable_server_does_not_stop_training(unreachable: Finished) -> None:
    """With a key and a server that does not answer, W&B is offline and nothing is lost."""
    assert "offline" in unreachable.output
    assert "does not answer" in unreachable.output
    assert list(unreachable.series("train/loss")) == [2, 4, 6]
    assert list(unreachable.series("eval/loss")) == [3, 6]
    assert unreachable.config["environment"]["world_size"] == 2


def test_two_processes_log_once(unreachable: Finished) -> None:
    """Two processes make one W&B run, one line a log interval, and one block on the terminal."""
    (folder,) = wandb_runs(unreachable)
    assert folder.name.startswith("offline-run-")
    assert unreachable.output.count("recipe  mnist_mlp") == 1
    assert unreachable.output.count("step 2/6") == 1
    assert unreachable.output.count("2 processes") == 2  # of the device and of the batch
    steps = [line["progress/global_step"] for line in unreachable.metrics]
    assert len(steps) == len(set(steps))


def test_key_is_written_nowhere(unreachable: Finished) -> None:
    """A key is in no file of the run, of W&B or of its folders, and not on the terminal."""
    folders = (unreachable.directory, unreachable.wandb_folder, unreachable.directory.parents[1])
    files = {path for folder in folders for path in folder.rglob("*") if path.is_file()}
    assert any(path.suffix == ".wandb" for path in files)
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path
    assert SECRET not in unreachable.output + unreachable.errors


def test_project_name_and_tags_reach_wandb(unreachable: Finished) -> None:
    """`--project`, `--run-name` and `--tags` are those of the W&B run."""
    (folder,) = wandb_runs(unreachable)
    records = inspect(folder)
    assert "some-project" in records
    assert "some-run" in records
    assert "first" in records
    assert "second" in records


def test_command_line_is_not_sent_to_wandb(learned_mlp: Finished) -> None:
    """W&B gets neither the command line, which may hold a token, nor code."""
    (folder,) = wandb_runs(learned_mlp)
    names = {path.name for path in folder.rglob("*")}
    assert "wandb-metadata.json" not in names
    assert not any(name.endswith((".py", ".patch")) for name in names)


def test_no_tracker_makes_no_wandb_folder(whole_mlp: Finished, distributed_mlp: Finished) -> None:
    """`--tracker none` leaves the run's own files and no other."""
    for run in (whole_mlp, distributed_mlp):
        assert not run.wandb_folder.exists()
        names = {path.name for path in run.directory.iterdir()}
        files = {"config.json", "metrics.jsonl", "summary.json", "status.json", "model"}
        assert names == files | {"checkpoints"}
        assert not (run.directory.parent / "wandb").exists()


@pytest.mark.parametrize("mode", ["disabled", "offline", "online"])
def test_wandb_mode_is_honoured(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`WANDB_MODE` decides, with or without a key."""
    from common.tracking import wandb_mode

    monkeypatch.setenv("WANDB_MODE", mode)
    for key in ("", SECRET):
        monkeypatch.setenv("WANDB_API_KEY", key)
        assert wandb_mode()[0] == mode


def test_failing_tracker_never_stops_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tracker that raises while logging is left out from then on; the file goes on."""
    from types import SimpleNamespace
    from typing import Any

    from common.tracking import Tracking

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    accelerator: Any = SimpleNamespace(is_main_process=True, trackers=[object()], log=refuse)
    tracking = Tracking(accelerator, tmp_path)
    tracking.file = (tmp_path / "metrics.jsonl").open("a")
    tracking.log({"train/loss": 1.0}, 1)
    assert accelerator.trackers == []
    monkeypatch.setattr(accelerator, "log", lambda *_, **__: None)
    tracking.log({"train/loss": float("nan")}, 2)
    tracking.finish({})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert lines == [{"train/loss": 1.0}, {"train/loss": None}]
    assert "no route" in capsys.readouterr().out
