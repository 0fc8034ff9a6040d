"""The reason why a rank could not write a checkpoint."""

from dataclasses import dataclass
from typing import Self

from common.errors import ReplacedDirectoryError, UserError
from common.failures.disk_errors import is_disk_error, number_of


class OtherRankError(OSError):
    """Another rank could not write its part of a checkpoint. Only that rank knows the cause."""


@dataclass(frozen=True)
class SaveFailure:
    """The reason why a rank could not write a checkpoint, in a form that ranks can exchange.

    All ranks then stop with the same error: see `RankDecisions.raise_failure`.
    """

    message: str
    error_number: int | None = None  # the `errno` of the error; None for an error without one
    is_disk_error: bool = False  # a disk is full or fails; a later restart may succeed
    is_from_other_rank: bool = False  # this rank only knows that another rank failed
    is_replaced: bool = False  # the run's directory was removed, or contains another run now

    @classmethod
    def of(cls, problem: BaseException, rank: int) -> Self:
        """Return the failure that an error in the writing thread of a rank caused."""
        # Take the text of a `UserError` without its advice, because `RankDecisions.raise_failure`
        # adds another advice.
        text = problem.problem if isinstance(problem, UserError) else str(problem)
        return cls(
            f"rank {rank}: {text}",
            error_number=number_of(problem),
            is_disk_error=is_disk_error(problem),
            is_from_other_rank=isinstance(problem, OtherRankError),
            is_replaced=isinstance(problem, ReplacedDirectoryError),
        )

    def __str__(self) -> str:
        return self.message
