"""Trackers: W&B offline without a key or server, TensorBoard, none; `metrics.jsonl` always."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import wandb_file
from tests.launch import UNREACHABLE, Finished, Runner
from tests.wandb_file import records

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
    return wandb_file.inspect(file, *flags)


def history(folder: Path) -> dict[int, dict[str, float]]:
    """Return the rows that a folder of an offline run holds, by global step."""
    rows: dict[int, dict[str, float]] = {}
    for line in inspect(folder).splitlines():
        record = json.loads(line)
        if record["type"] == "history":
            values = record["history"]["item"]
            rows.setdefault(values["progress/global_step"], {}).update(values)
    return rows


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
    rows = history(folder)
    for name in ("train/loss", "eval/accuracy", "train/learning_rate"):
        logged = {step: values[name] for step, values in rows.items() if name in values}
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


@pytest.fixture(scope="module")
def presented(runner: Runner, odd_images: Path) -> Finished:
    """A run with a group, notes, tags of its own and one by variable, and its model kept."""
    return runner.run(
        *(
            "mnist_mlp",
            "--dataset",
            odd_images,
            "--batch-size",
            64,
            "--max-steps",
            6,
            "--log-every",
            1,
        ),
        *("--eval-every", 2, "--learning-rate", 1e-5, "--group", "seeds", "--notes", "why it is"),
        *("--tags", "mine", "--log-model"),
        launcher="python",
        environment={"WANDB_TAGS": "theirs,mine", "WANDB_NAME": "a-name"},
    )


def test_run_presents_itself(presented: Finished, unreachable: Finished) -> None:
    """Group, type, notes, name and tags are in W&B's file; `WANDB_*` variables are honoured."""
    shown = records(presented)["run"]
    assert shown["run_group"] == "seeds"
    assert shown["job_type"] == "train"
    assert shown["notes"] == "why it is"
    assert shown["display_name"] == "a-name"
    precision = presented.config["environment"]["mixed_precision"].replace("no", "fp32")
    data = presented.config["data"]["name"]
    assert shown["tags"] == ["mnist_mlp", data, precision, "cpu", "mine", "theirs"]
    assert "run_group" not in records(unreachable)["run"]


def test_metrics_have_an_axis_and_a_best_value(presented: Finished) -> None:
    """Each chart is over the update; W&B is told which of loss and accuracy is the best."""
    metrics = records(presented)["metric"]
    assert metrics["*"]["step_metric"] == "progress/global_step"
    assert metrics["eval/accuracy"]["summary"] == {"max": True}
    for name in ("eval/loss", "train/loss"):
        assert metrics[name]["summary"] == {"min": True}
        assert metrics[name]["step_metric"] == "progress/global_step"


def test_summary_has_the_final_and_the_best_values(presented: Finished) -> None:
    """Under a metric's name is what `summary.json` has; `.max` and `.min` are the best."""
    summary = records(presented)["summary"]
    for name, value in presented.summary.items():
        assert summary[name] == pytest.approx(value), name
    for name, best, choose in (
        ("eval/accuracy", "max", max),
        ("eval/loss", "min", min),
        ("train/loss", "min", min),
    ):
        values = presented.series(name).values()
        assert summary[f"{name}.{best}"] == pytest.approx(choose(values)), name


def test_final_evaluation_has_panels(presented: Finished) -> None:
    """A confusion matrix of all samples, and wrong predictions with their images."""
    found = records(presented)
    last = found["history"][-1]
    for name in ("eval/confusion_table", "eval/mistakes", "memory/plan"):
        assert last[f"{name}._type"] == "table-file"
    (folder,) = wandb_runs(presented)
    table = json.loads((folder / "files" / last["eval/confusion_table.path"]).read_text())
    assert table["columns"] == ["Actual", "Predicted", "nPredictions"]
    assert sum(row[2] for row in table["data"]) == presented.summary["eval/count"]
    right = sum(row[2] for row in table["data"] if row[0] == row[1])
    count, accuracy = presented.summary["eval/count"], presented.summary["eval/accuracy"]
    assert right / count == pytest.approx(accuracy)
    wrong = json.loads((folder / "files" / last["eval/mistakes.path"]).read_text())
    assert wrong["columns"] == ["sample", "image", "label", "prediction"]
    assert len(wrong["data"]) == min(32, count - right)
    assert all(row[2] != row[3] for row in wrong["data"])
    # The table in the run's folder says "Image"; the artifact that W&B shows has the files.
    tables = [
        {entry["path"] for entry in artifact["manifest"]["contents"]}
        for artifact in found["artifact"]["run_table"]
    ]
    (mistakes,) = [names for names in tables if "eval/mistakes.table.json" in names]
    assert len(mistakes) > 2
    assert all(name.startswith("media/images/") for name in mistakes - {"eval/mistakes.table.json"})


