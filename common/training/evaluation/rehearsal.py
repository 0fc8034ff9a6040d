"""The rehearsal of the evaluation, which comes before the first update."""

from typing import Literal


class Rehearsal:
    """A short evaluation before the first update, which finds mistakes while they are cheap.

    The rehearsal is due at the first batch of each start. Until that batch is recorded, evaluations
    read one batch, and then a batch with the same samples twice. The repetition shows whether the
    recipe added up means where it should have added totals. The figures are checked and discarded.

    The rehearsal's state is one of these:

    - ``wanted``: the first batch has not come yet.
    - ``due``: the recipe should evaluate now.
    - ``reading``: the recipe evaluates, and loaders yield only the two batches.
    - ``read``: the evaluation is over, and `run.log` has not had its figures yet.
    - ``checked``: the figures are as they should be. The recipe may evaluate again before it
      records the first batch, and that is a rehearsal too.
    - ``over``: all evaluations are real evaluations.
    """

    def __init__(self, is_wanted: bool) -> None:
        self.state: Literal["wanted", "due", "reading", "read", "checked", "over"]
        self.state = "wanted" if is_wanted else "over"
        # The samples of each batch that the loaders have given to the rehearsal.
        self.batch_sizes: list[int] = []

    @property
    def is_wanted(self) -> bool:
        """Whether the rehearsal becomes due at the next batch."""
        return self.state == "wanted"

    @property
    def is_due(self) -> bool:
        """Whether the recipe should evaluate now."""
        return self.state == "due"

    @property
    def is_on(self) -> bool:
        """Whether an evaluation that begins now is a rehearsal."""
        return self.state in ("due", "reading", "read", "checked")

    @property
    def is_reading(self) -> bool:
        """Whether loaders yield only the batches of a rehearsal."""
        return self.state == "reading"

    def make_due(self, is_replaced: bool) -> None:
        """Make the rehearsal due if it is wanted, unless a real evaluation replaces it.

        A resumed run may begin with a real evaluation, which finds the same mistakes.
        """
        if self.is_wanted:
            self.state = "over" if is_replaced else "due"

    def begin_evaluation(self) -> None:
        """Note that the recipe evaluates now."""
        self.state = "reading"
        self.batch_sizes = []

    def end_evaluation(self) -> None:
        """Note that the evaluation has read its batches. Its figures come later, to `run.log`."""
        self.state = "read"

    def accept_figures(self) -> None:
        """Note that the figures of the rehearsal are as they should be."""
        self.state = "checked"

    def end(self) -> None:
        """Make all further evaluations real, even if the recipe has not rehearsed."""
        self.state = "over"

    def add_note_to(self, error: BaseException, is_explained: bool) -> None:
        """If an error came during a rehearsal, add a note that says so.

        A `UserError` gets none, because it is a `SystemExit`, which Python prints without notes.

        Args:
            is_explained: whether the cause of the error is known. Otherwise the cause may be that
                the evaluation needs all data, so the note names the way to turn rehearsals off.
        """
        if self.state not in ("reading", "read") or not isinstance(error, Exception):
            return
        note = (
            "The error came in the rehearsal of the evaluation, on a few samples before the first "
            "update."
        )
        if not is_explained:
            note += (
                " Only if the evaluation is right but needs all data, turn the rehearsal off by "
                "Run(config, __file__, OBJECTIVE, rehearse=False)."
            )
        error.add_note(note)
