"""A digest of the code that a run uses beside its recipe, to tell whether two runs had the same."""

import os
from pathlib import Path

from common.run_directory.code_tree import imported_file_names
from common.storage.digests import digest_of_json, sha256_of_file

LIBRARY = Path(__file__).parents[1]  # the package `common`, in the folder from which it is imported
TOOLS = "tools"  # a folder of the library; its modules compare and check runs, and train nothing


def digest_of_code(recipe_file: Path) -> str | None:
    """Return the SHA-256 of this library and of the user's modules that are imported.

    The recipe is left out, because the run keeps its text. The folders that the files lie in do not
    matter. The result is None if a file can't be read.

    Args:
        recipe_file: the recipe's file.
    """
    library = {path.relative_to(LIBRARY): path for path in LIBRARY.rglob("*.py")}
    try:
        digests = {
            name.as_posix(): sha256_of_file(path)
            for name, path in library.items()
            if name.parts[0] != TOOLS
        }
        own_digests = sorted(map(sha256_of_file, own_modules(recipe_file)))
    except OSError:
        return None
    return digest_of_json([digests, own_digests])


def own_modules(recipe_file: Path) -> set[Path]:
    """Return the imported modules of the user, without the recipe."""
    of_library = f"{LIBRARY}{os.sep}"
    names = [name for name in imported_file_names() if not name.startswith(of_library)]
    return {Path(name).resolve() for name in names} - {recipe_file.resolve()}
