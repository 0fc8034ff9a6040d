"""Run the real scripts in processes of their own, as a user does, and read what they leave."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import psutil
from filelock import FileLock

from tests.forking_python import READ_LATE, has_same_imports

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPES = ("mnist_mlp", "resnet", "bert", "cifar10_fast")
CONFIGS = REPOSITORY / "accelerate_configs"
INTERPRETER = sys.executable  # also while a test has another command in its place
# Nothing listens there: a connection is refused at once.
UNREACHABLE = "http://127.0.0.1:9"

# "python" and "two" fork a process that has the libraries: they are as "fresh" and "multi_cpu" in
# all but the seconds of the imports (see `template.py`). The others really are what they say:
# plain Python, `accelerate launch` bare, with `cpu.yaml` and with `multi_cpu.yaml`, and torchrun.
# "shards" and "four shards" are asked for FSDP2, as by `fsdp2_bf16.yaml`.
Launcher = Literal[
    "python",
    "two",
    "four",
    "shards",
    "four shards",
    "fresh",
    "accelerate",
    "cpu",
    "multi_cpu",
    "torchrun",
]
ONE_PROCESS = ("python", "fresh", "accelerate", "cpu")
FORKED = {"python": 1, "two": 2, "four": 4, "shards": 2, "four shards": 4}
SHARDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}

# What a developer's shell may hold, and a user's fresh machine does not.
FOREIGN = (
    *("WANDB_", "HF_", "HUGGING", "TRANSFORMERS_", "ACCELERATE_", "OMP_", "MKL_", "GOMP_"),
    *("FORCE_COLOR", "TORCHELASTIC", "PYTHONPATH", "PYTHONWARNINGS", "TTY_", "NETRC"),
    "PYTHONDONTWRITEBYTECODE",  # with it each process compiles all that it imports
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_"),
)


def without_accelerator() -> dict[str, str]:
    """Return the variables that hide accelerators: these tests are about CPUs.

    Apple's GPU can't be hidden, so recipes are asked to take the CPU there.
    """
    asks_for_cpu = {"ACCELERATE_USE_CPU": "true"} if sys.platform == "darwin" else {}
    return {"CUDA_VISIBLE_DEVICES": "", **asks_for_cpu}


def clean_environment(folder: Path) -> dict[str, str]:
    """Return an environment for a launch: nobody's settings or keys, caches under `folder`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return (
        kept
        | without_accelerator()
        | {
            "XDG_CACHE_HOME": str(folder / "cache"),
            "HF_HOME": str(folder / "huggingface"),
            "HF_HUB_OFFLINE": "1",
            "WANDB_CONFIG_DIR": str(folder / "wandb-config"),
            "WANDB_CACHE_DIR": str(folder / "wandb-cache"),
            "WANDB_DATA_DIR": str(folder / "wandb-data"),
            "NETRC": str(folder / "netrc"),  # of a user without keys: there is no such file
            "COLUMNS": "200",  # messages in boxes stay on one line
            # Threads that spin while others want their core make a step many times slower.
            "OMP_WAIT_POLICY": "PASSIVE",
        }
    )


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

    def insist_on_success(self) -> None:
        """Raise an `AssertionError` unless the process and `status.json` say that all was well."""
        assert self.returncode == 0, self.explain()
        if str(self.directory) in self.command:
            assert self.status["status"] == "finished", self.explain()

    def write_to(self, path: Path) -> None:
        """Keep what a launch was, for other processes."""
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps(dataclasses.asdict(self), default=str))
        temporary.rename(path)

    @classmethod
    def read_from(cls, path: Path) -> Finished:
        """Return what `write_to` kept."""
        values = json.loads(path.read_text())
        folders = {name: Path(values[name]) for name in ("directory", "wandb_folder")}
        return cls(**{**values, **folders})

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


class Forked:
    """A fork of the template; it has the methods of `subprocess.Popen` that tests use."""

    def __init__(self, words: list[str], answers: int) -> None:
        """Read the process id from the file descriptor on which the template answers."""
        self.args = words
        self.answers = os.fdopen(answers)
        self.pid = int(self.answers.readline())
        self.returncode: int | None = None

    def poll(self, timeout: float | None = 0) -> int | None:
        """Return the status if the process has ended; below 0 it is the signal that ended it."""
        if self.returncode is None and select.select([self.answers], [], [], timeout)[0]:
            self.returncode = int(self.answers.readline())
            self.answers.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raise `subprocess.TimeoutExpired` if it does not come in time."""
        status = self.poll(timeout)
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process at once."""
        self.send_signal(signal.SIGKILL)


