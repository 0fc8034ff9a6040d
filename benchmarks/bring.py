"""List the packages that a machine without a network lacks, to bring them along as wheels.

python3 -m pip list --format=freeze > installed.txt                 # on that machine
python benchmarks/bring.py --installed installed.txt                # here
python benchmarks/bring.py --installed installed.txt --check        # here, and check the list

The list has the requirements of `pyproject.toml` and all their requirements, for the Python of the
other machine. It leaves out packages that the machine has in a version that fits. Versions are
those of this environment. The recipes run without some packages; the list has these as comments.

`--check` makes an environment with only the packages that are installed on the other machine or
listed. It runs each recipe there, and the imports of the GPU tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

if __package__ in (None, ""):  # started as a file: make the package importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from benchmarks import REPOSITORY
from benchmarks.harness.bare_environment import installed_versions, make_bare_environment

# Needed by the tests that `gpu.py` runs.
TEST_PACKAGES = ("pytest",)
# Requirements of the project that no process of `gpu.py` imports; `--check` verifies it.
NOT_IMPORTED = ("optuna", "wandb", "wandb-workspaces")
Installed = Mapping[str, str | None]  # version by canonical name; None if unknown


@dataclass(kw_only=True)
class Options:
    """List the packages that another machine lacks."""

    installed: Path = REPOSITORY / "benchmarks" / "gpu_machine.txt"
    """File with the other machine's packages, as `pip list --format=freeze` prints them."""
    python: str = "3.12"
    """Version of Python on the other machine, which has Linux and an x86-64 processor."""
    check: bool = False
    """Run each recipe in an environment with only the packages installed there or listed."""


@dataclass(frozen=True)
class Wheel:
    """A package to bring along."""

    name: str
    version: str
    is_needed: bool  # by a process of `gpu.py`

    def __str__(self) -> str:
        """Return a line for `pip download --requirement`; a comment if it is not needed."""
        line = f"{self.name}=={self.version}"
        return line if self.is_needed else f"# {line}"


def read_installed(file: Path) -> dict[str, str | None]:
    """Return the packages that a file of `pip list --format=freeze` names, by canonical name."""
    installed: dict[str, str | None] = {}
    for line in file.read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text:
            name, _, version = text.partition("==")
            installed[canonicalize_name(name.split(" @ ")[0])] = version or None
    return installed


def project_requirements() -> list[Requirement]:
    """Return the requirements in `pyproject.toml`, and those of the GPU tests."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return [Requirement(text) for text in (*project["dependencies"], *TEST_PACKAGES)]


def missing_wheels(
    requirements: Iterable[Requirement], installed: Installed, python: str
) -> list[Wheel]:
    """Return all packages that `requirements` need and that are not installed in a fitting version.

    Raises:
        SystemExit: when this environment lacks such a package too, so that its version is unknown.
    """
    versions_here = installed_versions()
    needed: set[str] = set()
    optional: set[str] = set()
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        missing = missing_of(requirement, installed, python)
        (optional if name in NOT_IMPORTED else needed).update(missing)
    unknown = sorted((needed | optional) - versions_here.keys())
    if unknown:
        raise SystemExit(
            f"the versions of {' '.join(unknown)} are unknown: install these packages here first"
        )
    return [Wheel(name, versions_here[name], name in needed) for name in sorted(needed | optional)]


def missing_of(requirement: Requirement, installed: Installed, python: str) -> set[str]:
    """Return the missing packages among a requirement and all that it requires, by name."""
    missing: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [requirement]
    while waiting:
        current = waiting.pop()
        name = canonicalize_name(current.name)
        key = (name, frozenset(current.extras))
        if key in seen or not applies(current, python, ""):
            continue
        seen.add(key)
        if not is_satisfied(current, installed):
            missing.add(name)
            waiting += requirements_of(name, current.extras, python)
        elif current.extras:  # the package is installed, but its extra may not be
            waiting += requirements_of(name, current.extras, python, only_extras=True)
    return missing


def is_satisfied(requirement: Requirement, installed: Installed) -> bool:
    """Whether a package is installed in a version that fits; an unknown version counts as one."""
    name = canonicalize_name(requirement.name)
    if name not in installed:
        return False
    version = installed[name]
    return version is None or requirement.specifier.contains(Version(version), prereleases=True)


def requirements_of(
    name: str, extras: Iterable[str], python: str, *, only_extras: bool = False
) -> Iterator[Requirement]:
    """Yield those requirements of a package here that apply to the other machine.

    Args:
        only_extras: leave out requirements that do not depend on an extra.
    """
    try:
        texts = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return
    for text in texts:
        requirement = Requirement(text)
        is_plain = applies(requirement, python, "")
        is_of_extra = any(applies(requirement, python, extra) for extra in extras)
        if (is_plain and not only_extras) or (is_of_extra and not is_plain):
            requirement.marker = None
            yield requirement


def applies(requirement: Requirement, python: str, extra: str) -> bool:
    """Whether a requirement's marker holds on the other machine."""
    if requirement.marker is None:
        return True
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": extra,
    }
    return requirement.marker.evaluate(environment)


