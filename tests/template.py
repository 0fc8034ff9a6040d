"""A Python process that has imported the libraries and forks to run scripts. Not a test.

A short run spends most of its time on importing torch. A fork has it already. Otherwise a fork is a
process of its own, with its own session, signals, environment, files, and the script as `__main__`.
Two things differ from a fresh interpreter:

- All forks share the seed of Python's hashes, so the order of a set is the same in each. Tests of
  resumed runs therefore use a fresh interpreter once.
- A fork ends without freeing the libraries, because that would copy all the memory it shares.

python tests/template.py LISTENER PATH

LISTENER is the number of an open socket, which is bound to PATH. Each of pytest's workers connects
to it, and so does each `tests/forking_python.py`. A request is JSON (see `Request`) together with
the open files for standard input, output and error and for the answer, and optionally a network
namespace. The answer is the process id and later the exit status, each on its own line. The
template ends when the last connection closes.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import io
import json
import os
import runpy
import select
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NotRequired, TypedDict

from filelock import FileLock

# The libraries that every recipe imports, and that the first update imports. No library that reads
# variables which tests set.
LIBRARIES = (
    "torch",
    "torch._dynamo",
    "accelerate",
    "tyro",
    "datasets",
    "sklearn.datasets",
    "safetensors.torch",
    "rich.progress",
    "rich.table",
    "psutil",
    "typeguard",
    "PIL.ImageOps",
    "sklearn.model_selection",
    "torch.utils.flop_counter",
    "torch.profiler._cupti_monitor",
    "rich._emoji_codes",
)
# The shared code of recipes. Its import would take a third of a short run.
SHARED_CODE = ("common.run", "common.config", "common.data.images", "common.measure.classification")
# The variables that the shared code's console reads when it is made.
READ_BY_CONSOLE = (
    "COLUMNS",
    "LINES",
    "TERM",
    "COLORTERM",
    "NO_COLOR",
    "FORCE_COLOR",
    "TTY_COMPATIBLE",
    "TTY_INTERACTIVE",
    "JUPYTER_COLUMNS",
    "JUPYTER_LINES",
)
# Scripts that change libraries before they import the shared code.
CHANGE_LIBRARIES_FIRST = ("platforms", "simulated", "host_and_device.py")
# Further libraries that test modules import, for the forks that are pytest's workers.
LIBRARIES_OF_TESTS = ("transformers.models.bert.modeling_bert", "optuna", "pydantic")
# The variables that `accelerate launch` and torchrun set for two processes with `multi_cpu.yaml`.
OF_TWO = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
    "OMP_NUM_THREADS": "1",
}
GRACE = 30  # seconds after which torchrun kills the other ranks, once one has failed
# On this signal, a fork prints the stacks of its threads; see `tests.jobs`. Systems without
# real-time signals import this module, but make no forks.
STACKS_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGTERM)
NETWORK_NAMESPACE = 0x40000000  # CLONE_NEWNET, which `os` knows from Python 3.12 on


class Request(TypedDict):
    """A command line that a fork is to run, and its environment."""

    words: list[str]  # a script or `-m MODULE`, and its arguments
    environment: dict[str, str]
    folder: str
    cores: list[int]
    processes: NotRequired[int]  # ranks, if more than one, with a launcher above them
    port: NotRequired[int]  # where the ranks meet
    executable: NotRequired[str]  # `sys.executable` in the fork
    ignored_signals: NotRequired[list[int]]
    unbuffered: NotRequired[bool]  # as with `python -u`


class Children:
    """The forks that run; reports the status of each one that ends."""

    def __init__(self, log: Path) -> None:
        self.selector = selectors.DefaultSelector()
        self.log = log

    def add(self, process: int, answers: int, control: socket.socket, test: str) -> None:
        """Watch a process that a connection asked for; its status goes to the file `answers`."""
        descriptor = os.pidfd_open(process)
        self.selector.register(descriptor, selectors.EVENT_READ, (process, answers, control, test))

    def report(self, descriptor: int) -> None:
        """Report the status of a process that has ended, and log its processor time."""
        process, answers, _, test = self.selector.unregister(descriptor).data
        os.close(descriptor)
        _, wait_status, usage = os.wait4(process, 0)
        status = os.waitstatus_to_exitcode(wait_status)
        with contextlib.suppress(BrokenPipeError):
            os.write(answers, f"{status}\n".encode())
        os.close(answers)
        with self.log.open("a") as log:
            log.write(json.dumps([test, round(usage.ru_utime + usage.ru_stime, 3)]) + "\n")

    def end(self, control: socket.socket) -> None:
        """Kill the processes of a connection that still run, and close the connection."""
        self.selector.unregister(control)
        for key in [*self.selector.get_map().values()]:
            if key.data is not None and key.data[2] is control:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(key.data[0], signal.SIGKILL)
                self.report(key.fd)
        control.close()

    def sockets(self) -> list[socket.socket]:
        """Return the listener and all connections."""
        watched = [key.fileobj for key in self.selector.get_map().values()]
        return [file for file in watched if isinstance(file, socket.socket)]


def serve(listener: socket.socket, path: str) -> Request:
    """Fork for each request until no connection is left; in a fork, return the request."""
    children = Children(Path(path).with_name("processor-time.jsonl"))
    children.selector.register(listener, selectors.EVENT_READ, None)
    while True:
        key, _ = children.selector.select()[0]  # only the first: handling it may close others
        if key.data is not None:
            children.report(key.fd)
            continue
        control = key.fileobj
        assert isinstance(control, socket.socket)
        if control is listener:
            children.selector.register(listener.accept()[0], selectors.EVENT_READ, None)
            continue
        message, files, _, _ = socket.recv_fds(control, 1 << 20, 5)
        if not message:
            children.end(control)
            if len(children.sockets()) == 1:
                end_unless_asked(listener, path)
            continue
        request: Request = json.loads(message)
        for name in libraries_of(request["words"]):
            prepare(name)
        *standard_files, answers = files[:4]
        network = files[4:]
        process = os.fork()
        if process == 0:
            for connection in children.sockets():
                connection.close()
            children.selector.close()
            os.close(answers)
            become(request, standard_files, network)
            return request
        for descriptor in (*standard_files, *network):
            os.close(descriptor)
        os.write(answers, f"{process}\n".encode())
        test = request["environment"].get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        children.add(process, answers, control, test)


def libraries_of(words: list[str]) -> Iterator[str]:
    """Yield the libraries that this command line needs besides those of every recipe."""
    if Path(words[0]).name == "worker.py":
        yield from LIBRARIES_OF_TESTS
    if any(Path(word).name == "bert.py" for word in words):
        yield "transformers.models.bert.modeling_bert"
        yield "common.data.text"
    if words[0] == "-m":
        # Launchers and tools do not need W&B; the processes that they start do.
        if words[1].startswith(("accelerate.", "torch.", "wandb")):
            yield words[1]
    elif "none" not in words and "--help" not in words:
        yield from ("wandb.sdk.launch.inputs.internal", "wandb.sdk.artifacts._internal_artifact")
        yield from ("requests", "PIL.ImageSequence", "PIL.PngImagePlugin")


def prepare(library: str) -> None:
    """Import a library, and let it cache slow results that are the same in each process."""
    is_new = library not in sys.modules
    module = importlib.import_module(library)
    if is_new and library == "transformers.models.bert.modeling_bert":
        # It compiles a thousand regular expressions, of all models, when a first one is saved.
        conversions = importlib.import_module("transformers.conversion_mapping")
        conversions.get_checkpoint_conversion_mapping("bert")
    if is_new and library == "common.config":
        # tyro caches what it derives from the types of the shared flags.
        sys.modules["tyro"].cli(module.TrainingConfig, args=[])


def end_unless_asked(listener: socket.socket, path: str) -> None:
    """End, unless a client has just connected. A later client starts another template."""
    with FileLock(f"{path}.lock"):
        if not select.select([listener], [], [], 0)[0]:
            os.unlink(path)
            os._exit(0)


def become(request: Request, standard_files: list[int], network: list[int]) -> None:
    """Give this fork the files, environment and signals that a shell would have given it."""
    os.setsid()
    for standard, descriptor in enumerate(standard_files):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    for descriptor in network:
        enter_network(descriptor)
    environment = request["environment"]
    if any(os.environ.get(name) != environment.get(name) for name in READ_BY_CONSOLE):
        forget_shared_code()
    os.environ.clear()
    os.environ.update(environment)
    # Torch reads this variable when it is imported.
    sys.modules["torch._dynamo.config"].disable = environment.get("TORCH_COMPILE_DISABLE") == "1"
    tempfile.tempdir = None  # so that it is read from the new environment
    os.chdir(request["folder"])
    os.sched_setaffinity(0, request["cores"])
    sys.executable = request.get("executable", sys.executable)
    open_standard_files(request.get("unbuffered", False))
    if sys.stdout.isatty() or sys.stderr.isatty():
        forget_shared_code()  # its console has colours there
    for number in request.get("ignored_signals", []):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(STACKS_SIGNAL, file=2)
    processes = request.get("processes", 1)
    if processes > 1:
        launch(processes, request["port"])
    # Random generators that nobody seeds differ between processes. Every fork seeds Python's own
    # anew.
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()
    renew_folders_of_wandb()


def open_standard_files(unbuffered: bool) -> None:
    """Open Python's standard files again: the old objects have the template's properties."""
    standard_input = io.TextIOWrapper(
        io.BufferedReader(io.FileIO(0, closefd=False)), encoding=sys.stdin.encoding
    )
    sys.stdin = sys.__stdin__ = standard_input
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        before = getattr(sys, name)
        raw = io.FileIO(descriptor, "w", closefd=False)
        raw.name = f"<{name}>"
        file = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),  # type: ignore[type-var]
            encoding=before.encoding,
            errors=before.errors,
            line_buffering=descriptor == 2 or raw.isatty(),
            write_through=unbuffered,
        )
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)


def enter_network(descriptor: int) -> None:
    """Enter a network namespace, unless this process is in it already."""
    namespace = os.fstat(descriptor).st_ino
    if namespace != os.stat("/proc/self/ns/net").st_ino:
        library = ctypes.CDLL(None, use_errno=True)
        if library.setns(descriptor, NETWORK_NAMESPACE) != 0:
            raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
    os.close(descriptor)


def renew_folders_of_wandb() -> None:
    """Give this fork its own copies of temporary folders that W&B made when it was imported.

    Each process that has such a folder removes it at its end.
    """
    for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        alive = finalizer.peek()
        if alive and isinstance(alive[0], tempfile.TemporaryDirectory):
            finalizer.detach()
            alive[0].__init__()  # type: ignore[misc]


def launch(processes: int, port: int) -> None:
    """Fork into ranks, which return; the original process stays and acts as torchrun does.

    If a rank fails, it ends the others. It passes on SIGTERM and Ctrl-C. In both cases it ends with
    status 1.
    """
    os.environ.update(OF_TWO)
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
    }
    ranks = []
    for rank in range(processes):
        process = os.fork()
        if process == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return
        ranks.append(process)
    received_signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: received_signals.append(received))
    os._exit(watch(ranks, received_signals))


def watch(ranks: list[int], received_signals: list[int]) -> int:
    """Wait until all ranks have ended; if one fails, end the others. Return the status."""
    left = [*ranks]
    failed = False
    deadline = float("inf")
    while left:
        for process in [*left]:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                left.remove(process)
                failed |= status != 0
        if (failed or received_signals) and deadline == float("inf"):
            deadline = time.monotonic() + GRACE
            for process in left:
                os.kill(process, received_signals[0] if received_signals else signal.SIGTERM)
        if time.monotonic() > deadline:
            for process in left:
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
    return int(failed or bool(received_signals))


def main() -> Request:
    """Import the libraries and wait for requests; in a fork, return the request."""
    del sys.path[0]
    for name in (*LIBRARIES, *SHARED_CODE):
        prepare(name)
    import gc

    gc.collect()
    gc.freeze()
    return serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])


def module_runner(words: list[str]) -> Callable[[], object]:
    """Return a function that runs `-m MODULE ARGUMENTS...`, as the interpreter does."""
    module = words[1]
    sys.modules.pop(module, None)  # the template may have imported it, under its own name
    sys.argv = [module, *words[2:]]
    sys.path.insert(0, os.getcwd())
    forget_shared_code_unless_found()
    return lambda: runpy.run_module(module, run_name="__main__", alter_sys=True)


def forget_shared_code_unless_found() -> None:
    """Forget the shared code if this process would import that of another repository."""
    imported = getattr(sys.modules.get("common"), "__file__", None)
    specs = (finder.find_spec("common", None) for finder in sys.meta_path)
    shared_code = next((spec.origin for spec in specs if spec is not None), None)
    if imported is None or shared_code is None or not os.path.samefile(shared_code, imported):
        forget_shared_code()


def forget_shared_code() -> None:
    """Let this process import the shared code again."""
    for name in [*sys.modules]:
        if name.partition(".")[0] == "common":
            del sys.modules[name]


def script_runner(words: list[str]) -> Callable[[], object]:
    """Return a function that runs `SCRIPT ARGUMENTS...` as `__main__`, as the interpreter does."""
    path = os.path.abspath(words[0])
    sys.argv = words
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    if {*Path(path).parts} & {*CHANGE_LIBRARIES_FIRST}:
        forget_shared_code()
    forget_shared_code_unless_found()
    # Keep this module alive: functions of it are still needed.
    template = sys.modules["__main__"]
    script = ModuleType("__main__")
    script.__dict__.update(__file__=path, __builtins__=__builtins__, template=template)
    sys.modules["__main__"] = script
    with open(path, encoding="utf-8") as file:
        code = compile(file.read(), path, "exec")
    return lambda: exec(code, script.__dict__)


def run(work: Callable[[], object]) -> int:
    """Do the work and the functions registered for the exit; return the status of Python.

    Python would also free all objects, which would copy memory that the forks share.
    """
    status = 0
    try:
        work()
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        file.flush()
    return status


if __name__ == "__main__":
    WORDS = main()["words"]
    os._exit(run(module_runner(WORDS) if WORDS[0] == "-m" else script_runner(WORDS)))
