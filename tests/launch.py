"""Runs the real scripts in processes of their own, as a user does, and reads their results."""

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import psutil
from filelock import FileLock

from benchmarks.harness.ports import free_port
from tests.forking_python import READ_LATE, has_same_imports

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPES = ("mnist_mlp", "resnet", "bert", "cifar10_fast")
CONFIGS = REPOSITORY / "accelerate_configs"
INTERPRETER = sys.executable  # the real one, also while a test replaces `sys.executable`
# Nothing listens at this address, so a connection is refused at once.
UNREACHABLE = "http://127.0.0.1:9"

# How a script is launched. The first four are forks of a process that has the libraries imported,
# which saves the seconds of the imports (see `template.py`). The others use real launchers: plain
# Python, `accelerate launch` without a file, with `cpu.yaml` and with `multi_cpu.yaml`, and
# torchrun. Their interpreters are forks, too, if the test does not need real ones.
Launcher = Literal[
    "fork",
    "two forks",
    "two shards",
    "four shards",
    "plain python",
    "accelerate",
    "cpu",
    "multi_cpu",
    "torchrun",
]
# The variables by which `accelerate launch` asks a recipe for FSDP2.
SHARDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@dataclass(frozen=True)
class Launch:
    """What a launcher starts."""

    ranks: int = 1
    is_fork: bool = False  # of the template, where forking is possible
    is_sharded: bool = False  # whether the ranks share one model by FSDP2
    # The interpreter's arguments before the script. Those of a fork start processes that behave
    # like it; they are used where forking is not possible.
    words: tuple[str, ...] = ()
    port_flag: str = "--main_process_port"  # by which several ranks get a port to meet at


ACCELERATE = ("-m", "accelerate.commands.accelerate_cli", "launch")
MULTI_CPU = (*ACCELERATE, "--config_file", str(CONFIGS / "multi_cpu.yaml"))
SHARDS = (
    *ACCELERATE,
    "--config_file",
    str(CONFIGS / "fsdp2_bf16.yaml"),
    "--mixed_precision",
    "no",
    "--num_processes",
)
LAUNCHES: dict[Launcher, Launch] = {
    "fork": Launch(is_fork=True),
    "two forks": Launch(2, is_fork=True, words=MULTI_CPU),
    "two shards": Launch(2, is_fork=True, is_sharded=True, words=(*SHARDS, "2")),
    "four shards": Launch(4, is_fork=True, is_sharded=True, words=(*SHARDS, "4")),
    "plain python": Launch(),
    "accelerate": Launch(words=ACCELERATE),
    "cpu": Launch(words=(*ACCELERATE, "--config_file", str(CONFIGS / "cpu.yaml"))),
    "multi_cpu": Launch(2, words=MULTI_CPU),
    "torchrun": Launch(
        2,
        words=("-m", "torch.distributed.run", "--nproc-per-node", "2"),
        port_flag="--master-port",
    ),
}

# Beginnings of variables that a developer's shell may hold, and a user's fresh machine does not.
FOREIGN = (
    "WANDB_",
    "HF_",
    "HUGGING",
    "TRANSFORMERS_",
    "ACCELERATE_",
    "OMP_",
    "MKL_",
    "GOMP_",
    "FORCE_COLOR",
    "TORCHELASTIC",
    "PYTHONPATH",
    "PYTHONWARNINGS",
    "TTY_",
    "NETRC",
    "PYTHONDONTWRITEBYTECODE",  # with it each process compiles all that it imports
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_",
)


def without_accelerator() -> dict[str, str]:
    """Return the variables that hide accelerators, because these tests are for CPUs.

    Apple's GPU can't be hidden, so there a variable tells recipes to use the CPU.
    """
    asks_for_cpu = {"ACCELERATE_USE_CPU": "true"} if sys.platform == "darwin" else {}
    return {"CUDA_VISIBLE_DEVICES": "", **asks_for_cpu}


def clean_environment(folder: Path) -> dict[str, str]:
    """Return the environment of a launch: no personal settings or keys, caches under `folder`."""
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
            "NETRC": str(folder / "netrc"),  # a file that does not exist: a user without keys
            "COLUMNS": "200",  # messages in boxes stay on one line
            # Threads that spin while other programs need their core make an update far slower.
            "OMP_WAIT_POLICY": "PASSIVE",
        }
    )