def left_out(installed: Installed, wheels: Iterable[Wheel], python: str) -> set[str]:
    """Return the packages of this environment that the other machine will not have.

    Packages that this environment's versions of kept packages require stay: the other machine's
    versions may require other packages instead.
    """
    installed_here = installed_versions().keys()
    kept = {"accelerate-recipes", *(wheel.name for wheel in wheels if wheel.is_needed)}
    kept |= installed.keys() & installed_here
    required: set[str] = set()
    for name in kept - {"accelerate-recipes"}:
        required |= missing_of(Requirement(name), {}, python)
    return installed_here - kept - required


def run_without(missing: set[str]) -> None:
    """Run what `gpu.py` starts in an environment that lacks the packages `missing`.

    Raises:
        SystemExit: when a command fails; with its error.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = make_bare_environment(folder / "environment", missing)
        write_texts(folder / "texts")
        for words in launches(folder):
            command = [str(python), *words]
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}
            environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
            completed = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, encoding="utf-8"
            )
            if completed.returncode != 0:
                raise SystemExit(f"{' '.join(command)} failed:\n{completed.stderr[-2000:]}")


def launches(folder: Path) -> list[list[str]]:
    """Return the shortest commands that `gpu.py` starts, each as the arguments of Python."""
    recipes = REPOSITORY / "recipes"
    small = ["--max-steps", "2", "--batch-size", "4", "--tracker", "none", "--epochs", "1"]
    images = ["--dataset", "synthetic", "--image-size", "8"]
    texts = ["--dataset", str(folder / "texts"), "--model", "scratch"]
    data = {"mnist_mlp": images, "resnet": images, "bert": texts}
    commands = [
        [str(recipes / f"{name}.py"), *flags, *small, "--output-dir", str(folder / name)]
        for name, flags in data.items()
    ]
    return [*commands, ["-c", "import benchmarks.gpu, tests.gpu.test_training"]]


def write_texts(folder: Path) -> None:
    """Write a small data set of texts."""
    folder.mkdir()
    for split in ("train", "validation"):
        rows = [f"{word} {number},{word}" for number in range(8) for word in ("red", "green")]
        (folder / f"{split}.csv").write_text("\n".join(["text,label", *rows]) + "\n")


def main(options: Options) -> None:
    """Print the list, and check it with `--check`."""
    installed = read_installed(options.installed)
    wheels = missing_wheels(project_requirements(), installed, options.python)
    print(f"# Missing in {options.installed.name}, for Python {options.python}. Download with:")
    print(f"# {download_command(options.python)}")
    for wheel in wheels:
        print(wheel)
    if options.check:
        run_without(left_out(installed, wheels, options.python))
        print("# checked: each recipe runs with these packages and those installed there")


def download_command(python: str) -> str:
    """Return the command that downloads the wheels of this list."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 17)]
    platforms += ["manylinux2014_x86_64", "manylinux1_x86_64"]
    words = ["pip download --no-deps --only-binary=:all:", f"--python-version {python}"]
    words += [f"--platform {platform}" for platform in platforms]
    return " ".join([*words, "--dest WHEELS --requirement THIS_FILE"])


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options))