def test_memory_plan_is_kept(presented: Finished) -> None:
    """Before training in `config.json` and on the terminal; after it beside what was measured."""
    plan = presented.config["memory_plan"]
    assert records(presented)["config"]["memory_plan"] == pytest.approx(plan)
    parameters = presented.config["model"]["parameters"]
    assert plan["weights_mib"] == pytest.approx(4 * parameters / 2**20, rel=0.1)
    memory = presented.read("memory.json")
    for part in ("weights", "gradients", "optimizer_state"):
        assert memory[part]["planned_mib"] == pytest.approx(memory[part]["measured_mib"], rel=0.1)
    assert memory["activations"]["measured_mib"] > 0
    lines = presented.output.splitlines()
    assert sum(line.startswith("memory  weights") for line in lines) == 1
    assert sum(line.startswith("memory  activations") for line in lines) == 1


def test_model_is_kept_on_request(presented: Finished, learned_mlp: Finished) -> None:
    """`--log-model` keeps the files of `model/` as an artifact; without it there is none."""
    (artifact,) = records(presented)["artifact"]["model"]
    kept = {entry["path"] for entry in artifact["manifest"]["contents"]}
    assert kept == {path.name for path in (presented.directory / "model").iterdir()}
    assert "model" not in records(learned_mlp)["artifact"]


def test_evaluation_is_a_job_of_its_own(runner: Runner, presented: Finished) -> None:
    """`--evaluate-only` is another type of job, with panels of its own."""
    run = runner.run(
        *("mnist_mlp", "--evaluate-only", "--init-from", presented.directory),
        launcher="python",
    )
    found = records(run)
    assert found["run"]["job_type"] == "evaluate"
    assert "eval/confusion_table._type" in found["history"][-1]
    assert not (run.directory / "memory.json").exists()


def test_wrong_predictions_of_text_show_the_text(learned_bert: Finished, runner: Runner) -> None:
    """Tokens are turned back into the words that were read."""
    run = runner.run(
        *("bert", "--evaluate-only", "--init-from", learned_bert.directory),
        *("--tracker", "wandb"),
        launcher="python",
    )
    (folder,) = wandb_runs(run)
    last = records(run)["history"][-1]
    wrong = json.loads((folder / "files" / last["eval/mistakes.path"]).read_text())
    assert wrong["columns"] == ["sample", "text", "label", "prediction"]
    assert all(len(row[1].split()) > 2 for row in wrong["data"])


def test_confusion_of_many_classes_lists_pairs() -> None:
    """Where a matrix would be too large, the pairs that are confused most are listed."""
    import torch

    from common.wandb_media import confusion

    counts = torch.eye(100) * 5
    counts[3, 4], counts[70, 2] = 2, 9
    table = confusion(counts, [f"class {i}" for i in range(100)])
    assert table.data == [["class 70", "class 2", 9], ["class 3", "class 4", 2]]


def test_what_cannot_be_sent_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A panel that fails costs nothing else: metrics go on."""
    from types import SimpleNamespace
    from typing import Any

    from common.tracking import Tracking

    def refuse(_: Any) -> None:
        raise ValueError("too large")

    trackers = [SimpleNamespace(name="wandb", tracker=None)]
    accelerator: Any = SimpleNamespace(is_main_process=True, trackers=trackers)
    Tracking(accelerator, tmp_path).attach(refuse)
    assert accelerator.trackers == trackers
    assert "too large" in capsys.readouterr().out


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
        names = {path.name for path in run.directory.iterdir()} - {".lock"}
        files = {"config.json", "metrics.jsonl", "summary.json", "status.json", "memory.json"}
        assert names == files | {"model", "checkpoints"}
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
