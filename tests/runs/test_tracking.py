"""Trackers: W&B, which is offline without a key or a server, and no tracker."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.track.flat_config import nested_facts
from tests import wandb_file
from tests.conftest import first
from tests.launch import UNREACHABLE, Finished, Runner
from tests.wandb_file import records
from tests.wandb_server import unusable_server

# Of the length that W&B expects of a key.
SECRET = "0badc0de" * 5


@pytest.fixture(scope="session")
def unreachable(runner: Runner) -> Finished:
    """A run of two processes with a key for a server that does not answer."""
    return runner.shared(
        *("mnist_mlp", "--dataset", "digits", "--max-steps", 6, "--checkpoint-every", 2),
        *("--log-every", 2, "--eval-every", 3),
        *("--project", "some-project", "--run-name", "some-run", "--tags", "first", "second"),
        launcher="two forks",
        environment={"WANDB_API_KEY": SECRET, "WANDB_BASE_URL": UNREACHABLE},
    )


def wandb_runs(run: Finished) -> list[Path]:
    """Return the folders of W&B runs that a launch made."""
    return sorted((run.wandb_folder / "wandb").glob("*run-*"))


def inspect(folder: Path, *flags: str) -> str:
    """Return the output of `wandb leet inspect` for a W&B run."""
    (file,) = folder.glob("*.wandb")
    return wandb_file.inspect(file, *flags)


def history(folder: Path) -> dict[int, dict[str, float]]:
    """Return the rows in the folder of an offline run, by global step."""
    rows: dict[int, dict[str, float]] = {}
    for line in inspect(folder).splitlines():
        record = json.loads(line)
        if record["type"] == "history":
            values = record["history"]["item"]
            rows.setdefault(values["progress/global_step"], {}).update(values)
    return rows


def read_if_there(path: Path) -> bytes:
    """Return a file's bytes, or no bytes if another launch has removed the file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def test_without_a_key_wandb_is_offline(learned_mlp: Finished) -> None:
    """A run without a key or a terminal to ask for one logs to W&B's offline files."""
    (folder,) = wandb_runs(learned_mlp)
    assert folder.name.startswith("offline-run-")
    assert "no API key" in learned_mlp.output
    assert len(learned_mlp.series("train/loss")) == len(range(20, 165, 20)) + 1


def test_terminal_ends_with_commands_for_the_offline_run(learned_mlp: Finished) -> None:
    """The final table shows commands that view and upload the offline run, with its path."""
    (folder,) = wandb_runs(learned_mlp)
    table = learned_mlp.output[learned_mlp.output.rindex("accuracy") :]
    text = re.sub(r"[\s│└┘─┴]+", " ", table)
    for command in ("wandb leet", "wandb sync"):
        assert re.search(rf"{command} (\S*{re.escape(folder.name)})", text), text


def test_wandb_has_the_summary_of_the_run(learned_mlp: Finished) -> None:
    """W&B's summary has the values of `summary.json`, and its config those of `config.json`."""
    (folder,) = wandb_runs(learned_mlp)
    shown = json.loads(inspect(folder, "--summary"))
    config = learned_mlp.config
    # Each value is a column of W&B's table of runs, so none is nested.
    assert not any(isinstance(value, dict) for value in shown["config"].values())
    config_at_wandb = nested_facts(shown["config"])
    for group in ("environment", "data", "architecture", "plan", "objective", "config"):
        assert config_at_wandb[group] == config[group], group
    assert config_at_wandb["environment"]["git_commit"]
    assert config_at_wandb["command"].startswith("mnist_mlp.py --epochs 15 --batch-size 128")
    assert "given" not in shown["config"]
    for name, value in learned_mlp.summary.items():
        assert shown["summary"][name] == pytest.approx(value), name


def test_wandb_has_the_metrics_of_the_run(learned_mlp: Finished) -> None:
    """W&B's file has the metrics of `metrics.jsonl` under the same names, by global step."""
    (folder,) = wandb_runs(learned_mlp)
    rows = history(folder)
    for name in ("train/loss", "test/accuracy", "train/learning_rate"):
        logged = {step: values[name] for step, values in rows.items() if name in values}
        assert logged == pytest.approx(learned_mlp.series(name)), name


def test_unreachable_server_does_not_stop_training(unreachable: Finished) -> None:
    """A run with a key whose server does not answer logs offline and loses nothing."""
    assert "offline" in unreachable.output
    assert "does not answer" in unreachable.output
    assert list(unreachable.series("train/loss")) == [2, 4, 6]
    assert list(unreachable.series("test/loss")) == [3, 6]
    assert unreachable.config["environment"]["world_size"] == 2


