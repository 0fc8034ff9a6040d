"""Run the real scripts in processes of their own, as a user does, and read what they leave."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPES = ("mnist_mlp", "resnet", "bert")
CONFIGS = REPOSITORY / "accelerate_configs"
# Nothing listens there: a connection is refused at once.
UNREACHABLE = "http://127.0.0.1:9"

Launcher = Literal["python", "accelerate", "cpu", "two", "torchrun"]
ONE_PROCESS = ("python", "accelerate", "cpu")

# What a developer's shell may hold, and a user's fresh machine does not.
FOREIGN = (
    *("WANDB_", "HF_", "HUGGING", "TRANSFORMERS_", "ACCELERATE_", "OMP_", "MKL_", "GOMP_"),
    *("FORCE_COLOR", "TORCHELASTIC", "PYTHONPATH", "PYTHONWARNINGS", "TTY_", "NETRC"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_"),
)


def clean_environment(folder: Path) -> dict[str, str]:
    """Return an environment for a launch: nobody's settings or keys, caches under `folder`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return kept | {
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HF_HOME": str(folder / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "WANDB_CONFIG_DIR": str(folder / "wandb-config"),
        "WANDB_CACHE_DIR": str(folder / "wandb-cache"),
        "WANDB_DATA_DIR": str(folder / "wandb-data"),
        "NETRC": str(folder / "netrc"),  # of a user without keys: there is no such file
        "CUDA_VISIBLE_DEVICES": "",  # these tests are about CPUs
        "COLUMNS": "200",  # messages in boxes stay on one line
        # Threads that spin while others want their core make a step many times slower.
        "OMP_WAIT_POLICY": "PASSIVE",
    }


@dataclass(frozen=True)
class Finished:
    """A process that ended: what it said, and the directory of its run."""

    command: list[str]
    returncode: int
    output: str  # standard output
    errors: str  # standard error
    directory: Path
    wandb_folder: Path

    def read(self, name: str) -> dict[str, Any]:
        """Return a JSON file of the run's directory."""
        return json.loads((self.directory / name).read_text())

    @property
    def config(self) -> dict[str, Any]:
        """The run's `config.json`."""
        return self.read("config.json")

    @property
    def summary(self) -> dict[str, Any]:
        """The run's `summary.json`."""
        return self.read("summary.json")

    @property
    def status(self) -> dict[str, Any]:
        """The run's `status.json`."""
        return self.read("status.json")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of the run's `metrics.jsonl`."""
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def series(self, name: str) -> dict[int, float]:
        """Return one metric by global step, where it was logged."""
        return {line["progress/global_step"]: line[name] for line in self.metrics if name in line}

    def weights(self) -> dict[str, Any]:
        """Return the tensors of the final model."""
        from safetensors.torch import load_file

        return load_file(self.directory / "model" / "model.safetensors")

    def said(self) -> str:
        """Return all that was printed, without what the launcher adds after a failure."""
        launcher = "Traceback (most recent call last)"
        return self.output + self.errors.split(launcher)[0]

    def explain(self) -> str:
        """Return what a person needs to see what went wrong."""
        return (
            f"{' '.join(self.command)}\nended with {self.returncode}\n"
            f"{self.output[-4000:]}\n{self.errors[-6000:]}"
        )


class Runner:
    """Launches recipes in a clean environment, with caches that all launches share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launches = 0

    def run(
        self,
        recipe: str | Path,
        *flags: object,
        launcher: Launcher = "accelerate",
        environment: Mapping[str, str | None] | None = None,
        working_directory: Path | None = None,
        output_directory: bool = True,
        succeeds: bool = True,
        all_cores: bool = False,
        timeout: float = 300,
    ) -> Finished:
        """Launch a recipe and wait for its end.

        Args:
            recipe: its name, or the path of a script.
            launcher: how: by plain Python, by `accelerate launch` bare, with `cpu.yaml` or with
                `multi_cpu.yaml` (two processes), or by `torchrun` with two.
            environment: variables to set, or to remove where the value is None.
            output_directory: whether to name one for the run.
            succeeds: whether to insist on status 0 and on `status.json` saying so.
            all_cores: whether a single process may use every core, as a user's does.
        """
        self.launches += 1
        script = recipe if isinstance(recipe, Path) else REPOSITORY / "recipes" / f"{recipe}.py"
        folder = self.folder / f"{self.launches:03d}-{script.stem}"
        folder.mkdir()
        directory, wandb_folder = folder / "run", folder / "wandb-parent"
        command = [*launch_command(launcher), str(script), *map(str, flags)]
        if output_directory:
            command += ["--output-dir", str(directory)]
        variables: dict[str, str | None] = {
            **clean_environment(self.folder),
            "WANDB_DIR": str(wandb_folder),
            **(environment or {}),
        }
        finished = Finished(
            command,
            *run_command(
                command,
                {name: value for name, value in variables.items() if value is not None},
                working_directory or folder,
                timeout,
                one_core=launcher in ONE_PROCESS and not all_cores,
            ),
            directory,
            wandb_folder,
        )
        if succeeds:
            assert finished.returncode == 0, finished.explain()
            if output_directory:
                assert finished.status["status"] == "finished", finished.explain()
        return finished


def launch_command(launcher: Launcher) -> list[str]:
    """Return the words before a script's path."""
    accelerate = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    if launcher == "python":
        return [sys.executable]
    if launcher == "accelerate":
        return accelerate
    if launcher == "cpu":
        return [*accelerate, "--config_file", str(CONFIGS / "cpu.yaml")]
    port = str(free_port())
    if launcher == "two":
        configuration = ["--config_file", str(CONFIGS / "multi_cpu.yaml")]
        return [*accelerate, *configuration, "--main_process_port", port]
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    return [sys.executable, *words]


def free_port() -> int:
    """Return a port that nothing uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_command(
    command: list[str],
    environment: Mapping[str, str],
    folder: Path,
    timeout: float,
    *,
    one_core: bool,
) -> tuple[int, str, str]:
    """Run a command with standard input closed; return its status, output and errors.

    Its whole process group is ended when it takes too long, since launchers have children.
    """
    process = subprocess.Popen(
        command,
        env=dict(environment),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=stay_on_one_core if one_core else None,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        raise AssertionError(
            f"{' '.join(command)}\ntook longer than {timeout} s\n{output[-4000:]}\n{errors[-4000:]}"
        ) from None
    return process.returncode, output, errors


def stay_on_one_core() -> None:
    """Let this process and its children run on one core: each worker of pytest has its own.

    Where other programs use the cores too, threads that wait for each other after each operation
    are many times slower than one.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        os.sched_setaffinity(0, {cores[worker % len(cores)]})


def plain(text: str) -> str:
    """Return `text` without the frames of boxes, and with single spaces."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", text)
