"""Trains a past run again, compares both, and writes the receipt."""

import platform
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from common.console import CONSOLE, say, warn
from common.digests import sha256_of_file
from common.errors import UserError
from common.run_directory.provenance import machine_facts
from common.run_directory.records import CONFIG
from common.sentences import writing
from common.system.devices import device_name
from common.system.platforms import shown_path
from common.tools.launching.launched_run import LaunchedRun
from common.tools.prove.receipt import present_time
from common.tools.reproduce.code import PlacedCode, code_of
from common.tools.reproduce.comparison import compare_final, compare_rows, compare_weights
from common.tools.reproduce.conclusion import (
    Comparison,
    exit_status_of,
    explanation_of,
    in_words,
    result_of,
)
from common.tools.reproduce.facts import differences_of
from common.tools.reproduce.launching import command_of, environment_of, shown_command
from common.tools.reproduce.past_run import PastRun, read_original, read_past_run
from common.tools.reproduce.receipt import (
    FORMAT,
    FactDifference,
    Reproduction,
    read_receipt,
    write_receipt,
)
from common.tools.reproduce.report import line_of, show_differences, show_plan, show_result

STOPPED = 130  # exit status after Ctrl-C
FIX_ADVICE = "fix the reported error"
# A published run has names in the place of paths.
PATHS_ADVICE = (
    "if data or a checkpoint are missing on this machine, add --dataset PATH, --model PATH or "
    "--init-from PATH behind the run; otherwise fix the reported error"
)


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    directory: Path  # of the run to reproduce, absolute
    output: Path  # of the new run, absolute
    flags: tuple[str, ...]  # words that replace flags of the run
    tolerance: float | None  # relative, for all figures; None: the usual ones
    uses_present_code: bool


def reproduce(request: Request) -> int:
    """Train a run again, or finish an interrupted reproduction, and return the exit status.

    Raises:
        UserError: the run can't be reproduced.
        SystemExit: with status 130, after Ctrl-C or SIGTERM. The new run has saved itself.
    """
    past = read_original(request.directory)
    claim(request, past)
    with interruptible(), code_of(past, request.uses_present_code) as code:
        expected = run_expected(past, code)
        shown = differences_of(past, expected)
        show_plan(past, code.source, request.flags, shown)
        command = command_of(past, code.recipe, request.flags, request.output)
        check = FirstCheck(past, expected, shown)
        new = train(request, past, command, environment_of(past, code), check)
    differences = differences_of(past, new)
    check.show_more(differences)
    comparison = compare(past, new, differences, request.tolerance)
    receipt = make_receipt(request, past, new, comparison, code, command)
    write_receipt(request.output, receipt)
    show_result(comparison, receipt, request.output)
    return comparison.exit_status


