"""The errors that end a run: a user's mistake, a request to stop, or a lost process.

Their exit statuses are here. `common.failures` recognises what an error of a library means.
"""

from collections.abc import Callable

from common.system.launch_variables import is_main_rank
from common.system.printable import printable


class UserError(SystemExit):
    """A mistake that the user can fix: the message says what is wrong, where, and what to do.

    It is a ``SystemExit``, so Python prints the message without a traceback and exits with
    status 1. All ranks meet the same mistake, so only rank 0 prints the message.

    Args:
        problem: what is wrong and where, without "error:".
        advice: what the user can do, as an instruction such as "pass --num-workers 0". The
            library always gives one, and a test checks it. A recipe's own check may do without.
        every_rank: whether each rank that raises it may print the message, because perhaps one rank
            alone has the problem. Otherwise only rank 0 prints it. At the end of a run, one rank
            prints it in any case: see `common.lifecycle.end.error_report`.
        resumable: whether the same command may succeed later, because the cause is not a mistake
            in it.
    """

    def __init__(
        self, problem: str, *, advice: str = "", every_rank: bool = False, resumable: bool = False
    ) -> None:
        self.problem = printable(problem)
        self.advice = printable(advice)
        self.message = f"{self.problem}: {self.advice}" if advice else self.problem
        self.resumable = resumable
        # A text and the number 1 both exit with status 1. Python prints only the text.
        super().__init__(f"error: {self.message}" if every_rank or is_main_rank() else 1)

    def __reduce__(self) -> tuple[Callable[..., "UserError"], tuple[str, str, bool, bool]]:
        """Pickle the error as a plain `UserError`, whatever the rank and the subclass.

        A worker sends it to its run. By default, only `code` would be pickled, which is the number
        1 on all ranks but the first.
        """
        # If this process would print the message, the one that receives the error prints it, too.
        is_printed = isinstance(self.code, str)
        return rebuilt_error, (self.problem, self.advice, is_printed, self.resumable)

    def print_on_exit(self) -> None:
        """Have this rank print the message when it exits, whichever rank it is.

        `common.lifecycle.end.error_report` chooses the rank that prints at the end of a run.
        """
        self.code = f"error: {self.message}"

    def stay_silent_on_exit(self) -> None:
        """Have this rank exit without the message, because another rank prints it."""
        self.code = 1


def rebuilt_error(problem: str, advice: str, every_rank: bool, resumable: bool) -> UserError:
    """Return the error that was pickled; pickle calls this in the process that receives it."""
    return UserError(problem, advice=advice, every_rank=every_rank, resumable=resumable)


class ReplacedDirectoryError(UserError):
    """A run's directory was removed, moved or replaced while the run wrote to it.

    No checkpoint is left to go on from. So after a failed checkpoint, the run gives `ADVICE` in
    place of the advice to resume.
    """

    ADVICE = "start the run again, and leave its directory in place"

    def __init__(self, directory: object) -> None:
        super().__init__(
            f"{directory} was removed, moved or replaced while the run wrote to it",
            advice=self.ADVICE,
        )


class TrainingError(UserError):
    """Training can't go on, or misses `--target`. The message says why, and what to try."""


class Preempted(SystemExit):
    """The run stopped on request with everything saved. Exit status 75 means: start it again."""

    def __init__(self, message: str, *, is_by_ctrl_c: bool) -> None:
        super().__init__(75)
        self.message = message  # for the user; the end of the run prints it
        self.is_by_ctrl_c = is_by_ctrl_c  # a launcher then prints tracebacks of its own


class MisfitError(Exception):
    """A saved state does not fit the object that is to take it.

    The message says why, in words for the user. The caller knows the file, and makes a sentence of
    it: `cause_text` in `common.failures.sentences` repeats the message without the class's name.
    """


class LostProcessError(RuntimeError):
    """Another rank or a loader's worker is gone or hangs. A restart helps.

    It is not a `UserError`, because the user made no mistake. Its run counts as resumable.
    """