class Template:
    """A connection to the process that has the libraries, which pytest's workers share."""

    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        """Connect to the socket at `path`, or start the process that listens there.

        The libraries may read these variables while they are imported.
        """
        self.path = path
        socket_type = (socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control = socket.socket(*socket_type)
        with FileLock(f"{path}.lock"):
            if not path.exists():
                log_path = path.with_suffix(".log")
                with socket.socket(*socket_type) as listener, log_path.open("a") as log:
                    listener.bind(str(path))
                    listener.listen()
                    number, script = listener.fileno(), REPOSITORY / "tests" / "template.py"
                    subprocess.Popen(
                        [INTERPRETER, str(script), str(number), str(path)],
                        env=dict(environment),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        pass_fds=[number],
                        start_new_session=True,
                        preexec_fn=staying_on_one_core(),
                    )
            self.control.connect(str(path))

    def fork(
        self,
        words: list[str],
        environment: Mapping[str, str],
        folder: Path,
        output: IO[str],
        errors: IO[str],
        *,
        processes: int = 1,
        cores: set[int],
    ) -> Forked:
        """Run a script and its flags in a fork, or in several with a launcher above them."""
        reader, writer = os.pipe()
        request = {
            "words": words,
            "environment": dict(environment),
            "folder": str(folder),
            "cores": sorted(cores),
            "processes": processes,
            "port": free_port() if processes > 1 else 0,
        }
        with open(os.devnull) as nothing:
            files = [nothing.fileno(), output.fileno(), errors.fileno(), writer]
            socket.send_fds(self.control, [json.dumps(request).encode()], files)
        os.close(writer)
        return Forked(words, reader)

    def install_python(self, folder: Path, environment: Mapping[str, str]) -> Path:
        """Make commands in a folder that run Python in forks; return the path of `python`.

        See `tests/forking_python.py`.
        """
        folder.mkdir(exist_ok=True)
        source = (REPOSITORY / "tests" / "forking_python.py").read_text()
        for name in ("python", "accelerate", "torchrun"):
            if (folder / name).exists():
                continue
            # Without `site` and the environment, the interpreter starts in 10 ms.
            (folder / name).write_text(f"#!{INTERPRETER} -IS\n{source}")
            (folder / name).chmod(0o755)
        settings = {
            "socket": str(self.path),
            "environment": dict(environment),
            "interpreter": INTERPRETER,
        }
        # In one step, as a command that was started earlier may be reading them.
        (folder / "settings.part").write_text(json.dumps(settings))
        (folder / "settings.part").rename(folder / "settings.json")
        return folder / "python"

    def close(self) -> None:
        """End what still runs of this connection's forks, and wait for that."""
        self.control.shutdown(socket.SHUT_WR)
        self.control.settimeout(60)
        self.control.recv(1)
        self.control.close()


class Runner:
    """Launches recipes in a clean environment, with caches that all launches share.

    Also those of pytest's other workers: what one has run with `shared`, the others read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.numbers = itertools.count(1)  # of launches, also from several threads
        self.worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
        self._template: Template | None = None

    @property
    def template(self) -> Template:
        """The process whose forks run scripts."""
        if self._template is None:
            self._template = Template(self.folder / "template", clean_environment(self.folder))
        return self._template

    @property
    def python(self) -> Path:
        """A `python` command that runs scripts and modules as forks of the template.

        For what starts processes itself: put it in the place of `sys.executable`, or its folder
        in front of PATH. `accelerate` and `torchrun` lie beside it.
        """
        if not hasattr(os, "pidfd_open"):
            return Path(sys.executable)
        # Written anew each time: libraries that tests import add variables to the environment.
        folder = self.folder / f"bin-{self.worker}"
        return self.template.install_python(folder, clean_environment(self.folder))

    def close(self) -> None:
        """End what was started."""
        if self._template is not None:
            self._template.close()

    def start(
        self,
        words: list[str],
        launcher: Launcher,
        environment: Mapping[str, str],
        folder: Path,
        output: IO[str],
        errors: IO[str],
        *,
        all_cores: bool = False,
    ) -> Forked | subprocess.Popen[str]:
        """Start a script with its flags, standard input closed, in a session of its own."""
        one_core = launcher in ONE_PROCESS and not all_cores
        if launcher in FORKED and can_fork(environment, clean_environment(self.folder)):
            return self.template.fork(
                *(words, {**environment, **(SHARDED if "shards" in launcher else {})}),
                *(folder, output, errors),
                processes=FORKED[launcher],
                cores=own_core() if one_core else usable_cores(),
            )
        return subprocess.Popen(
            [*launch_command(launcher), *words],
            env=dict(environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            text=True,
            start_new_session=True,
            preexec_fn=staying_on_one_core() if one_core else None,
        )

    def shared(self, recipe: str | Path, *flags: object, **arguments: Any) -> Finished:
        """Return a run of this command that any of pytest's workers has made, or make it now.

        The arguments are those of `run`. Nobody may change what such a run has left.
        """
        asked = [str(recipe), [str(flag) for flag in flags], arguments]
        key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
        path = self.folder / "shared" / f"{key}.json"
        path.parent.mkdir(exist_ok=True)
        with FileLock(f"{path}.lock"):
            if path.exists():
                finished = Finished.read_from(path)
            else:
                again = {**arguments, "succeeds": False}
                finished = self.run(recipe, *flags, **again)
                finished.write_to(path)
        if arguments.get("succeeds", True):
            finished.insist_on_success()
        return finished

    def run(
        self,
        recipe: str | Path,
        *flags: object,
        launcher: Launcher = "python",
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
            environment: variables to set, or to remove where the value is None.
            output_directory: whether to name one for the run.
            succeeds: whether to insist on status 0 and on `status.json` saying so.
            all_cores: whether a single process may use every core, as a user's does.
        """
        script = recipe if isinstance(recipe, Path) else REPOSITORY / "recipes" / f"{recipe}.py"
        folder = self.folder / f"{self.worker}-{next(self.numbers):03d}-{script.stem}"
        folder.mkdir()
        directory, wandb_folder = folder / "run", folder / "wandb-parent"
        words = [str(script), *map(str, flags)]
        if output_directory:
            words += ["--output-dir", str(directory)]
        variables: dict[str, str | None] = {
            **clean_environment(self.folder),
            "WANDB_DIR": str(wandb_folder),
            **(environment or {}),
        }
        kept = {name: value for name, value in variables.items() if value is not None}
        with (folder / "output").open("w+") as output, (folder / "errors").open("w+") as errors:
            began = time.monotonic()
            process = self.start(
                *(words, launcher, kept, working_directory or folder, output, errors),
                all_cores=all_cores,
            )
            status = wait_or_kill(process, timeout)
            note(self.folder, launcher, words, time.monotonic() - began)
            # Files may end in the middle of a character where a process was killed.
            said = [
                (folder / name).read_text(errors="replace").replace("\r\n", "\n")
                for name in ("output", "errors")
            ]
        (folder / "output").unlink()
        (folder / "errors").unlink()
        assert status is not None, f"{words}\ntook longer than {timeout} s\n" + "\n".join(
            text[-4000:] for text in said
        )
        command = [*launch_command(launcher), *words]
        finished = Finished(command, status, said[0], said[1], directory, wandb_folder)
        if succeeds:
            finished.insist_on_success()
        return finished


def can_fork(environment: Mapping[str, str], clean: Mapping[str, str]) -> bool:
    """Whether a fork of the template, which has `clean`, sees what a fresh interpreter would.

    The template's libraries have read their variables while they were imported.
    """
    same_imports = has_same_imports(dict(environment), dict(clean), READ_LATE)
    return hasattr(os, "pidfd_open") and same_imports


def wait_or_kill(process: Forked | subprocess.Popen[str], timeout: float) -> int | None:
    """Wait for an end; where it does not come in time, end the whole session and return None."""
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        end_session(process.pid)
        process.wait(30)
        return None


def end_session(process: int) -> None:
    """Kill a process that began a session, and all in it; without sessions, what it started."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process)
        for each in (*parent.children(recursive=True), parent):
            each.kill()


def note(folder: Path, launcher: str, words: list[str], seconds: float) -> None:
    """Write down what was launched by which test and how long it took."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0]
    with (folder / "launches.jsonl").open("a") as file:
        file.write(json.dumps([test, launcher, words, round(seconds, 2)]) + "\n")


def launch_command(launcher: Launcher, interpreter: Path = Path(sys.executable)) -> list[str]:
    """Return the words before a script's path."""
    python = str(interpreter)
    accelerate = [python, "-m", "accelerate.commands.accelerate_cli", "launch"]
    if launcher in ("python", "fresh"):
        return [python]
    if launcher == "accelerate":
        # It sets the variable of `without_accelerator` anew.
        return [*accelerate, "--cpu"] if sys.platform == "darwin" else accelerate
    if launcher == "cpu":
        return [*accelerate, "--config_file", str(CONFIGS / "cpu.yaml")]
    port = str(free_port())
    if launcher in ("two", "multi_cpu"):
        configuration = ["--config_file", str(CONFIGS / "multi_cpu.yaml")]
        return [*accelerate, *configuration, "--main_process_port", port]
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    return [python, *words]


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
        preexec_fn=staying_on_one_core() if one_core else None,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end_session(process.pid)
        output, errors = process.communicate()
        raise AssertionError(
            f"{' '.join(command)}\ntook longer than {timeout} s\n{output[-4000:]}\n{errors[-4000:]}"
        ) from None
    return process.returncode, output, errors


def usable_cores() -> set[int]:
    """Return the cores that these tests may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def own_core() -> set[int]:
    """Return the core of this worker of pytest, or one that is idle now.

    Where other programs use the cores too, threads that wait for each other after each operation
    are many times slower than one.
    """
    cores = sorted(usable_cores())
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    busy = psutil.cpu_percent(0.05, percpu=True)
    idle = [core for core in cores if busy[core] < 50]
    mine = cores[worker % len(cores)]
    return {mine if mine in idle or not idle else idle[0]}


def staying_on_one_core() -> Callable[[], None] | None:
    """Return what lets a process, once it is forked, and its children run on one core alone.

    None where the system lets no process choose its cores, or knows no forks.

    The core is chosen by the parent: between fork and exec little may be done.
    """
    if not hasattr(os, "sched_setaffinity"):
        return None
    core = own_core()
    return lambda: os.sched_setaffinity(0, core)


def plain(text: str) -> str:
    """Return `text` without the frames of boxes, and with single spaces."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", text)