@dataclass(frozen=True)
class Finished:
    """A launch that has ended: its status, its output, and the directory of its run."""

    command: list[str]  # one that does the same; the launch itself may have been a fork
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
        """Return the values of one metric by global step."""
        return {line["progress/global_step"]: line[name] for line in self.metrics if name in line}

    def weights(self) -> dict[str, Any]:
        """Return the tensors of the final model."""
        from safetensors.torch import load_file

        return load_file(self.directory / "model" / "model.safetensors")

    def check_success(self) -> None:
        """Raise an `AssertionError` unless the process and its run succeeded."""
        assert self.returncode == 0, self.explain()
        if str(self.directory) in self.command:
            assert self.status["status"] == "finished", self.explain()

    def write_to(self, path: Path) -> None:
        """Write this to a file, for other processes."""
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps(dataclasses.asdict(self), default=str))
        temporary.rename(path)

    @classmethod
    def read_from(cls, path: Path) -> Finished:
        """Read what `write_to` wrote."""
        values = json.loads(path.read_text())
        folders = {name: Path(values[name]) for name in ("directory", "wandb_folder")}
        return cls(**{**values, **folders})

    def printed(self) -> str:
        """Return the output and errors, without the traceback that a launcher adds."""
        launcher = "Traceback (most recent call last)"
        return self.output + self.errors.split(launcher)[0]

    def explain(self) -> str:
        """Return the command, its status and its last output, for the message of a failed test."""
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
        """Return the status if the process has ended; it is negative after a signal."""
        if self.returncode is None and select.select([self.answers], [], [], timeout)[0]:
            self.returncode = int(self.answers.readline())
            self.answers.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended; raise `subprocess.TimeoutExpired` after `timeout`."""
        status = self.poll(timeout)
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process at once."""
        self.send_signal(signal.SIGKILL)


class Template:
    """A connection to the template process, which has the libraries.

    Pytest's workers share the process.
    """

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
                    number = listener.fileno()
                    script = REPOSITORY / "tests" / "template.py"
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
        """Run a script with its flags in a fork, or as several ranks under a launcher."""
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
        # Replaced in one step, because a command that is running may be reading the file.
        (folder / "settings.part").write_text(json.dumps(settings))
        (folder / "settings.part").rename(folder / "settings.json")
        return folder / "python"

    def close(self) -> None:
        """End the forks of this connection that still run, and wait for them."""
        self.control.shutdown(socket.SHUT_WR)
        self.control.settimeout(60)
        self.control.recv(1)
        self.control.close()


