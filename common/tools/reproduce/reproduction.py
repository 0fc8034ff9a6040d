"""Trains an old run again, compares both, and writes the receipt."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from common.console import say, warn
from common.console.messages import CONSOLE
from common.errors import UserError
from common.failures.sentences import writing
from common.run_directory.records import CONFIG
from common.system.clock import current_time
from common.system.platforms.commands import command_line, shown_path
from common.tools.launching.launched_run import LaunchedRun
from common.tools.launching.stopping import stoppable
from common.tools.reproduce.code import RestoredCode, code_of_run
from common.tools.reproduce.compared_run import ComparedRun, read_compared_run, read_old_run
from common.tools.reproduce.comparison_in_words import fact_in_words
from common.tools.reproduce.conclusion import Conclusion, draw_conclusion
from common.tools.reproduce.expected_run import expected_new_run
from common.tools.reproduce.fact_differences import differences_of
from common.tools.reproduce.launching import command_of, environment_of, shown_command
from common.tools.reproduce.receipt import (
    FORMAT,
    FactDifference,
    Reproduction,
    read_receipt,
    write_receipt,
)
from common.tools.reproduce.report import (
    result_line,
    show_before_training,
    show_differences,
    show_result,
)

FIX_ADVICE = "fix the reported error, then repeat the command"
# The data may have been moved since, and a published run has names instead of paths.
PATHS_ADVICE = (
    f"{FIX_ADVICE}; if data or a checkpoint is missing on this machine, repeat it with "
    "--dataset PATH, --model PATH or --init-from PATH after the run"
)


@dataclass(frozen=True)
class ReproductionRequest:
    """The command line of `recipes reproduce`."""

    directory: Path  # the directory of the run to reproduce, absolute
    output: Path  # the directory of the new run, absolute
    flags: tuple[str, ...]  # the command-line words that replace flags of the run
    tolerance: float | None  # the relative tolerance; None: see `allowed_difference`
    uses_current_code: bool  # whether to run the code in its current state


def reproduce(request: ReproductionRequest) -> int:
    """Train a run again, or finish an interrupted reproduction, and return the exit status.

    Raises:
        UserError: the run can't be reproduced.
        SystemExit: with status 130, after Ctrl-C or SIGTERM. The new run has saved itself.
    """
    old = read_old_run(request.directory)
    began = claim_folder(request, old).began
    with (
        stoppable("the same command"),
        code_of_run(old, request.uses_current_code) as code,
    ):
        expected_run = expected_new_run(old, code)
        expected_differences = differences_of(old, expected_run)
        show_before_training(old, code.source, request.flags, expected_differences)
        command = command_of(old, code.recipe, request.flags, request.output)
        reporter = DifferenceReporter(old, expected_run, expected_differences)
        new = train(request, old, command, environment_of(old, code), reporter)
    differences = differences_of(old, new)
    reporter.show_more(differences)
    conclusion = draw_conclusion(old, new, differences, request.tolerance)
    receipt = make_reproduction_receipt(request, old, new, conclusion, code, command, began)
    write_receipt(request.output, receipt)
    show_result(conclusion, receipt, request.output)
    return conclusion.exit_status


class DifferenceReporter:
    """Shows each difference between the facts of the two runs once, as soon as it is recorded."""

    def __init__(
        self, old: ComparedRun, expected: ComparedRun, shown: Sequence[FactDifference]
    ) -> None:
        """Prepare to show differences.

        Args:
            old: the old run.
            expected: the expected records of the new run; see `expected_new_run`.
            shown: the differences that are on the screen already.
        """
        self.old = old
        self.expected = expected
        self.shown = [*shown]
        self.has_compared_facts = False

    def compare_facts(self, output: Path) -> None:
        """Show the differences of the new run in `output`, which has written its `config.json`.

        The tool calls this method whenever it looks at the running process. Only the first call
        compares. It comes before the new run has trained for long, so that the user can stop a
        different experiment.
        """
        if self.has_compared_facts:
            return
        self.has_compared_facts = True
        # The new run may not have written its attempts yet.
        new = replace(read_compared_run(output), attempts=self.expected.attempts)
        added = self.show_more(differences_of(self.old, new))
        changes = [
            fact_in_words(difference) for difference in added if difference.defines_experiment
        ]
        if changes:
            warn(f"this is a different experiment: {'; '.join(changes)} (Ctrl-C stops it)")

    def show_more(self, differences: Sequence[FactDifference]) -> list[FactDifference]:
        """Show those differences that are not on the screen yet, and return them."""
        added = [difference for difference in differences if difference not in self.shown]
        if added:
            say("The new run recorded more differences:")
            show_differences(added)
            self.shown += added
        return added


def claim_folder(request: ReproductionRequest, old: ComparedRun) -> Reproduction:
    """Mark the folder of the new run as a reproduction of this run with these flags.

    Only a reproduction of the same run with the same flags may continue in this folder.

    Returns:
        The receipt in the folder: a new one, or that of the reproduction to continue.

    Raises:
        UserError: the folder contains a different run, or a reproduction with different flags.
    """
    output = request.output
    advice = "pass another --output-dir"
    if output == request.directory:
        raise UserError(f"--output-dir {output} is the run to reproduce", advice=advice)
    receipt = read_receipt(output)
    if receipt is None:
        if (output / CONFIG).exists():
            raise UserError(f"{output} contains an ordinary run, not a reproduction", advice=advice)
        return write_first_receipt(request, old)
    if receipt.original_run_id != old.saved_config.run_id:
        raise UserError(
            f"{output} contains the reproduction of another run, which was in {receipt.original}",
            advice=advice,
        )
    if receipt.flags != [*request.flags]:
        if not (output / CONFIG).exists():  # nothing was trained there: the command failed early
            return write_first_receipt(request, old)
        flags = command_line(receipt.flags) or "no flags of the recipe"
        raise UserError(
            f"{output} contains a reproduction of this run with other flags ({flags})",
            advice=f"{advice}, or repeat the earlier command, with its flags, to continue it",
        )
    return receipt


def write_first_receipt(request: ReproductionRequest, old: ComparedRun) -> Reproduction:
    """Write the receipt of a reproduction that begins into its folder, and return it."""
    with writing(f"--output-dir {request.output}"):
        request.output.mkdir(parents=True, exist_ok=True)
    receipt = Reproduction(
        format=FORMAT,
        original=str(request.directory),
        original_run_id=old.saved_config.run_id,
        flags=[*request.flags],
        result="running",
        tolerance=request.tolerance,
        began=current_time(),
    )
    write_receipt(request.output, receipt)
    return receipt


def train(
    request: ReproductionRequest,
    old: ComparedRun,
    command: list[str],
    environment: dict[str, str],
    reporter: DifferenceReporter,
) -> ComparedRun:
    """Train the new run as far as the old one came, and return its records.

    Args:
        environment: all environment variables of the command.
        reporter: shows the differences as soon as the new run has recorded its facts.

    Raises:
        UserError: the new run failed, unless the old one failed as well.
    """
    output = request.output
    if is_far_enough(output, old):
        return read_compared_run(output)
    say(f"training {shown_path(output)}")
    with (
        CONSOLE.status(output.name) as progress,
        closing(LaunchedRun(command, output, environment)) as run,
    ):
        for record in run.follow():
            reporter.compare_facts(output)
            progress.update(f"{output.name}  {record.last_step} of {old.last_step} updates")
            if not old.stored.is_complete and record.last_step >= old.last_step:
                break  # the old run ended here; `closing` asks the new run to save and stop
    if not (output / CONFIG).is_file():
        raise UserError(
            f"the new run did not begin to train: {run.reason()}",
            advice=PATHS_ADVICE,
        )
    new = read_compared_run(output)
    if not (new.stored.is_complete or is_far_enough(output, old)):
        check_early_end(new, old, run.reason())
    return new


def check_early_end(new: ComparedRun, old: ComparedRun, reason: str) -> None:
    """Raise a `UserError` because the new run ended too early; if both runs failed, say so instead.

    A new run that failed before its first row has nothing to compare, so it is always an error.

    Args:
        reason: why the new run ended.
    """
    new_status = new.stored.status.status
    old_status = old.stored.status.status
    if new_status == "failed" and old_status == "failed" and new.rows:
        say(f"both runs failed; the new one: {reason}")
        return
    advice = FIX_ADVICE
    if old.is_published:
        # The new run has begun, so other flags can't continue it in the same folder.
        advice = f"{PATHS_ADVICE}, and with another --output-dir"
    if new_status == "preempted":  # a signal stopped it, so nothing needs to be mended
        advice = "repeat the command, which continues the new run"
    raise UserError(
        f"the new run ended at update {new.last_step} of {old.last_step}: {reason}",
        advice=advice,
    )


def is_far_enough(output: Path, old: ComparedRun) -> bool:
    """Whether the new run has trained enough to be compared.

    It must be complete. If the old run is not complete, its last update is enough.
    """
    if not (output / CONFIG).is_file():
        return False
    new = read_compared_run(output)
    if new.stored.is_complete:
        return True
    return not old.stored.is_complete and new.last_step >= old.last_step


def make_reproduction_receipt(
    request: ReproductionRequest,
    old: ComparedRun,
    new: ComparedRun,
    conclusion: Conclusion,
    code: RestoredCode,
    command: Sequence[str],
    began: str,
) -> Reproduction:
    """Return the receipt of a finished reproduction.

    Args:
        command: the command that trained the new run.
        began: the time at which the reproduction began, ISO 8601.
    """
    commit = code.trees[0].commit
    return Reproduction(
        format=FORMAT,
        original=str(request.directory),
        original_run_id=old.saved_config.run_id,
        flags=[*request.flags],
        result=conclusion.result,
        exit_status=conclusion.exit_status,
        command=shown_command(command),
        commit=commit,
        code=code.source,
        gaps=old.gaps(),
        differences=conclusion.differences,
        rows=conclusion.rows,
        weights=conclusion.weights,
        final=conclusion.final,
        tolerance=request.tolerance,
        explanation=conclusion.explanation,
        processor=new.attempt.processor,
        began=began,
        line=result_line(conclusion, request.directory.name, new, commit, began),
    )