class FirstCheck:
    """Compares the facts of the new run once it has recorded them, before it trains for long."""

    def __init__(self, past: PastRun, expected: PastRun, shown: Sequence[FactDifference]) -> None:
        """Prepare to compare.

        Args:
            past: the old run.
            expected: what was known of the new run before it started.
            shown: the differences of both, which are on the screen.
        """
        self.past = past
        self.expected = expected
        self.shown = [*shown]
        self.is_done = False

    def compare(self, output: Path) -> None:
        """Compare the new run in `output`, which has written its `config.json`; only once."""
        if self.is_done:
            return
        self.is_done = True
        # The new run may not have written its attempts yet.
        new = replace(read_past_run(output), attempts=self.expected.attempts)
        more = self.show_more(differences_of(self.past, new))
        choices = [in_words(difference) for difference in more if difference.defines_experiment]
        if choices:
            warn(f"this is another experiment than the run: {'; '.join(choices)} (Ctrl-C stops it)")

    def show_more(self, differences: Sequence[FactDifference]) -> list[FactDifference]:
        """Show those differences that are not on the screen yet, and return them."""
        more = [difference for difference in differences if difference not in self.shown]
        if more:
            say("The new run recorded more differences:")
            show_differences(more)
            self.shown += more
        return more


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM act like Ctrl-C in the `with` block, and say how to continue after either."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        say("stopped: continue with the same command")
        raise SystemExit(STOPPED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def claim(request: Request, past: PastRun) -> None:
    """Mark the folder of the new run as a reproduction of this run with these flags.

    Raises:
        UserError: the folder has another run, or a reproduction with other flags.
    """
    output = request.output
    advice = "pass another --output-dir"
    if output == request.directory:
        raise UserError(f"--output-dir {output} is the run to reproduce", advice=advice)
    receipt = read_receipt(output)
    if receipt is None:
        if (output / CONFIG).exists():
            raise UserError(f"{output} contains a run that is not a reproduction", advice=advice)
        with writing(f"--output-dir {output}"):
            output.mkdir(parents=True, exist_ok=True)
        write_receipt(output, new_receipt(request, past))
        return
    claimed = (receipt.original_run_id, receipt.flags)
    if claimed != (past.config.run_id, [*request.flags]):
        raise UserError(
            f"{output} contains another reproduction, of {receipt.original} with "
            f"{' '.join(receipt.flags) or 'its own flags'}",
            advice=advice,
        )


def new_receipt(request: Request, past: PastRun) -> Reproduction:
    """Return the receipt of a reproduction that begins."""
    return Reproduction(
        format=FORMAT,
        original=str(request.directory),
        original_run_id=past.config.run_id,
        flags=[*request.flags],
        result="running",
        tolerance=request.tolerance,
        began=present_time(),
    )


def run_expected(past: PastRun, code: PlacedCode) -> PastRun:
    """Return those records of the new run that are known before it starts."""
    environment = past.config.environment
    device = torch.device("cpu")
    if environment.device_type != "cpu":
        device = torch.accelerator.current_accelerator() or device
    machine = machine_facts()
    present = machine.model_copy(
        update={
            "trees": code.trees,
            "variables": past.attempt.variables,
            "imported": past.attempt.imported,
            "world_size": past.attempt.world_size,
            "threads_per_process": past.attempt.threads_per_process,
            "mixed_precision": past.attempt.mixed_precision,
        }
    )
    changes = {
        "device": device_name(device),
        "device_type": device.type,
        "python": platform.python_version(),
        "versions": {name: machine.packages.get(name, "none") for name in environment.versions},
    }
    source = past.config.source.model_copy(update={"sha256": sha256_of_file(code.recipe)})
    config = past.config.model_copy(
        update={"environment": environment.model_copy(update=changes), "source": source}
    )
    return replace(past, config=config, attempts=[present])


def train(
    request: Request,
    past: PastRun,
    command: list[str],
    environment: dict[str, str],
    check: FirstCheck,
) -> PastRun:
    """Train the new run as far as the old one came, and return its records.

    Args:
        environment: all variables of the command.
        check: is made when the new run has recorded its facts.

    Raises:
        UserError: the new run failed, unless the old one failed as well.
    """
    output = request.output
    if is_far_enough(output, past):
        return read_past_run(output)
    say(f"training {shown_path(output)}")
    with (
        CONSOLE.status(output.name) as progress,
        closing(LaunchedRun(command, output, environment)) as run,
    ):
        for record in run.follow():
            check.compare(output)
            progress.update(f"{output.name}  {record.last_step} of {past.last_step} updates")
            if not past.is_complete and record.last_step >= past.last_step:
                break  # the old run came no further; this run saves itself and ends
    if not (output / CONFIG).is_file():
        raise UserError(
            f"the new run did not begin to train: {run.reason()}",
            advice=(
                f"{PATHS_ADVICE if past.is_published else FIX_ADVICE}, then repeat the command"
            ),
        )
    new = read_past_run(output)
    if new.is_complete or is_far_enough(output, past):
        return new
    if new.status.status == "failed" and past.status.status == "failed" and new.rows:
        say(f"both runs failed; the new one: {run.reason()}")
        return new
    raise UserError(
        f"the new run ended at update {new.last_step} of {past.last_step}: {run.reason()}",
        advice="fix the reported error, then repeat the command",
    )


def is_far_enough(output: Path, past: PastRun) -> bool:
    """Whether the new run needs no more training: it ended, or came as far as the old run."""
    if not (output / CONFIG).is_file():
        return False
    new = read_past_run(output)
    return new.is_complete or (not past.is_complete and new.last_step >= past.last_step)


def compare(
    past: PastRun, new: PastRun, differences: Sequence[FactDifference], tolerance: float | None
) -> Comparison:
    """Compare both runs, and draw the conclusion.

    Args:
        differences: the facts in which they differ.
        tolerance: of the final figures; see `compare_final`.
    """
    rows = compare_rows(past, new)
    weights = compare_weights(past, new)
    final = compare_final(past, new, tolerance)
    result = result_of(rows, weights, final, differences)
    return Comparison(
        rows=rows,
        weights=weights,
        final=final,
        result=result,
        exit_status=exit_status_of(result, differences),
        explanation=explanation_of(result, differences, past.gaps()),
        differences=[*differences],
    )


def make_receipt(
    request: Request,
    past: PastRun,
    new: PastRun,
    comparison: Comparison,
    code: PlacedCode,
    command: Sequence[str],
) -> Reproduction:
    """Return the receipt of a reproduction that is over.

    Args:
        command: that trained the new run.
    """
    commit = code.trees[0].commit
    now = present_time()
    return Reproduction(
        format=FORMAT,
        original=str(request.directory),
        original_run_id=past.config.run_id,
        flags=[*request.flags],
        result=comparison.result,
        exit_status=comparison.exit_status,
        command=shown_command(command),
        commit=commit,
        code=code.source,
        gaps=past.gaps(),
        differences=comparison.differences,
        rows=comparison.rows,
        weights=comparison.weights,
        final=comparison.final,
        tolerance=request.tolerance,
        explanation=comparison.explanation,
        processor=new.attempt.processor,
        began=now,
        line=line_of(comparison, request.directory.name, new, commit, now),
    )
