"""A Python with the libraries imported, whose forks run scripts in no time: not a test itself.

Nearly all of a short run's seconds are the imports of torch. A fork has them already, and is in all
else a process of its own: interpreter, session, signals, environment, files, and a `__main__` that
is the script. What it shares with other forks is the seed of Python's hashes, so what depends on
the order of a set looks the same in each: tests of resumed runs take a fresh interpreter once. And
it ends without taking the libraries apart, which would copy all that it shares.

python tests/template.py LISTENER PATH

To the socket of that number, which lies at that path, each of pytest's workers connects. Requests
come as JSON with the files for standard output and error and for the status; the answer is the
process id, and later the status, in a line each. With the last connection it ends.
"""

import atexit
import contextlib
import importlib
import json
import os
import select
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
import weakref
from types import CodeType
from typing import Any

from filelock import FileLock

# What every recipe imports, and what the optimizer does. Nothing of `common`, nor what reads
# variables that tests set.
LIBRARIES = ("torch", "torch._dynamo", "accelerate", "tyro", "datasets", "sklearn.datasets")
LIBRARIES += ("safetensors.torch", "rich.progress", "rich.table", "psutil", "typeguard")
LIBRARIES += ("PIL.ImageOps", "sklearn.model_selection", "torch.utils.flop_counter")
# As `accelerate launch` and torchrun set them for two processes with `multi_cpu.yaml`.
OF_TWO = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
    "OMP_NUM_THREADS": "1",
}
GRACE = 30  # seconds that torchrun leaves the other ranks, once one has failed


class Children:
    """The forks that run, and whom to tell of their ends."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()

    def add(self, process: int, told: int, asked_by: socket.socket) -> None:
        """Watch a process, whose status is written to the file `told`."""
        descriptor = os.pidfd_open(process)
        self.selector.register(descriptor, selectors.EVENT_READ, (process, told, asked_by))

    def tell(self, descriptor: int) -> None:
        """Tell the status of a process that ended."""
        process, told, _ = self.selector.unregister(descriptor).data
        os.close(descriptor)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        with contextlib.suppress(BrokenPipeError):
            os.write(told, f"{status}\n".encode())
        os.close(told)

    def end(self, control: socket.socket) -> None:
        """Kill what was asked for by a connection and still runs, and close it."""
        self.selector.unregister(control)
        for key in [*self.selector.get_map().values()]:
            if key.data is not None and key.data[2] is control:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(key.data[0], signal.SIGKILL)
                self.tell(key.fd)
        control.close()

    def sockets(self) -> list[socket.socket]:
        """Return the listener, and the connections."""
        found = [key.fileobj for key in self.selector.get_map().values()]
        return [one for one in found if isinstance(one, socket.socket)]


def serve(listener: socket.socket, path: str) -> dict[str, Any]:
    """Fork as asked for, until nobody is connected; in the fork, return what to run."""
    children = Children()
    children.selector.register(listener, selectors.EVENT_READ, None)
    while True:
        key, _ = children.selector.select()[0]  # one: it may take others away
        if key.data is not None:
            children.tell(key.fd)
            continue
        control = key.fileobj
        assert isinstance(control, socket.socket)
        if control is listener:
            children.selector.register(listener.accept()[0], selectors.EVENT_READ, None)
            continue
        words, files, _, _ = socket.recv_fds(control, 1 << 20, 3)
        if not words:
            children.end(control)
            if len(children.sockets()) == 1:
                end_unless_asked(listener, path)
            continue
        request = json.loads(words)
        for name in request["libraries"]:
            importlib.import_module(name)
        output, errors, told = files
        process = os.fork()
        if process == 0:
            for one in children.sockets():
                one.close()
            children.selector.close()
            os.close(told)
            become(request, output, errors)
            return request
        os.close(output)
        os.close(errors)
        os.write(told, f"{process}\n".encode())
        children.add(process, told, control)


def end_unless_asked(listener: socket.socket, path: str) -> None:
    """End, but for somebody who has connected by now; who comes later starts another one."""
    with FileLock(f"{path}.lock"):
        if not select.select([listener], [], [], 0)[0]:
            os.unlink(path)
            os._exit(0)


def become(request: dict[str, Any], output: int, errors: int) -> None:
    """Make this fork what a shell would have started."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, standard in ((nothing, 0), (output, 1), (errors, 2)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # to be read from the environment when it is asked for
    os.chdir(request["folder"])
    os.sched_setaffinity(0, request["cores"])
    if request["processes"] > 1:
        launch(request["processes"], request["port"])
    # As in a process of its own, generators that nobody seeds differ; Python's sees to itself.
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()
    # Folders that W&B makes when it is imported: each process that has one removes it at its end.
    for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        if (known := finalizer.peek()) and isinstance(known[0], tempfile.TemporaryDirectory):
            finalizer.detach()
            known[0].__init__()  # type: ignore[misc]


def launch(processes: int, port: int) -> None:
    """Fork into ranks, which return; stay behind as their launcher, which does what torchrun does.

    It ends the others when one fails, passes on SIGTERM and Ctrl-C, and ends with 1 then.
    """
    os.environ.update(OF_TWO)
    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    names |= {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    names |= {"TORCHELASTIC_RUN_ID": "none"}
    os.environ.update({name: str(value) for name, value in names.items()})
    ranks = []
    for rank in range(processes):
        process = os.fork()
        if process == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return
        ranks.append(process)
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: asked.append(received))
    os._exit(watch(ranks, asked))


def watch(ranks: list[int], asked: list[int]) -> int:
    """Wait for the ranks' ends, and bring them about where one fails; return the status."""
    left, failed, deadline = [*ranks], False, float("inf")
    while left:
        for process in [*left]:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                left.remove(process)
                failed |= status != 0
        if (failed or asked) and deadline == float("inf"):
            deadline = time.monotonic() + GRACE
            for process in left:
                os.kill(process, asked[0] if asked else signal.SIGTERM)
        if time.monotonic() > deadline:
            for process in left:
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
    return int(failed or bool(asked))


def main() -> dict[str, Any]:
    """Import, and wait for requests; in a fork, return what to run."""
    del sys.path[0]
    for name in LIBRARIES:
        importlib.import_module(name)
    import gc

    gc.collect()
    gc.freeze()
    return serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])


def run(code: CodeType, names: dict[str, Any]) -> int:
    """Run a script, and what it has left for the exit; return the status, as an interpreter does.

    What an interpreter does besides is to tidy up, object by object: here, all that is shared.
    """
    status = 0
    try:
        exec(code, names)
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
    REQUEST = main()
    sys.argv = REQUEST["words"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    TEMPLATE = sys.modules["__main__"]  # held: else this module's names would go with it
    SCRIPT = type(sys)("__main__")
    SCRIPT.__dict__.update(__file__=sys.argv[0], __builtins__=__builtins__, held=TEMPLATE)
    sys.modules["__main__"] = SCRIPT
    with open(sys.argv[0], encoding="utf-8") as SOURCE:
        CODE = compile(SOURCE.read(), sys.argv[0], "exec")
    os._exit(run(CODE, SCRIPT.__dict__))
