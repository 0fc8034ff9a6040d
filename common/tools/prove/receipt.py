"""The receipt of a proof, `proof.json`: its checks and results, the code, and the machine."""

from pathlib import Path

from pydantic import Field

from common.errors import UserError
from common.run_directory.record_files import Record, read_record
from common.run_directory.records import Environment
from common.storage.json_files import write_json

FORMAT = 1  # the version of the receipt's structure


class CheckResult(Record):
    """The verdict of one check, as the receipt stores it; see `Verdict` in `prove.verdicts`."""

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

    commit: str | None  # None: the folder is not in a git repository
    # The digest of a patch with all changes since the commit. Without a commit, the patch has all
    # files that the runs used. None: there are no changes.
    patch_sha256: str | None
    not_saved: list[str]  # the files that are missing in the patch, each with the reason


class ProofReceipt(Record):
    """The contents of `proof.json`."""

    format: int = Field(ge=1)
    passed: bool
    recipe: str  # the recipe's file, as the command line names it
    recipe_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    recipe_commit: str | None  # the commit of the recipe's repository; None without one
    recipe_is_edited: bool | None  # whether the file differs from the commit; None without one
    # The code in the recipe's folder and in this library's folder, if these differ. Empty if no run
    # recorded its code.
    code: list[ProvenCode]
    command: str
    flags: list[str]  # the flags of the reference run, as words of a command line
    seed: int  # the seed of the random interruption points
    updates: int  # of the reference run; 0 if it failed, or if no check needed it
    processor: str
    cores: int
    # Of the reference run, or of another run if there is no reference run; None if all runs failed.
    environment: Environment | None
    began: str  # the time in UTC, in ISO 8601
    seconds: float  # the duration of the proof
    checks: list[CheckResult]


def write_receipt(path: Path, receipt: ProofReceipt) -> None:
    """Write a receipt.

    Raises:
        UserError: the file can't be written.
    """
    write_json(path, receipt.model_dump(mode="json"))


def read_receipt(path: Path) -> ProofReceipt:
    """Return the receipt in a file. A proof never calls this; a benchmark reads receipts with it.

    Raises:
        UserError: the file is missing, is not a receipt, or has a different format.
    """
    receipt = read_record(path, ProofReceipt)
    if receipt.format != FORMAT:
        raise UserError(
            f"{path} is a receipt in format {receipt.format}, but this version of recipes reads "
            f"only format {FORMAT}",
            advice="repeat the proof with this version",
        )
    return receipt
