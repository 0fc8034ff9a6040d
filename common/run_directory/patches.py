"""Makes the patches of single files, without secrets, in git's format."""

import os
from fnmatch import fnmatch
from pathlib import Path

from common.system.text_secrets import PRIVATE_KEY, without_secrets

MAX_BYTES_OF_FILE = 2**20
SECRET_FILES = (
    ".env",
    ".env.*",
    "*.env",
    "*.pem",
    "*.key",
    "*.p12",
    "*.pfx",
    "id_rsa*",
    "id_ed25519*",
    ".netrc",
    "_netrc",
    ".pypirc",
    "*credentials*",
    "*secrets.*",
    "secret.*",
    "kaggle.json",
)
# The value of an environment variable is a secret if its name ends with one of these words.
SECRET_VARIABLES = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIALS")
MIN_SECRET = 8  # characters; a shorter value may be an ordinary word
FIRST_LINE = "diff --git "  # the beginning of a file's part in a patch
MASKED = "*** stands for what looks like a secret"  # a problem in `CodeTree.not_saved`


def split_patch(patch: str) -> list[str]:
    """Split a patch into one part for each file, so that a file with a secret can be left out."""
    parts: list[str] = []
    for line in lines_of(patch):
        if line.startswith(FIRST_LINE) or not parts:
            parts.append("")
        parts[-1] += line
    return parts


def lines_of(text: str) -> list[str]:
    """Return the lines of a text with their line feeds.

    Only a line feed ends a line, as in git. `str.splitlines` knows further ends of lines.
    """
    lines = text.split("\n")
    whole = [f"{line}\n" for line in lines[:-1]]
    return [*whole, lines[-1]] if lines[-1] else whole


def file_of_patch(part: str) -> str:
    """Return the file that a part of a patch changes."""
    names = part.split("\n", 1)[0].removeprefix(FIRST_LINE)
    # The text is "a/NAME b/NAME" with the same name twice, because patches here have no renames.
    return names[: len(names) // 2].removeprefix("a/")


def reason_to_leave_out(path: Path) -> str | None:
    """Return the reason why a file must not be in a patch; None if it may be there."""
    if any(fnmatch(path.name.lower(), pattern) for pattern in SECRET_FILES):
        return "files with such names hold secrets"
    try:
        size = path.lstat().st_size
    except OSError:
        # If git tracks the file, the file was deleted, and the patch removes it. If git does not
        # track it, `patch_of_new_file` reports that it can't be read.
        return None
    return f"it has {size:,} bytes" if size > MAX_BYTES_OF_FILE else None


def patch_of_new_file(root: Path, name: str) -> tuple[str | None, str | None]:
    """Return a patch that adds a file, and a problem with it.

    The problem says why the patch is None, or that a secret in it is masked. It is None for a
    complete patch.
    """
    reason = reason_to_leave_out(root / name)
    if reason is not None:
        return None, reason
    try:
        text = (root / name).read_bytes().decode("utf-8")
    except (OSError, UnicodeError) as error:
        return None, f"it can't be read ({type(error).__name__})"
    lines = lines_of(text)
    header = [f"{FIRST_LINE}a/{name} b/{name}\n", "new file mode 100644\n"]
    if lines:
        header += ["--- /dev/null\n", f"+++ b/{name}\n", f"@@ -0,0 +1,{len(lines)} @@\n"]
    body = [f"+{line}" for line in lines]
    if lines and not lines[-1].endswith("\n"):
        body[-1] += "\n\\ No newline at end of file\n"
    return with_masked_secrets("".join([*header, *body]))


def with_masked_secrets(part: str) -> tuple[str | None, str | None]:
    """Return a file's part of a patch without secrets, and a problem: see `patch_of_new_file`.

    A secret in a line that the patch adds is masked. The part is None in three cases:

    - A secret is in any other line. Git could not apply the patch if that line was masked.
    - A private key begins. It goes on in the next lines, which don't look like secrets.
    - The file is not text.
    """
    if "\nBinary files " in part or "\nGIT binary patch\n" in part:
        return None, "it is not text"
    values = secrets_of_environment()
    lines = []
    is_masked = False
    for line in lines_of(part):
        masked_line = without_secrets(line, values)
        if masked_line == line:
            lines.append(line)
            continue
        begins_private_key = PRIVATE_KEY in line
        if not line.startswith("+") or begins_private_key:
            return None, "it has what looks like a secret"
        lines.append(masked_line)
        is_masked = True
    return "".join(lines), MASKED if is_masked else None


def secrets_of_environment() -> list[str]:
    """Return the values of this process's environment variables whose names mark secrets.

    Values shorter than `MIN_SECRET` are left out.
    """
    return [
        value
        for name, value in os.environ.items()
        if name.upper().endswith(SECRET_VARIABLES) and len(value) >= MIN_SECRET
    ]
