"""Finds the line that waits for the device, and the line of the user's code that led to it.

The host waits if it needs the value of a tensor on the device.
"""

import os
from pathlib import Path
from types import FrameType

import accelerate
import numpy
import torch

import common
from common.system.installed_code import is_in_standard_library, is_installed
from common.tools.prove.observation.session import Session
from common.tools.prove.reach.own_code import callers

# Libraries that read a tensor because their caller passes it.
LIBRARIES = tuple(str(Path(str(module.__file__)).parent) for module in (torch, accelerate, numpy))
# torch's optimizers and averages read counters that are on the host.
OPTIMIZERS = str(Path(str(torch.__file__)).parent / "optim")
# Their exceptions read a loss: `ReduceLROnPlateau.step(loss)`, and LBFGS that of its closure.
READERS_OF_LOSSES = tuple(f"{OPTIMIZERS}{os.sep}{name}" for name in ("lr_scheduler.py", "lbfgs.py"))
SESSION = Session.wrap.__code__.co_filename  # the wrappers that a session makes are on the stack
THIS_LIBRARY = f"{Path(str(common.__file__)).parent}{os.sep}"


def calling_frame(frame: FrameType, observer: str) -> FrameType | None:
    """Return the frame of the line that waits: the innermost outside libraries and the observer.

    The line may be in an installed package. Returns None if one of torch's optimizers reads a
    counter, or if there is no such frame.

    Args:
        frame: a frame inside the operation that waits.
        observer: the file of the module that observes waits, whose frames are on the stack.
    """
    for caller in callers(frame):
        path = caller.f_code.co_filename
        if path.startswith(OPTIMIZERS) and path not in READERS_OF_LOSSES:
            return None
        is_observer = path in (observer, SESSION)
        if not is_observer and not is_library(path):
            return caller
    return None


def users_frame(frame: FrameType, recipe: Path) -> FrameType | None:
    """Return the frame of the user's code that led to a frame; None if no code of the user did.

    This is a frame of the recipe's file if there is one, and otherwise the nearest frame.
    """
    nearest = None
    for caller in callers(frame):
        path = caller.f_code.co_filename
        if not (is_library(path) or is_installed(path) or is_in_this_library(path)):
            nearest = nearest or caller
            if Path(path).resolve() == recipe:
                return caller
    return nearest


def is_in_this_library(path: str) -> bool:
    """Whether a file belongs to this library."""
    return path.startswith(THIS_LIBRARY)


def is_library(path: str) -> bool:
    """Whether a file belongs to torch, Accelerate, NumPy or Python's standard library."""
    # Unlike in `common.tools.prove.reach.own_code`, other installed packages do not count as
    # libraries: a wait in a package belongs to its own line, not to the recipe's line that calls
    # it.
    return path.startswith((*LIBRARIES, "<")) or is_in_standard_library(path)
