"""The receipt of a proof, `proof.json`: the checks, the code, the machine, and the results."""

from datetime import UTC, datetime
from pathlib import Path

from pydantic import Field

from common.errors import UserError
from common.json_files import write_json
from common.run_directory.code_tree import ask_git, commit_of
from common.run_directory.records import Environment, Record, read_record
from common.system.machine import processor_name
from common.system.platforms import usable_cores

FORMAT = 1  # of the receipt; another number stands for another structure


class CheckResult(Record):
    """The answer of one check."""

    name: str
    question: str
    passed: bool | None  # None: the check does not apply to this recipe
    compared: str
    causes: list[str]
    advice: str
    seconds: float


class ProvenCode(Record):
    """A folder of code that the runs used: the recipe's, or that of this library.

    Equal commits and patches mean equal code, including modules beside the recipe.
    """

    commit: str | None  # None: the folder is in no git repository
    # Of a patch of all that differed from the commit; without a commit, of all files that the runs
    # used. None: nothing differed.
    patch_sha256: str | None
    not_saved: list[str]  # files that the patch lacks, each with the reason


class ProofReceipt(Record):
    """The contents of `proof.json`."""

    format: int = Field(ge=1)
    passed: bool
    recipe: str  # its file, as the command line named it
    recipe_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    recipe_commit: str | None  # of the repository that the recipe is in
    recipe_is_edited: bool | None  # whether the file differs from this commit; None without one
    # The recipe's folder, and that of this library if it is another. Empty: no run has written it,
    # or an earlier version made the receipt.
    code: list[ProvenCode] = Field(default_factory=list)
    command: str
    flags: list[str]  # words of the reference run
    seed: int  # of the draws
    updates: int  # of the reference run; 0 if it failed
    processor: str
    cores: int
    environment: Environment | None  # of the reference run; None if it failed
    began: str  # UTC, ISO 8601
    seconds: float
    checks: list[CheckResult]


def write_receipt(path: Path, receipt: ProofReceipt) -> None:
    """Write a receipt.

    Raises:
        UserError: the file can't be written.
    """
    write_json(path, receipt.model_dump(mode="json"))


def read_receipt(path: Path) -> ProofReceipt:
    """Return the receipt in a file.

    Raises:
        UserError: the file is missing, is no receipt, or has another format.
    """
    receipt = read_record(path, ProofReceipt)
    if receipt.format != FORMAT:
        raise UserError(
            f"{path} is a receipt in format {receipt.format}, but this version of recipes reads "
            f"only format {FORMAT}",
            advice="repeat the proof with this version",
        )
    return receipt


def commit_of_file(path: Path) -> str | None:
    """Return the commit of the repository that a file is in; None if it is in none."""
    return commit_of(path.resolve().parent)


def is_edited(path: Path) -> bool | None:
    """Whether a file differs from the commit, or is not in it; None if it is in no repository."""
    if commit_of_file(path) is None:
        return None
    file = path.resolve()
    return ask_git(file.parent, "status", "--porcelain", "--", file.name) != b""


def hardware() -> tuple[str, int]:
    """Return the name of this machine's processor, and how many cores this process may use."""
    return processor_name(), usable_cores()


def present_time() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