class Runner:
    """Launches recipes in a clean environment, with caches that all launches share.

    Pytest's workers use the same caches. If one of them has made a run with `shared`, the others
    read its results.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.numbers = itertools.count(1)  # numbers the launches, also from several threads
        self.pytest_worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
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

        For code that starts processes itself: put it in the place of `sys.executable`, or its
        folder first in PATH. `accelerate` and `torchrun` are in the same folder.
        """
        if not hasattr(os, "pidfd_open"):
            return Path(sys.executable)
        # Written again each time: libraries that tests import add variables to the environment.
        folder = self.folder / f"bin-{self.pytest_worker}"
        return self.template.install_python(folder, clean_environment(self.folder))

    def close(self) -> None:
        """End the processes that still run."""
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
        forking: bool = False,
    ) -> Forked | subprocess.Popen[str]:
        """Start a script with its flags, standard input closed, in a session of its own.

        Args:
            all_cores: whether a single process may use every core.
            forking: whether a launcher and its ranks may be forks. Their parents are not those of
                real ones, so `Job.ranks` can't find them.
        """
        launch = LAUNCHES[launcher]
        one_core = launch.ranks == 1 and not all_cores
        if launch.is_fork and can_fork(environment, clean_environment(self.folder)):
            return self.template.fork(
                words,
                {**environment, **(SHARDED if launch.is_sharded else {})},
                folder,
                output,
                errors,
                processes=launch.ranks,
                cores=own_core() if one_core else usable_cores(),
            )
        may_fork = forking and launcher != "plain python"
        interpreter = self.python if may_fork else Path(sys.executable)
        return subprocess.Popen(
            [*launch_command(launcher, interpreter), *words],
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

        The arguments are those of `run`. No test may change the files of such a run.
        """
        command = [str(recipe), [str(flag) for flag in flags], arguments]
        key = hashlib.sha256(json.dumps(command, sort_keys=True).encode()).hexdigest()[:16]
        path = self.folder / "shared" / f"{key}.json"
        path.parent.mkdir(exist_ok=True)
        with FileLock(f"{path}.lock"):
            if path.exists():
                finished = Finished.read_from(path)
            else:
                finished = self.run(recipe, *flags, **{**arguments, "succeeds": False})
                finished.write_to(path)
        if arguments.get("succeeds", True):
            finished.check_success()
        return finished

    def run(
        self,
        recipe: str | Path,
        *flags: object,
        launcher: Launcher = "fork",
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
            output_directory: whether to pass `--output-dir`.
            succeeds: whether to fail unless the status is 0 and `status.json` says "finished".
            all_cores: whether a single process may use every core, as for a user.
            timeout: seconds after which the launch is killed and fails.
        """
        script = recipe if isinstance(recipe, Path) else REPOSITORY / "recipes" / f"{recipe}.py"
        number = next(self.numbers)
        folder = self.folder / f"{self.pytest_worker}-{number:03d}-{script.stem}"
        folder.mkdir()
        directory = folder / "run"
        wandb_folder = folder / "wandb-parent"
        words = [str(script), *map(str, flags)]
        if output_directory:
            words += ["--output-dir", str(directory)]
        changes = {"WANDB_DIR": str(wandb_folder), **(environment or {})}
        variables = changed(clean_environment(self.folder), changes)
        status, output, errors = self.run_to_end(
            words,
            launcher,
            variables,
            working_directory or folder,
            folder,
            all_cores=all_cores,
            timeout=timeout,
        )
        command = [*launch_command(launcher), *words]
        finished = Finished(command, status, output, errors, directory, wandb_folder)
        if succeeds:
            finished.check_success()
        return finished

    def run_to_end(
        self,
        words: list[str],
        launcher: Launcher,
        environment: Mapping[str, str],
        working_directory: Path,
        folder: Path,
        *,
        all_cores: bool,
        timeout: float,
    ) -> tuple[int, str, str]:
        """Start a script with its flags, and wait for its end.

        Args:
            folder: where the output and the errors are in files until the end.

        Returns:
            The status, the output and the errors.
        """
        with (folder / "output").open("w+") as output, (folder / "errors").open("w+") as errors:
            process = self.start(
                words,
                launcher,
                environment,
                working_directory,
                output,
                errors,
                all_cores=all_cores,
                forking=True,
            )
            status = wait_or_kill(process, timeout)
        output_text = read_and_remove(folder / "output")
        error_text = read_and_remove(folder / "errors")
        assert status is not None, took_too_long(words, timeout, output_text, error_text)
        return status, output_text, error_text


def changed(environment: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return an environment with some variables set, or removed where the value is None."""
    variables = {**environment, **changes}
    return {name: value for name, value in variables.items() if value is not None}


def read_and_remove(path: Path) -> str:
    """Return what a process has written into a file, and remove the file."""
    # If the process was killed, its output may end in the middle of a character.
    text = path.read_text(errors="replace").replace("\r\n", "\n")
    path.unlink()
    return text


def can_fork(environment: Mapping[str, str], clean: Mapping[str, str]) -> bool:
    """Whether a fork of the template behaves as a fresh interpreter in this environment would.

    The template has imported its libraries in the environment `clean`, and these may have read
    variables then.
    """
    same_imports = has_same_imports(dict(environment), dict(clean), READ_LATE)
    return hasattr(os, "pidfd_open") and same_imports


def wait_or_kill(process: Forked | subprocess.Popen[str], timeout: float) -> int | None:
    """Return the status of a process; after `timeout`, kill its session and return None."""
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        end_session(process.pid)
        process.wait(30)
        return None


def end_session(process: int) -> None:
    """Kill a process and all others of its session, or its children if there are no sessions."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process)
        for child in (*parent.children(recursive=True), parent):
            child.kill()


def launch_command(launcher: Launcher, interpreter: Path = Path(sys.executable)) -> list[str]:
    """Return the words before a script's path.

    For a fork, they are those of the command that it stands for.
    """
    launch = LAUNCHES[launcher]
    words = [str(interpreter), *launch.words]
    if launcher == "accelerate" and sys.platform == "darwin":
        words.append("--cpu")  # the launcher overwrites the variable of `without_accelerator`
    if launch.ranks > 1:
        words += [launch.port_flag, str(free_port())]
    return words


def run_command(
    command: list[str],
    environment: Mapping[str, str],
    folder: Path,
    timeout: float,
    *,
    one_core: bool,
) -> tuple[int, str, str]:
    """Run a command with standard input closed; return its status, output and errors.

    If the command takes too long, its whole session is killed, because launchers have children.
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
        raise AssertionError(took_too_long(command, timeout, output, errors)) from None
    return process.returncode, output, errors


def took_too_long(command: list[str], timeout: float, output: str, errors: str) -> str:
    """Return the message of a test whose command was killed after `timeout` seconds."""
    ends = f"{output[-4000:]}\n{errors[-4000:]}"
    return f"{' '.join(command)}\ntook longer than {timeout} s\n{ends}"


def usable_cores() -> set[int]:
    """Return the cores that these tests may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def own_core() -> set[int]:
    """Return the core of this worker of pytest, or one that is idle now.

    If other programs use the cores, threads that wait for each other after each operation are many
    times slower than one thread.
    """
    cores = sorted(usable_cores())
    pytest_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    busy = psutil.cpu_percent(0.05, percpu=True)
    idle = [core for core in cores if busy[core] < 50]
    mine = cores[pytest_worker % len(cores)]
    return {mine if mine in idle or not idle else idle[0]}


def staying_on_one_core() -> Callable[[], None] | None:
    """Return a `preexec_fn` that keeps a process and its children on one core.

    Returns None on a system where a process can't choose its cores. The parent chooses the core,
    because little may be done between fork and exec.
    """
    if not hasattr(os, "sched_setaffinity"):
        return None
    core = own_core()
    return lambda: os.sched_setaffinity(0, core)


def plain(text: str) -> str:
    """Return `text` without the frames of boxes, and with single spaces."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", text)
