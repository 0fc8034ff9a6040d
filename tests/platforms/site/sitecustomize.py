"""Hides from a Python process on Linux the features that Windows or macOS lack.

Python imports this module as it starts if this folder is on PYTHONPATH, also in the processes that
a recipe starts. ``PRETENDED_PLATFORM`` is ``windows`` or ``macos``.

The features are missing for this repository's code alone: `common`, the recipes, and copies.
Libraries and Python's own modules keep them, because their Linux versions need them. The
differences:

- ``sys.platform`` names the other system while `common.system.platforms.current` is imported, and
  only then: torch loads its native libraries by it, and nothing else in `common` may ask for it.
- Windows: ``fcntl`` and ``resource`` can't be imported; ``signal`` has the signals of Windows, with
  SIGBREAK at the number of SIGUSR1; `os` has no ``fork``, ``O_DIRECTORY`` and the like;
  folders can't be opened, nor what is open for reading alone be synced; a file that is open or
  mapped in this process can't be renamed, replaced or removed, nor can a folder around it; names
  of new files have none of the characters that Windows forbids;
  `os.kill` ends a process at once; text files without an encoding are errors, where Windows would
  take cp1252.
- macOS: no core affinity, no death signal, no /dev/shm.
- both: nothing can be read under /proc; data workers start by ``spawn``, with Python's default.

Not simulated: other processes that have a file open, filelock's own code for Windows, the console
of Windows, paths with drives and backslashes, and all that libraries do there.
"""

import builtins
import errno
import importlib.abc
import importlib.machinery
import io
import os
import signal
import sys
import warnings
from pathlib import Path

PLATFORM = os.environ.get("PRETENDED_PLATFORM", "")
OURS = ("common", "recipes", "__main__", "__mp_main__")
ABSENT_MODULES = {"windows": ("fcntl", "resource"), "macos": ()}
ABSENT_FROM_OS = {
    "windows": (
        "fork",
        "forkpty",
        "O_DIRECTORY",
        "O_NONBLOCK",
        "statvfs",
        "sysconf",
        "getloadavg",
        "sched_getaffinity",
        "sched_setaffinity",
        "getuid",
        "geteuid",
        "killpg",
        "setsid",
        "getpgid",
        "nice",
        "fchmod",
        "chown",
        "uname",
        "mkfifo",
        "getsid",
        "wait3",
        "wait4",
    ),
    "macos": ("sched_getaffinity", "sched_setaffinity", "pidfd_open", "posix_fadvise"),
}
ABSENT_SIGNALS = {
    "windows": (
        "SIGUSR1",
        "SIGUSR2",
        "SIGHUP",
        "SIGCHLD",
        "SIGKILL",
        "SIGALRM",
        "SIGQUIT",
        "SIGPIPE",
        "SIGSTOP",
        "SIGCONT",
        "SIGTSTP",
        "pthread_kill",
        "pthread_sigmask",
        "setitimer",
        "alarm",
    ),
    "macos": ("SIGPWR", "SIGSTKFLT", "SIGPOLL"),
}
SYSTEM_NAMES = {"windows": "win32", "macos": "darwin"}
HIDDEN_FOLDERS = {
    "windows": ("/proc/", "/dev/shm", "/dev/fd", "/sys/"),
    "macos": ("/proc/", "/sys/"),
}
WINDOWS_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGABRT, signal.SIGUSR1}


def is_direct(depth: int) -> bool:
    """Whether the caller at this depth is a function of this repository."""
    return str(sys._getframe(depth).f_globals.get("__name__")).partition(".")[0] in OURS


def is_ours(depth: int) -> bool:
    """Whether the nearest caller outside Python's modules for files is this repository's."""
    frame = sys._getframe(depth)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.partition(".")[0] not in ("pathlib", "io", "os", "shutil", "posixpath", __name__):
            return name.partition(".")[0] in OURS or name.startswith("imported_")
        frame = frame.f_back
    return False


def hide(module, names):
    """Remove names from a module for our callers; other callers keep them."""
    kept = {name: vars(module).pop(name) for name in names if name in vars(module)}

    def find(name):
        if name in kept and not is_direct(2):
            return kept[name]
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    module.__getattr__ = find


def hide_modules(names):
    """Make the imports of these modules fail in our code."""
    real_import = builtins.__import__

    def find(name, globals=None, locals=None, fromlist=(), level=0):
        importer = str((globals or {}).get("__name__", "")).partition(".")[0]
        if name in names and importer in OURS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real_import(name, globals, locals, fromlist, level)

    builtins.__import__ = find


