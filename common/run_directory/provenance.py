"""Saves what is needed to train a run again: its code, its packages and its machine.

Rank 0 does this in a thread, while training begins, because git may take long in a large
repository. A run goes on without it.
"""

import os
import platform
import re
import sys
import threading
from contextlib import suppress
from pathlib import Path

from common.errors import UserError
from common.json_files import write_json
from common.run_directory.code_tree import CollectedTree, trees_of_process
from common.run_directory.records import ATTEMPTS, PROVENANCE, Attempt, Provenance, read_record
from common.system.devices.libraries import library_versions
from common.system.machine import is_main_rank, local_world_size, processor_name, world_size
from common.system.platforms import usable_cores

LIBRARY = Path(__file__).resolve().parents[2]  # the folder that `common` is imported from
# Variables that choose kernels or their order of sums, and so change the last bits of results. No
# other variable of the environment is recorded.
NUMERIC_VARIABLES = (
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_THREADS"),
    *("OPENBLAS_CORETYPE", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NCCL_ALGO", "NCCL_PROTO", "PYTHONHASHSEED"),
)
LONGEST_WAIT = 30.0  # seconds, at the end of a run


class ProvenanceWriter:
    """Writes the provenance of a run, on rank 0, in the background."""

    def __init__(self, directory: Path, recipe_file: Path) -> None:
        """Prepare to write.

        Args:
            directory: the directory of the run.
            recipe_file: the recipe's file.
        """
        self.directory = directory
        self.recipe_file = recipe_file.absolute()  # before a recipe changes its folder
        self.thread: threading.Thread | None = None

    def begin(self, step: int) -> None:
        """Start to write what this attempt uses.

        Args:
            step: the updates that earlier attempts made.
        """
        if not is_main_rank():
            return
        self.thread = threading.Thread(target=self.write, args=(step,))
        self.thread.daemon = True  # the process may end while git hangs
        self.thread.start()

    def wait(self) -> None:
        """Wait until all is written."""
        if self.thread is not None:
            self.thread.join(LONGEST_WAIT)
            self.thread = None

    def write(self, step: int) -> None:
        """Add this attempt to `attempts.json`, and write its patches.

        Nothing is written if the disk is full, or if this user may not write to the directory.
        """
        with suppress(OSError, UserError):
            attempt, trees = present_attempt(self.recipe_file, step)
            (self.directory / PROVENANCE).mkdir(exist_ok=True)
            for collected in trees:
                if collected.tree.patch is not None:
                    path = self.directory / PROVENANCE / collected.tree.patch
                    path.write_bytes(collected.patch)
            attempts = with_attempt(saved_attempts(self.directory), attempt)
            write_json(self.directory / ATTEMPTS, Provenance(attempts=attempts).to_json())


def saved_attempts(directory: Path) -> list[Attempt]:
    """Return the attempts that a run has saved; none if the file is missing or damaged."""
    with suppress(UserError):
        return read_record(directory / ATTEMPTS, Provenance).attempts
    return []


def with_attempt(saved: list[Attempt], attempt: Attempt) -> list[Attempt]:
    """Return the attempts whose updates the run still has, and the present one.

    The present attempt is left out if it equals the attempt that it goes on from.
    """
    earlier = [before for before in saved if before.global_step < attempt.global_step]
    if earlier:
        last = earlier[-1].model_copy(update={"global_step": attempt.global_step})
        if last.to_json() == attempt.to_json():
            return earlier
    return [*earlier, attempt]


def present_attempt(recipe_file: Path, step: int) -> tuple[Attempt, list[CollectedTree]]:
    """Return the code, packages and machine of this process, and the contents of its patches."""
    trees: list[CollectedTree] = []
    recipe = None
    problem = None
    if recipe_file.is_file():
        trees = trees_of_process(recipe_file, LIBRARY)
        recipe = recipe_file.resolve().relative_to(trees[0].tree.folder).as_posix()
    else:
        problem = "the recipe is in no file"
    machine = machine_facts()
    attempt = Attempt(
        global_step=step,
        recipe=recipe,
        trees=[collected.tree for collected in trees],
        problem=problem,
        packages=machine.packages,
        libraries=machine.libraries,
        processor=machine.processor,
        cores=machine.cores,
        system=machine.system,
        machines=machine.machines,
        variables=machine.variables,
    )
    return attempt, trees


def machine_facts() -> Attempt:
    """Return the packages and the machine of this process, without code."""
    return Attempt(
        global_step=0,
        packages=installed_packages(),
        libraries=library_versions(),
        processor=processor_name(),
        cores=usable_cores(),
        system=platform.platform(),
        machines=world_size() // local_world_size(),
        variables={name: os.environ[name] for name in NUMERIC_VARIABLES if name in os.environ},
    )


def installed_packages() -> dict[str, str]:
    """Return the versions of all installed packages by name.

    Versions are read from the names of the .dist-info folders. `importlib.metadata` would read a
    file of each, and hold Python's lock meanwhile.
    """
    packages: dict[str, str] = {}
    for entry in sys.path:
        folder = Path(entry)
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue  # an archive, or no folder
        for name in names:
            if name.endswith(".dist-info"):
                package, _, version = name.removesuffix(".dist-info").rpartition("-")
                packages.setdefault(re.sub(r"[-_.]+", "-", package).lower(), version)
    return dict(sorted(packages.items()))
