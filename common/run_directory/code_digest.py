"""A digest of the code that a run uses beside its recipe, to tell whether two runs had the same."""

import os
from pathlib import Path

from common.run_directory.code_tree import imported_file_names
from common.storage.digests import digest_of_json, sha256_of_file

PACKAGE = Path(__file__).parents[1]  # the package `common`, in the folder from which it is imported
TOOLS = "tools"  # a folder of the library; its modules compare and check runs, and train nothing


def digest_of_code_beside(recipe_file: Path) -> str | None:
    """Return the SHA-256 of the code beside a recipe: this library and the user's imported modules.

    The recipe is left out, because the run keeps its text. The folders that the files lie in do not
    matter. The result is None if a file can't be read.

    Args:
        recipe_file: the recipe's file.
    """
    try:
        library_digests = digests_of_library()
        user_digests = sorted(map(sha256_of_file, imported_user_files(recipe_file)))
    except OSError:
        return None
    return digest_of_json([library_digests, user_digests])


def digests_of_library() -> dict[str, str]:
    """Return the SHA-256 of each file of this library that may train, by its path within it."""
    digests: dict[str, str] = {}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE)
        if name.parts[0] != TOOLS:
            digests[name.as_posix()] = sha256_of_file(path)
    return digests


def imported_user_files(recipe_file: Path) -> set[Path]:
    """Return the files of the user's imported modules, without the recipe."""
    of_library = f"{PACKAGE}{os.sep}"
    names = [name for name in imported_file_names() if not name.startswith(of_library)]
    return {Path(name).resolve() for name in names} - {recipe_file.resolve()}