UNUSABLE = {
    "401": "the server answers 401",
    "500": "the server answers 500",
    "rubbish": "the server does not know the key",
    "hang": "the server does not answer",
}


@pytest.mark.parametrize("answer", first(1, UNUSABLE))
def test_unusable_server_means_an_offline_run(answer: str, runner: Runner) -> None:
    """A server that answers wrongly leads to one offline run with every row.

    The terminal shows the reason, and the run asks the server once.
    """
    with unusable_server(answer) as (address, requested_paths):
        run = asked_with_a_key(runner, address)
    assert f"W&B offline ({UNUSABLE[answer]}" in run.output
    assert requested_paths == ["/graphql"]
    check_offline_run(run, folders=1)


@pytest.mark.parametrize("answer", first(1, ["401", "rubbish", "known key"]))
def test_server_that_fails_after_all_means_an_offline_run(answer: str, runner: Runner) -> None:
    """A run that W&B refuses to begin goes on offline, under the same id."""
    with unusable_server(answer) as (address, _):
        mode = {} if answer == "known key" else {"WANDB_MODE": "online"}
        run = asked_with_a_key(runner, address, **mode)
    assert "W&B offline (the server refused: CommError)" in run.output
    check_offline_run(run, folders=2)  # the other folder is of the failed attempt


@pytest.mark.slow
def test_server_that_may_get_better_is_asked_for_a_while(runner: Runner) -> None:
    """W&B repeats a request for 20 s if the server may recover; then the run goes on offline.

    The two kinds of such servers run at the same time here.
    """
    assert runner.template  # made before two threads ask for it
    with ThreadPoolExecutor() as pool:
        for each in [
            pool.submit(test_server_that_fails_after_all_means_an_offline_run, failure, runner)
            for failure in ("500", "hang")
        ]:
            each.result()


def asked_with_a_key(runner: Runner, address: str, **environment: str) -> Finished:
    """Return a short run with a key for the server at `address`."""
    variables = {"WANDB_API_KEY": SECRET, "WANDB_BASE_URL": address, **environment}
    flags = ("--dataset", "digits", "--max-steps", 4, "--log-every", 2, "--hidden-sizes", 16)
    return runner.run("mnist_mlp", *flags, environment=variables)


def check_offline_run(run: Finished, folders: int) -> None:
    """Check that W&B's offline file has all rows, and that W&B itself printed nothing."""
    assert len(wandb_runs(run)) == folders
    (folder,) = (folder for folder in wandb_runs(run) if folder.name.startswith("offline-run-"))
    assert folder.name.endswith(run.config["wandb_run_id"])
    rows = history(folder)
    assert {row["progress/global_step"] for row in run.metrics} <= rows.keys()
    assert run.errors == ""
    assert SECRET not in run.output


def test_lines_of_the_terminal_are_kept(learned_mlp: Finished) -> None:
    """`output.log` and W&B have the lines of the terminal."""
    (folder,) = wandb_runs(learned_mlp)
    kept = (learned_mlp.directory / "output.log").read_text()
    assert "recipe  mnist_mlp" in kept
    assert "step 20/" in kept
    assert kept in learned_mlp.output
    written = map(json.loads, inspect(folder).splitlines())
    lines = [
        record["output_logger"]["line"] for record in written if record["type"] == "output_logger"
    ]
    assert "".join(lines) == kept


def test_two_processes_log_once(unreachable: Finished) -> None:
    """Two processes make one W&B run, one row for each step, and one block on the terminal."""
    (folder,) = wandb_runs(unreachable)
    assert folder.name.startswith("offline-run-")
    assert unreachable.output.count("recipe  mnist_mlp") == 1
    assert unreachable.output.count("step 2/6") == 1
    assert unreachable.output.count("2 processes") == 2  # of the device and of the batch
    steps = [line["progress/global_step"] for line in unreachable.metrics]
    assert len(steps) == len(set(steps))


def test_key_is_written_nowhere(unreachable: Finished) -> None:
    """W&B's key is in no file of the run or of W&B, and not on the terminal."""
    launches = unreachable.directory.parents[1]
    run = unreachable.directory.parent
    caches = [path for path in launches.iterdir() if path.name.startswith("wandb-")]
    files = {path for folder in (run, *caches) for path in folder.rglob("*") if path.is_file()}
    assert any(path.suffix == ".wandb" for path in files)
    assert {unreachable.directory, unreachable.wandb_folder} <= {*run.iterdir()}
    for path in files:
        assert SECRET.encode() not in read_if_there(path), path
    assert SECRET not in unreachable.output + unreachable.errors
    (folder,) = wandb_runs(unreachable)
    # The reader joins values that cross the border of two blocks in the file.
    assert SECRET not in inspect(folder)


