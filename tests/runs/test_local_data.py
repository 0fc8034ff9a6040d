"""Local data sets through the recipes, from the command line to the model's facts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from common.checkpoints.folders import step_folders
from common.data.sources import find_named
from tests.edited_copies import edited
from tests.jobs import Job
from tests.launch import LAUNCHES, REPOSITORY, Finished, Launcher, Runner
from tests.local_data import cache_glue, write_image_folder
from tests.page_blocks import page_block


def test_config_names_a_public_data_set(runner: Runner) -> None:
    """The config of a run on `sst2` from the Hub's cache names the data set and its subset."""
    cache_glue(Path(os.environ["HF_HOME"]))
    flags = ("--dataset", "sst2", "--max-steps", 1, "--batch-size", 8, "--tracker", "none")
    run = runner.run("bert", *flags)
    assert run.config["data"]["name"] == "sst2"
    assert run.summary["val/count"] == 17
    kept = run.config["config"]
    again = find_named(kept["dataset"], kept["dataset_config"])
    assert (again.location, again.configuration) == ("nyu-mll/glue", "sst2")


def test_colour_folder_through_resnet(runner: Runner, tmp_path: Path, thin_resnet: Path) -> None:
    """An image folder trains without a code change, from the command line to the model's facts."""
    folder = write_image_folder(tmp_path / "pets", ["cat", "dog", "emu"], per_class=15)
    run = runner.run(
        *(thin_resnet, "--dataset", folder, "--max-steps", 2, "--batch-size", 8),
        *("--image-size", 12, "--tracker", "none"),
        launcher="fork",
    )
    facts = run.read("model/model.json")
    assert facts["class_names"] == ["cat", "dog", "emu"]
    assert (facts["channels"], facts["image_size"]) == (3, 12)
    assert len(facts["mean"]) == len(facts["std"]) == 3
    assert "held out" in run.output
    assert "resized" in run.output
    assert run.summary["val/count"] == run.config["data"]["sizes"]["validation"]


def test_mistake_in_data_on_two_processes(runner: Runner, tmp_path: Path) -> None:
    """A damaged image ends two processes with one message."""
    folder = write_image_folder(tmp_path / "pets", ["cat", "dog"], per_class=20)
    (folder / "train" / "cat" / "007.png").write_bytes(b"not an image")
    run: Finished = runner.run(
        *("mnist_mlp", "--dataset", folder, "--tracker", "none", "--batch-size", 16),
        launcher="two forks",
        succeeds=False,
        timeout=120,
    )
    assert run.returncode != 0
    assert run.printed().count("error: ") == 1, run.explain()
    assert "007.png" in run.printed()
    assert run.status["status"] == "failed"
    assert "007.png" in run.status["reason"]


@pytest.mark.slow
def test_run_is_not_resumed_with_changed_data(runner: Runner, tmp_path: Path) -> None:
    """A resume is refused if one picture was replaced, and works once it is put back."""
    folder = write_image_folder(tmp_path / "pets", ["cat", "dog"], per_class=20)
    changed = folder / "train" / "dog" / "007.png"
    kept = tmp_path / "kept.png"
    flags = ("--dataset", folder, "--image-size", 8, "--batch-size", 8, "--epochs", 2)
    run = runner.run("mnist_mlp", *flags, "--tracker", "none")
    weights = run.weights()
    shutil.rmtree(step_folders(run.directory / "checkpoints")[-1])
    (run.directory / "status.json").write_text(json.dumps({"status": "running"}))
    shutil.copyfile(changed, kept)
    shutil.copyfile(changed.with_name("008.png"), changed)
    again = ("mnist_mlp", "--resume", run.directory)
    refused = runner.run(*again, output_directory=False, succeeds=False)
    assert refused.returncode == 1
    assert refused.printed().count("error: ") == 1, refused.explain()
    assert "fingerprint" in refused.printed()
    assert "change the data back" in refused.printed()
    assert not json.loads((run.directory / "status.json").read_text())["resumable"]
    shutil.copyfile(kept, changed)
    runner.run(*again, output_directory=False)
    assert all((values == weights[name]).all() for name, values in run.weights().items())


