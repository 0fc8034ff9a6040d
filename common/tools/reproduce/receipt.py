"""The receipt of a reproduction, `reproduction.json`: what was compared, and the result."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from common.json_files import write_json
from common.run_directory.records import Record, read_record_if_there

FORMAT = 1  # of the receipt; another number stands for another structure
RECEIPT = "reproduction.json"  # in the new run's folder

Result = Literal[
    "running", "equal bits", "within tolerance", "beyond tolerance", "another experiment"
]


class FactDifference(Record):
    """A fact in which the new run differs from the old one."""

    fact: str
    before: str
    now: str
    changes_bits: bool  # whether it makes equal bits unlikely
    defines_experiment: bool = False  # whether a run with another value is another experiment


class FigureDifference(Record):
    """A figure that differs in a row; None stands for NaN, or for a figure that a run lacks."""

    update: int
    figure: str
    before: float | None
    now: float | None


class RowsCompared(Record):
    """The rows of `metrics.jsonl`, without the figures that depend on the clock."""

    rows: int  # that both runs have
    missing: list[int] = Field(default_factory=list)  # updates whose row only the old run has
    first: FigureDifference | None = None  # None: all figures are equal
    previous_update: int | None = None  # of the last row that is equal
    at_end: FigureDifference | None = None  # the same figure in the last row


class WeightsCompared(Record):
    """The digests of checkpoints and of the exported weights."""

    checkpoints: int  # of which both runs have digests
    first_differing: int | None = None  # the update of a checkpoint
    differing_files: list[str] = Field(default_factory=list)  # of that checkpoint
    exported_is_equal: bool | None = None  # None: a run has none
    exported_difference: str | None = None


class FinalCompared(Record):
    """The figures of the final evaluation; of a run that did not end, those of its last row."""

    figures: dict[str, list[float | None]] = Field(default_factory=dict)  # before and now
    allowed: dict[str, float] = Field(default_factory=dict)  # absolute differences
    largest: str | None = None  # the figure whose difference is the largest part of the allowed one
    largest_difference: float | None = None  # absolute; None: a figure is missing or NaN
    samples: int | None = None  # from which the allowed difference of `largest` follows
    is_within_tolerance: bool = True


class Reproduction(Record):
    """The contents of `reproduction.json`."""

    format: int = Field(ge=1)
    original: str  # the directory of the old run
    original_run_id: str | None
    flags: list[str]  # words that replaced flags of the old run
    result: Result
    exit_status: int = 0
    command: str = ""  # that trained the new run
    commit: str | None = None  # of the recipe's code
    code: str = ""  # where the code came from
    gaps: list[str] = Field(default_factory=list)  # what the old run lacks
    differences: list[FactDifference] = Field(default_factory=list)
    rows: RowsCompared | None = None
    weights: WeightsCompared | None = None
    final: FinalCompared | None = None
    tolerance: float | None  # relative, for all figures; None: see `allowed_difference`
    explanation: str = ""
    processor: str | None = None
    began: str  # UTC, ISO 8601
    line: str = ""  # the result in one line


def write_receipt(directory: Path, receipt: Reproduction) -> None:
    """Write the receipt into the new run's folder; a `UserError` if it can't be written."""
    write_json(directory / RECEIPT, receipt.model_dump(mode="json"))


def read_receipt(directory: Path) -> Reproduction | None:
    """Return the receipt in a run's folder; None if there is none."""
    return read_record_if_there(directory / RECEIPT, Reproduction)
