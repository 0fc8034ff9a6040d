"""Saves the facts that are needed to repeat a run: its code, its packages and its machine.

Rank 0 does this in a thread, while training begins, because git may take long in a large
repository. If the facts can't be saved, the run goes on.
"""

import ast
import os
import platform
import re
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from common.errors import UserError
from common.run_directory.code_tree import CollectedTree, imported_files, trees_of_process
from common.run_directory.record_files import read_record
from common.run_directory.records import (
    ATTEMPTS,
    PROVENANCE,
    Attempt,
    Environment,
    Flags,
    Provenance,
)
from common.storage.json_files import write_json
from common.system.devices import library_versions
from common.system.installed_code import is_installed
from common.system.launch_variables import is_main_rank, local_world_size, world_size
from common.system.platforms.limits import usable_cores
from common.system.processor import processor_name
from common.system.source_imports import absolute_imports

IMPORT_ROOT = Path(__file__).resolve().parents[2]  # the folder that `common` is imported from
# Environment variables that choose kernels or their order of sums, and so change the last bits of
# results. Only these environment variables are recorded.
NUMERIC_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_NUM_THREADS",
    "OPENBLAS_CORETYPE",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "PYTHONHASHSEED",
)
MAX_WAIT = 30.0  # seconds to wait for the thread at the end of a run


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

    def begin(self, step: int, environment: Environment, changed_flags: Flags) -> None:
        """Start to write the code, packages and machine of this attempt; see `write`.

        Args:
            step: the updates that earlier attempts made.
            environment: the environment in which this attempt trains.
            changed_flags: the flags whose values differ from those of the last attempt.
        """
        if not is_main_rank():
            return
        arguments = (step, environment, changed_flags)
        self.thread = threading.Thread(target=self.write, args=arguments)
        self.thread.daemon = True  # the process may end while git hangs
        self.thread.start()

    def wait(self) -> None:
        """Wait until the provenance is written, at most `MAX_WAIT` seconds.

        A run calls this before it unlocks its directory, because the thread writes files there.
        """
        if self.thread is not None:
            self.thread.join(MAX_WAIT)
            self.thread = None

    def write(self, step: int, environment: Environment, changed_flags: Flags) -> None:
        """Add this attempt to `attempts.json`, and write its patches; see `begin` for arguments.

        An error is ignored: the disk may be full, or this user may not write to the directory.
        """
        with suppress(OSError, UserError):
            attempt, trees = current_attempt(self.recipe_file, step, environment, changed_flags)
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
    """Return the saved attempts that still count, and the current one.

    A saved attempt no longer counts if it began at the same update as the current one, or later,
    because the current attempt makes its updates again. The current attempt is not added if it has
    the same facts as the last one that counts: see `has_same_facts`.
    """
    earlier = [old for old in saved if old.global_step < attempt.global_step]
    if earlier and has_same_facts(earlier[-1], attempt):
        return earlier
    return [*earlier, attempt]


def has_same_facts(before: Attempt, attempt: Attempt) -> bool:
    """Whether an attempt has the same facts as the one before, and changed no flags.

    Their first updates always differ, and are not compared.
    """
    not_compared = {"global_step", "changed_flags"}
    facts_before = before.model_dump(exclude=not_compared)
    facts = attempt.model_dump(exclude=not_compared)
    return facts_before == facts and not attempt.changed_flags


def current_attempt(
    recipe_file: Path, step: int, environment: Environment, changed_flags: Flags
) -> tuple[Attempt, list[CollectedTree]]:
    """Return the current attempt, and its code with the contents of the patches.

    If the recipe is in no file, because it was typed into an interpreter, no code is collected. See
    `ProvenanceWriter.begin` for the other arguments.
    """
    trees: list[CollectedTree] = []
    recipe = None
    problem = None
    if recipe_file.is_file():
        trees = trees_of_process(recipe_file, IMPORT_ROOT)
        recipe = recipe_file.resolve().relative_to(trees[0].tree.folder).as_posix()
    else:
        problem = "the recipe is in no file"
    machine = machine_facts()
    attempt = Attempt(
        **vars(machine),
        global_step=step,
        recipe=recipe,
        trees=[collected.tree for collected in trees],
        problem=problem,
        imported=imported_packages(recipe_file, machine.packages),
        world_size=environment.world_size,
        threads_per_process=environment.threads_per_process,
        mixed_precision=environment.mixed_precision,
        changed_flags=changed_flags,
    )
    return attempt, trees


def imported_packages(recipe_file: Path, packages: Collection[str]) -> list[str]:
    """Return the installed packages that the recipe and the user's other modules import, sorted.

    They are found by the import statements in the source files. If a repeated run has different
    results, `recipes reproduce` names a changed version of such a package as a possible cause.

    Args:
        packages: the normalized names of all installed packages.
    """
    files = {path for path in imported_files() if not path.is_relative_to(IMPORT_ROOT / "common")}
    modules: set[str] = set()
    for path in sorted({*files, recipe_file.resolve()}):
        modules |= modules_imported_in(path)
    imported = set()
    others = []  # modules whose package has another name: cv2 is in opencv-python, for example
    for module in sorted(modules - sys.stdlib_module_names):
        package = normalized(module)
        file = getattr(sys.modules.get(module), "__file__", None)
        if package in packages:
            imported.add(package)
        elif file is not None and is_installed(file):
            others.append(module)
    if others:  # `packages_distributions` reads files of all packages, so call it only if needed
        owners = metadata.packages_distributions()
        imported |= {normalized(name) for module in others for name in owners.get(module, ())}
    return sorted(imported)


def modules_imported_in(path: Path) -> set[str]:
    """Return the top-level names of the modules that a Python file imports, also in functions.

    Relative imports are left out. The result is empty if the file can't be read or parsed.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return set()
    return {name.partition(".")[0] for name in absolute_imports(tree)}


@dataclass(frozen=True)
class MachineFacts:
    """The packages of this process, and the machine that it runs on; `Attempt` has these fields."""

    packages: dict[str, str]
    libraries: dict[str, str]
    processor: str
    cores: int
    system: str
    machines: int
    variables: dict[str, str]


def machine_facts() -> MachineFacts:
    """Return the facts of this process and its machine."""
    return MachineFacts(
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

    The versions are in the names of the .dist-info folders. `importlib.metadata` would read a file
    in each folder, and hold Python's lock meanwhile.
    """
    packages: dict[str, str] = {}
    for entry in sys.path:
        folder = Path(entry)
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue  # an archive, or not a folder
        for name in names:
            if name.endswith(".dist-info"):
                package, _, version = name.removesuffix(".dist-info").rpartition("-")
                # The first folder that has the package counts, as in an import.
                packages.setdefault(normalized(package), version)
    return dict(sorted(packages.items()))


def normalized(package: str) -> str:
    """Return a package's name as package indexes compare it: "Foo_Bar" becomes "foo-bar"."""
    return re.sub(r"[-_.]+", "-", package).lower()