SLOW = """
import runpy, sys, time
from common.data.image_decoding import image_files

decode = image_files.image_to_pixels
image_files.image_to_pixels = lambda *given: (time.sleep(0.3), decode(*given))[1]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "signalled_rank"),
    [
        ("fork", None),
        *(pytest.param("two forks", rank, marks=pytest.mark.slow) for rank in (None, 0, 1)),
    ],
)
def test_request_to_stop_while_data_are_prepared_is_obeyed_at_once(
    runner: Runner, tmp_path: Path, launcher: Launcher, signalled_rank: int | None
) -> None:
    """A stop request ends the run while it still prepares data, whichever rank gets it.

    The next start prepares the data from the beginning and finishes.
    """
    name = f"slow-{LAUNCHES[launcher].ranks}-{signalled_rank}".lower()
    folder = write_image_folder(tmp_path / name, ["cat", "dog"], per_class=250)
    (tmp_path / "slow.py").write_text(SLOW)
    recipe = REPOSITORY / "recipes" / "mnist_mlp.py"
    directory = tmp_path / "run"
    flags = ("--dataset", folder, "--max-steps", 2, "--batch-size", 2, "--tracker", "none")
    flags = (recipe, *flags, "--output-dir", directory, "--resume", "auto")
    job = Job(runner, tmp_path / "slow.py", *flags, directory=directory, launcher=launcher)
    caches = runner.folder / "cache" / "accelerate-recipes"
    job.wait_until(lambda: any(caches.glob(f"{name}-*.unfinished/train_images.npy")))
    receiver = job.process if signalled_rank is None else job.ranks()[signalled_rank]
    receiver.send_signal(signal.SIGTERM)
    job.end(40)  # all images would take minutes
    status = job.read("status.json")
    assert (status["status"], status["resumable"]) == ("preempted", True), job.printed()[-3000:]
    assert "SIGTERM" in status["reason"]
    assert not any(path.is_dir() for path in caches.glob(f"{name}-*"))
    assert "Traceback" not in job.printed()
    for path in folder.rglob("1*.png"):  # fewer images keep the test short
        path.unlink()
    run = runner.run("mnist_mlp", *flags[1:], launcher="fork", output_directory=False)
    assert run.returncode == 0
    assert job.read("status.json")["status"] == "finished"


def test_table_of_numbers_trains_as_the_page_says(runner: Runner, tmp_path: Path) -> None:
    """A copy of the regression with the page's lines reads its default file, or another column."""
    example = REPOSITORY / "examples" / "regression.py"
    load_data = re.search(r"^def load_data\(.*?\n\n\n", example.read_text(), re.M | re.S)
    assert load_data is not None
    flags = re.findall(r"^    \w+: str = .*\n", page_block("make-your-own.md", "houses.csv"), re.M)
    assert len(flags) == 2
    copy = edited(
        example,
        tmp_path,
        ("class Config(TrainingConfig):\n", "class Config(TrainingConfig):\n" + "".join(flags)),
        (load_data[0], page_block("make-your-own.md", "pandas.read_csv") + "\n\n"),
    )
    rows = [f"{number % 7},{number % 3},{number % 7}" for number in range(100)]
    (tmp_path / "houses.csv").write_text("\n".join(["area,rooms,price", *rows]) + "\n")
    words = ("--max-steps", 2, "--batch-size", 8, "--hidden-sizes", 4, "--tracker", "none")
    run = runner.run(copy, *words, working_directory=tmp_path)
    assert run.config["data"]["sizes"] == {"train": 80, "validation": 20}
    other = ("--dataset", "houses.csv", "--target-column", "rooms")
    assert runner.run(copy, *words, *other, working_directory=tmp_path).summary["val/count"] == 20
