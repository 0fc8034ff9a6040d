"""The receipt of a reproduction, `reproduction.json`: what was compared, and the result."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from common.errors import UserError
from common.run_directory.record_files import Record, read_record_if_there
from common.storage.json_files import write_json

FORMAT = 1  # the version of the receipt's structure
RECEIPT = "reproduction.json"  # in the new run's folder

Result = Literal[
    "running", "equal bits", "within tolerance", "beyond tolerance", "another experiment"
]


class FactDifference(Record):
    """A fact in which the new run differs from the old one."""

    fact: str  # the label of the fact
    before: str  # the value of the old run
    now: str  # the value of the new run
    changes_bits: bool  # whether it makes equal bits unlikely
    defines_experiment: bool = False  # whether a different value makes a different experiment


class FigureDifference(Record):
    """A figure that differs in a row; None stands for NaN, or for a figure that a run lacks."""

    update: int
    figure: str
    before: float | None
    now: float | None


class RowsCompared(Record):
    """The rows of `metrics.jsonl`, without the figures that depend on the clock."""

    rows: int  # the number of rows that both runs have
    missing: list[int] = Field(default_factory=list)  # the updates whose row only the old run has
    # The updates of the old run's rows whose training figures can't be compared, because the new
    # run has its log lines at other updates. The other figures of these rows are compared.
    left_out: list[int] = Field(default_factory=list)
    first: FigureDifference | None = None  # the first difference; None: all figures are equal
    # The update of the last row before the first difference. Without one, of the last common row.
    previous_update: int | None = None
    at_end: FigureDifference | None = None  # the same figure in the last row


class WeightsCompared(Record):
    """The digests of checkpoints and of the exported weights."""

    checkpoints: int  # the number of checkpoints whose digests both runs have
    first_differing: int | None = None  # the update of the first checkpoint that differs
    differing_files: list[str] = Field(default_factory=list)  # the files that differ in it
    exported_is_equal: bool | None = None  # None: a run has no exported weights
    exported_difference: str | None = None  # a text on how the exported weights differ


class FinalCompared(Record):
    """The figures of the final evaluation, or those of the last row if the run did not end."""

    figures: dict[str, list[float | None]] = Field(default_factory=dict)  # old and new value
    allowed: dict[str, float] = Field(default_factory=dict)  # the allowed absolute differences
    # The figure with the largest difference, relative to the allowed one.
    largest: str | None = None
    largest_difference: float | None = None  # its absolute difference; None: missing or NaN
    samples: int | None = None  # the number of samples behind the allowed difference of `largest`
    is_within_tolerance: bool = True


class Reproduction(Record):
    """The contents of `reproduction.json`."""

    format: int = Field(ge=1)
    original: str  # the directory of the old run
    original_run_id: str | None
    flags: list[str]  # the command-line words that replaced flags of the old run
    result: Result
    exit_status: int = 0
    command: str = ""  # the command that trained the new run
    commit: str | None = None  # the commit of the recipe's code
    code: str = ""  # the source of the code
    gaps: list[str] = Field(default_factory=list)  # sentences on what the old run did not record
    differences: list[FactDifference] = Field(default_factory=list)
    rows: RowsCompared | None = None
    weights: WeightsCompared | None = None
    final: FinalCompared | None = None
    tolerance: float | None  # the relative tolerance; None: see `allowed_difference`
    explanation: str = ""
    processor: str | None = None
    began: str  # the time of the start, UTC, ISO 8601
    line: str = ""  # the result in one line


def default_output(directory: Path) -> Path:
    """Return the folder of a reproduction, unless `--output-dir` names another."""
    return directory.with_name(f"{directory.name}-reproduced")


def write_receipt(directory: Path, receipt: Reproduction) -> None:
    """Write the receipt into the new run's folder; a `UserError` if it can't be written."""
    write_json(directory / RECEIPT, receipt.model_dump(mode="json"))


def read_receipt(directory: Path) -> Reproduction | None:
    """Return the receipt in a run's folder; None if there is none.

    Raises:
        UserError: the file can't be read, is not a receipt, or has a different format.
    """
    file = directory / RECEIPT
    reproduce_again = "pass another --output-dir to reproduce the run again"
    advice = f"restore it from a backup, or {reproduce_again}"
    receipt = read_record_if_there(file, Reproduction, advice)
    if receipt is not None and receipt.format != FORMAT:
        raise UserError(
            f"{file} has format {receipt.format}, but this version of recipes reads only format "
            f"{FORMAT}",
            advice=reproduce_again,
        )
    return receipt
