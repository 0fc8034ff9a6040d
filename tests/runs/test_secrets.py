"""Keys and tokens, in the environment or on the command line, are written and shown nowhere."""

from __future__ import annotations

from pathlib import Path

from tests.launch import UNREACHABLE, Finished, Runner
from tests.runs.test_tracking import inspect, wandb_runs

KEY = "feedface" * 5  # of the length that W&B expects of a key
HUB_TOKEN = "hf_TokenOfTheEnvironment"
URL_TOKEN = "hf_TokenOfTheAddress"
URL = f"https://user:{URL_TOKEN}@huggingface.co/datasets/x"
SECRETS = (KEY, HUB_TOKEN, URL_TOKEN)
ENVIRONMENT = {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline", "HF_TOKEN": HUB_TOKEN}


def assert_nowhere(run: Finished) -> list[Path]:
    """Check the terminal and every byte that a launch has left; return the files."""
    files = [path for path in run.directory.parent.rglob("*") if path.is_file()]
    for secret in SECRETS:
        assert secret not in run.output + run.errors
        for path in files:
            assert secret not in str(path)
            assert secret.encode() not in path.read_bytes(), path
    return files


def test_secrets_of_the_environment_are_in_no_file_of_a_run(runner: Runner) -> None:
    """A run that asks the Hub with its token, trains, saves, and logs to W&B with its key."""
    run = runner.run(
        *("mnist_mlp", "--max-steps", 6, "--checkpoint-every", 2, "--log-every", 2),
        launcher="python",
        environment={**ENVIRONMENT, "HF_HUB_OFFLINE": None, "HF_ENDPOINT": UNREACHABLE},
    )
    assert run.config["data"]["name"] == "digits"
    names = {path.name for path in assert_nowhere(run)}
    assert {"config.json", "metrics.jsonl", "manifest.json", "summary.json"} <= names
    (folder,) = wandb_runs(run)
    assert any(path.suffix == ".wandb" for path in folder.iterdir())
    # As its reader sees it: in the file, a value may go over the border of two blocks.
    for secret in SECRETS:
        assert secret not in inspect(folder)


def test_token_in_an_address_is_refused_and_not_repeated(runner: Runner) -> None:
    """Neither what is shown nor what is left has it."""
    run = runner.run(
        "mnist_mlp", "--dataset", URL, launcher="python", environment=ENVIRONMENT, succeeds=False
    )
    assert run.returncode == 1
    assert "--dataset holds a user's name or token" in run.errors
    assert "Traceback" not in run.errors
    assert_nowhere(run)
