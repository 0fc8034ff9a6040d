"""Keys and tokens of the environment or the command line are neither written nor shown."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import HUB_TOKEN
from tests.launch import Finished, Runner
from tests.runs.test_tracking import inspect, wandb_runs

KEY = "feedface" * 5  # of the length that W&B expects of a key
URL_TOKEN = "hf_TokenOfTheAddress"
URL = f"https://user:{URL_TOKEN}@huggingface.co/datasets/x"
ENVIRONMENT = {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}


def assert_nowhere(run: Finished, *secrets: str) -> list[Path]:
    """Check that no secret is on the terminal or in a file of a launch; return the files."""
    files = [path for path in run.directory.parent.rglob("*") if path.is_file()]
    for secret in secrets:
        assert secret not in run.output + run.errors
        for path in files:
            assert secret not in str(path)
            assert secret.encode() not in path.read_bytes(), path
    return files


def test_token_of_the_environment_is_in_no_file_of_a_run(learned_mlp: Finished) -> None:
    """The Hub token is in no file of a run that trains, saves, and logs to W&B.

    `test_tracking` has a test of W&B's key.
    """
    names = {path.name for path in assert_nowhere(learned_mlp, HUB_TOKEN)}
    assert {"config.json", "metrics.jsonl", "manifest.json", "summary.json"} <= names
    (folder,) = wandb_runs(learned_mlp)
    assert any(path.suffix == ".wandb" for path in folder.iterdir())
    # The reader joins values that cross the border of two blocks in the file.
    assert HUB_TOKEN not in inspect(folder)


def test_token_in_an_address_is_refused_and_not_repeated(runner: Runner) -> None:
    """A token in `--dataset` is refused, and neither the message nor any file contains it."""
    run = runner.run("mnist_mlp", "--dataset", URL, environment=ENVIRONMENT, succeeds=False)
    assert run.returncode == 1
    assert (
        "--dataset seems to contain an access token, or an address with a user name or password"
        in run.errors
    )
    assert "Traceback" not in run.errors
    assert_nowhere(run, KEY, URL_TOKEN)