def test_project_name_and_tags_reach_wandb(unreachable: Finished) -> None:
    """The W&B run has the values of `--project`, `--run-name` and `--tags`."""
    shown = records(unreachable)["run"]
    assert shown["project"] == "some-project"
    assert shown["display_name"] == "some-run"
    assert {"first", "second"} <= {*shown["tags"]}


@pytest.fixture(scope="session")
def presented(runner: Runner, odd_images: Path) -> Finished:
    """A run with a group, notes, an uploaded model, and tags from a flag and a variable."""
    return runner.shared(
        *("mnist_mlp", "--dataset", odd_images, "--batch-size", 64, "--max-steps", 6),
        *("--log-every", 1),
        *("--eval-every", 2, "--learning-rate", 1e-5, "--group", "seeds", "--notes", "why it is"),
        *("--tags", "mine", "--log-model"),
        launcher="fork",
        environment={"WANDB_TAGS": "theirs,mine", "WANDB_NAME": "a-name"},
    )


def test_run_presents_itself(presented: Finished, unreachable: Finished) -> None:
    """W&B's file has the run's group, type, notes, name and tags, also from `WANDB_*` variables."""
    shown = records(presented)["run"]
    assert shown["run_group"] == "seeds"
    assert shown["job_type"] == "train"
    assert shown["notes"] == "why it is"
    assert shown["display_name"] == "a-name"
    precision = presented.config["environment"]["mixed_precision"].replace("no", "fp32")
    data = presented.config["data"]["name"]
    assert shown["tags"] == ["mnist_mlp", data, precision, "cpu", "mine", "theirs"]
    assert "run_group" not in records(unreachable)["run"]


def test_metrics_have_an_axis_and_stand_first(presented: Finished) -> None:
    """W&B plots metrics over updates, and shows loss and objective first, named by their split."""
    recorded = records(presented)
    metrics = recorded["metric"]
    assert metrics["*"]["step_metric"] == "progress/global_step"
    for name in ("test/count", "progress/*", "time/*"):
        assert metrics[name]["options"]["hidden"]
    # Metrics without a section stand before all others.
    names = {"loss_train": "train/loss", "loss_val": "val/loss", "accuracy_val": "val/accuracy"}
    for short, name in names.items():
        values = [row[short] for row in recorded["history"] if short in row]
        assert values == [row[name] for row in recorded["history"] if name in row]
        assert values


def test_summary_has_the_final_and_the_best_values(presented: Finished) -> None:
    """W&B's summary has the values of `summary.json` and no second name for the best value."""
    summary = records(presented)["summary"]
    for name, value in presented.summary.items():
        assert summary[name] == pytest.approx(value), name
    assert summary["val/best_accuracy"] == max(presented.series("val/accuracy").values())
    assert not [name for name in summary if name.endswith((".max", ".min"))]


def test_final_evaluation_has_panels(presented: Finished) -> None:
    """W&B shows a confusion matrix of all samples, and wrong predictions with their images."""
    recorded = records(presented)
    last = recorded["summary"]
    for name in ("test/confusion_table", "test/classes", "test/mistakes", "memory/plan"):
        assert last[name]["_type"] == "table-file"
    # In the history, the tables' numbers of rows and columns would become curves.
    assert not any(
        name.endswith((".ncols", ".nrows")) for row in recorded["history"] for name in row
    )
    (folder,) = wandb_runs(presented)
    table = json.loads((folder / "files" / last["test/confusion_table"]["path"]).read_text())
    assert table["columns"] == ["Actual", "Predicted", "nPredictions"]
    assert sum(row[2] for row in table["data"]) == presented.summary["test/count"]
    right = sum(row[2] for row in table["data"] if row[0] == row[1])
    count = presented.summary["test/count"]
    accuracy = presented.summary["test/accuracy"]
    assert right / count == pytest.approx(accuracy)
    wrong = json.loads((folder / "files" / last["test/mistakes"]["path"]).read_text())
    assert wrong["columns"] == ["sample", "label", "prediction", "probability"]
    assert len(wrong["data"]) == min(32, count - right)
    assert all(row[1] != row[2] for row in wrong["data"])
    probabilities = [row[3] for row in wrong["data"]]
    assert probabilities == sorted(probabilities, reverse=True)  # the most confident ones first
    images = last["test/mistake_images"]
    assert len(images["filenames"]) == len(wrong["data"])
    assert all((folder / "files" / name).is_file() for name in images["filenames"])
    (_, label, prediction, probability), *_ = wrong["data"]
    assert images["captions"][0] == f"{label}, taken for {prediction} ({probability:.0%})"


