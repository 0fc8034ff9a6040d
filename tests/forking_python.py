"""A stand-in for the `python` command: it runs scripts as forks of the template process.

`tests/launch.py` installs a copy of this file as `python`, `accelerate` and `torchrun` in a folder
of the tests, and `tests/template.py` is the process that forks. A start costs 20 ms of processor
time instead of the seconds that the imports of torch and the other libraries take. Everything
else is as with the interpreter: arguments, environment, folder, cores, standard files, the network
namespace, signals and the exit status. A launcher that runs this way starts its ranks
this way too, because its `sys.executable` is this command.

This command starts the real interpreter for `python -c`, for options of the interpreter, and if
variables are set that the libraries read while they are imported.

These differences remain:

- The parent of a fork is the template, so a fork is not told when the process that started this
  command dies. It ends when this command is killed.
- Torch uses one thread until the script sets their number, as recipes do, because the template
  has one core.
- A later change of this command's cores (`taskset`) does not change those of the fork.
"""

import contextlib
import json
import os
import signal
import socket
import sys

# Variables that no library reads while it is imported, so they may differ between the fork and the
# template.
READ_LATE = ("WANDB_", "COLUMNS", "LINES", "TQDM_", "PYTEST_", "TMPDIR", "TORCH_COMPILE_DISABLE")
# Variables of shells, launchers and Slurm. Forks of two ranks get those of `multi_cpu.yaml`, too.
SET_BY_LAUNCHERS = (
    "PATH",
    "PWD",
    "OLDPWD",
    "SHLVL",
    "_",
    "XDG_CACHE_HOME",
    "RECIPE_TESTS_FOLDER",
    "ACCELERATE_",
    "FSDP_",
    "MASTER_",
    "SLURM_",
    "TORCHELASTIC_",
    "GROUP_",
    "LOCAL_",
    "ROLE_",
    "RANK",
    "WORLD_SIZE",
    "OMP_NUM_THREADS",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "MAIN_ADDRESS",
    "MAIN_PORT",
    "PER_NODE",
    "RUN_DIRECTORY",
    "FAKES",
    "GLOO_SOCKET_IFNAME",
    # Benchmarks have a cache of their own, and no test looks at which one libraries use.
    "HF_HOME",
    # Jupyter sets these for the shell lines of a notebook.
    "JPY_",
    "PYDEVD_",
    "MPLBACKEND",
    "CLICOLOR",
    "FORCE_COLOR",
    "PAGER",
    "GIT_PAGER",
    "TERM",
)
MODULES = {"accelerate": "accelerate.commands.accelerate_cli", "torchrun": "torch.distributed.run"}
# Variables that a launcher passes on to its ranks, and does not use itself.
USED_BY_RANKS = ("HF_",)
FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT")


def has_same_imports(
    environment: dict[str, str], clean: dict[str, str], read_late: tuple[str, ...]
) -> bool:
    """Whether libraries imported with the variables `clean` behave as with `environment`."""
    names = {*environment, *clean}
    changed = [name for name in names if environment.get(name) != clean.get(name)]
    return all(name.startswith(read_late) for name in changed)


def main() -> None:
    """Run the command line of this process, in a fork or with the interpreter."""
    command = os.path.abspath(sys.argv[0])
    with open(os.path.join(os.path.dirname(command), "settings.json"), encoding="utf-8") as file:
        settings = json.load(file)
    words = sys.argv[1:]
    name = os.path.basename(command)
    if name in MODULES:
        words = ["-m", MODULES[name], *words]
    unbuffered = words[:1] == ["-u"]  # as launchers start their ranks
    if unbuffered:
        words = words[1:]
    is_script = bool(words) and os.path.isfile(words[0])
    is_module = len(words) > 1 and words[0] == "-m"
    read_late = READ_LATE + SET_BY_LAUNCHERS
    if is_module and words[1] in MODULES.values():
        read_late += USED_BY_RANKS
    same_imports = has_same_imports(dict(os.environ), settings["environment"], read_late)
    if not same_imports or not (is_script or is_module):
        options = ["-u"] if unbuffered else []
        os.execv(settings["interpreter"], [settings["interpreter"], *options, *words])
    executable = os.path.join(os.path.dirname(command), "python")
    end_as(run_in_fork(words, unbuffered, executable, settings["socket"]))


def run_in_fork(words: list[str], unbuffered: bool, executable: str, path: str) -> int:
    """Let the template at the socket `path` run a command line in a fork; return its status."""
    signals = [getattr(signal, name) for name in FORWARDED]
    ignored = [number for number in signals if signal.getsignal(number) == signal.SIG_IGN]
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until there is a fork to pass them on to
    request = {
        "words": words,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "cores": sorted(os.sched_getaffinity(0)),
        "executable": executable,
        "unbuffered": unbuffered,
        "ignored_signals": [int(number) for number in ignored],
    }
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.connect(path)
    reader, writer = os.pipe()
    network = os.open("/proc/self/ns/net", os.O_RDONLY)
    socket.send_fds(control, [json.dumps(request).encode()], [0, 1, 2, writer, network])
    os.close(writer)
    with os.fdopen(reader) as answers:
        process = int(answers.readline())
        for number in signals:
            if number not in ignored:
                signal.signal(number, lambda received, _: send(process, received))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        return int(answers.readline())


def send(process: int, number: int) -> None:
    """Send a signal to the process, unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def end_as(status: int) -> None:
    """End with the fork's status, which is negative if a signal ended the fork."""
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
