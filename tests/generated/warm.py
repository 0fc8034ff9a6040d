"""What the process that copies are forked from imports once, for all of them.

Copies write small files in quick succession, and no test cuts the power: so nothing waits for the
disk.
"""

import importlib
import os
import pkgutil

import common

for module in pkgutil.walk_packages(common.__path__, "common."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
importlib.import_module("torch.optim.swa_utils")


def do_not_wait(descriptor: int) -> None:
    """Take the place of `os.fsync`."""


os.fsync = do_not_wait