class Renamed(importlib.abc.MetaPathFinder):
    """Lets ``sys.platform`` name another system while one module of `common` is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "common.system.platforms.current":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            real_platform = sys.platform
            sys.platform = SYSTEM_NAMES[PLATFORM]
            try:
                execute(module)
            finally:
                sys.platform = real_platform

        spec.loader.exec_module = exec_module
        return spec


def refuse_name(path):
    """Raise an error for a name that no file of Windows can have."""
    name = os.path.basename(path) if isinstance(path, (str, os.PathLike)) else ""
    if set('<>:"|?*\\') & set(name) or name.endswith((" ", ".")):
        raise OSError(errno.EINVAL, "[WinError 123] the name is incorrect", str(path))


def hide_folders(folders):
    """Hide folders that only Linux has from our code."""

    def refuse(path):
        """Raise an error if our code asks for a path in a hidden folder."""
        is_path = isinstance(path, (str, os.PathLike))
        if is_path and os.fspath(path).startswith(folders) and is_ours(3):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def open_file(file, mode="r", buffering=-1, encoding=None, *arguments, **options):
        refuse(file)
        if PLATFORM == "windows" and mode[:1] in "wax" and is_ours(2):
            refuse_name(file)
        if encoding is None and "b" not in mode and is_ours(2) and not isinstance(file, int):
            raise EncodingWarning(f"{file} is opened without an encoding")
        return REAL_OPEN(file, mode, buffering, encoding, *arguments, **options)

    def list_folder(path="."):
        refuse(path)
        return REAL_LISTDIR(path)

    def stat(path, *arguments, **options):
        refuse(path)
        return REAL_STAT(path, *arguments, **options)

    builtins.open = io.open = open_file
    os.listdir = list_folder
    os.stat = stat


def paths_in_use():
    """Return the paths of the files that this process has open or mapped."""
    paths = set()
    for descriptor in REAL_LISTDIR("/proc/self/fd"):
        try:
            paths.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:  # the folder of the list itself has been closed
            continue
    with REAL_OPEN("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths |= {line.split(maxsplit=5)[5].strip() for line in maps if line.count("/")}
    return paths


def refuse_what_is_open():
    """Make renames and removals of open files fail for every caller, as on Windows."""

    def refusing(real):
        def move(source, *arguments, **options):
            paths = [path for path in (source, *arguments[:1]) if isinstance(path, (str, Path))]
            places = [os.path.abspath(path) for path in paths] if "dir_fd" not in options else []
            for used in paths_in_use() if places else ():
                for place in places:
                    if used == place or used.startswith(f"{place}/"):
                        words = "[WinError 32] it is being used by another process"
                        raise PermissionError(errno.EACCES, words, used)
            if real is REAL_RENAME and os.path.exists(places[1]):
                words = "[WinError 183] it exists already"
                raise FileExistsError(errno.EEXIST, words, places[1])
            return real(source, *arguments, **options)

        return move

    for name in ("rename", "replace", "unlink", "remove", "rmdir"):
        setattr(os, name, refusing(getattr(os, name)))
    import shutil

    shutil._use_fd_functions = False  # as on Windows: folders are removed by their paths


def limit_syncing():
    """Refuse to open folders, and to sync files that are open for reading only."""
    real_open = os.open
    real_fsync = os.fsync
    import fcntl

    def open_file(path, *arguments, **options):
        if "dir_fd" not in options and is_ours(2) and os.path.isdir(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real_open(path, *arguments, **options)

    def fsync(descriptor):
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        if mode == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real_fsync(descriptor)

    os.open = open_file
    os.fsync = fsync


def limit_signals():
    """Refuse signals that Windows lacks, and let `os.kill` end a process at once."""
    real_signal = signal.signal
    real_kill = os.kill

    def set_handler(number, handler):
        if number == REAL_SIGCHLD:  # which torch sets, as it does not on Windows
            return signal.SIG_DFL
        if is_ours(2) and number not in WINDOWS_SIGNALS:
            raise ValueError("invalid signal value")
        return real_signal(number, handler)

    def kill(process, number):
        real_kill(process, REAL_SIGKILL if is_ours(2) else number)

    signal.SIGBREAK = signal.SIGUSR1
    signal.signal = set_handler
    os.kill = kill


REAL_RENAME = os.rename
REAL_LISTDIR = os.listdir
REAL_OPEN = io.open
REAL_STAT = os.stat
REAL_SIGKILL = signal.SIGKILL
REAL_SIGCHLD = signal.SIGCHLD

if PLATFORM:
    sys.meta_path.insert(0, Renamed())
    hide_modules(ABSENT_MODULES[PLATFORM])
    hide_folders(HIDDEN_FOLDERS[PLATFORM])
    if PLATFORM == "windows":
        refuse_what_is_open()
        limit_syncing()
        limit_signals()
    hide(os, ABSENT_FROM_OS[PLATFORM])
    hide(signal, ABSENT_SIGNALS[PLATFORM])
    warnings.filterwarnings("ignore", category=EncodingWarning)
    ours = r"common\b|recipes\b|__main__"
    warnings.filterwarnings("error", category=EncodingWarning, module=ours)