def test_offline_run_can_be_moved_whole(presented: Finished) -> None:
    """W&B's file names only files in the run's own folders, and by relative paths."""
    (folder,) = wandb_runs(presented)
    text = inspect(folder)
    assert "artifacts/staging" not in text
    assert "run_table" not in records(presented)["artifact"]
    for name in re.findall(r'"media/[^"]+"', text):
        assert (folder / "files" / name.strip('"')).is_file()


def test_memory_plan_is_kept(presented: Finished) -> None:
    """`config.json`, W&B and the terminal have the memory plan before training.

    After training, `memory.json` has it beside the measured values.
    """
    plan = presented.config["memory_plan"]
    assert nested_facts(records(presented)["config"])["memory_plan"] == pytest.approx(plan)
    parameters = presented.config["architecture"]["parameters"]
    assert plan["weights_mib"] == pytest.approx(4 * parameters / 2**20, rel=0.1)
    memory = presented.read("memory.json")
    for part in ("weights", "gradients", "optimizer_state"):
        assert memory[part]["planned_mib"] == pytest.approx(memory[part]["measured_mib"], rel=0.1)
    assert memory["activations"]["measured_mib"] > 0
    lines = presented.output.splitlines()
    assert sum(line.startswith("memory  weights") for line in lines) == 1
    assert sum(line.startswith("memory  activations") for line in lines) == 1


def test_model_is_kept_on_request(presented: Finished, learned_mlp: Finished) -> None:
    """`--log-model` uploads the files of `model/` as an artifact; without it there is none."""
    (artifact,) = records(presented)["artifact"]["model"]
    kept = {entry["path"] for entry in artifact["manifest"]["contents"]}
    assert kept == {path.name for path in (presented.directory / "model").iterdir()}
    assert "model" not in records(learned_mlp)["artifact"]


def test_evaluation_is_a_job_of_its_own(runner: Runner, presented: Finished) -> None:
    """`--evaluate-only` makes a W&B run of another job type, with panels of its own."""
    run = runner.run(
        *("mnist_mlp", "--evaluate-only", "--init-from", presented.directory),
        launcher="fork",
    )
    recorded = records(run)
    assert recorded["run"]["job_type"] == "evaluate"
    assert recorded["summary"]["test/confusion_table"]["_type"] == "table-file"
    assert not (run.directory / "memory.json").exists()


@pytest.mark.slow
def test_wrong_predictions_of_text_show_the_text(learned_bert: Finished) -> None:
    """W&B's table of wrong predictions shows words and not tokens."""
    (folder,) = wandb_runs(learned_bert)
    last = records(learned_bert)["summary"]
    wrong = json.loads((folder / "files" / last["test/mistakes"]["path"]).read_text())
    assert wrong["columns"] == ["sample", "content", "label", "prediction", "probability"]
    # Words with spaces between, not tokens: some docstrings are one long word.
    assert sum(len(row[1].split()) > 2 for row in wrong["data"]) > len(wrong["data"]) / 2


def test_command_line_is_not_sent_to_wandb(learned_mlp: Finished) -> None:
    """W&B gets neither the process's metadata, in which flags may hold a token, nor code."""
    (folder,) = wandb_runs(learned_mlp)
    names = {path.name for path in folder.rglob("*")}
    assert "wandb-metadata.json" not in names
    assert not any(name.endswith((".py", ".patch")) for name in names)


@pytest.mark.slow
def test_run_files_lie_in_the_runs_directory(runner: Runner, tmp_path: Path) -> None:
    """W&B's files lie in the run's directory, which can be moved and read elsewhere."""
    flags = ("--dataset", "digits", "--max-steps", 4, "--log-every", 2, "--hidden-sizes", 16)
    run = runner.run("mnist_mlp", *flags, environment={"WANDB_DIR": None})
    assert not (run.directory.parent / "wandb").exists()
    (folder,) = (run.directory / "wandb").glob("offline-run-*")
    printed = re.sub(r"[\s│]+", " ", run.output)
    assert f"wandb sync run/wandb/{folder.name}" in printed
    moved = run.directory.rename(tmp_path / "moved")
    assert [*history(moved / "wandb" / "latest-run")] == [2, 4]


def test_no_tracker_makes_no_wandb_folder(whole_mlp: Finished, distributed_mlp: Finished) -> None:
    """`--tracker none` leaves only the run's own files."""
    for run in (whole_mlp, distributed_mlp):
        assert not run.wandb_folder.exists()
        names = {path.name for path in run.directory.iterdir()} - {".lock"}
        files = {"config.json", "metrics.jsonl", "summary.json", "status.json", "memory.json"}
        files |= {"output.log", "recipe.py"}
        assert names == files | {"model", "checkpoints", "provenance"}
        assert not (run.directory.parent / "wandb").exists()
