"""Launches a recipe in new processes, as a user would, and observes it."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from common.system.platforms import start_in_own_group, watch_for_parent
from common.tools.launching.command import launch_command, options_for
from common.tools.launching.output import ERROR, ending_in_words
from common.tools.prove.plan import ProbePlan
from common.tools.prove.warm import WarmProcess, environment_of_launches

# Started as a script, not as a module: then no folder named `common` beside the user hides ours.
PROBE = Path(__file__).with_name("probe.py")
TIMEOUT_SECONDS = 1800.0  # a launch that takes longer hangs
ENDING_SECONDS = 30.0  # in which all processes of a launch end after the first one
KILLED = -int(getattr(signal, "SIGKILL", signal.SIGTERM))  # the status of a killed launch
TOO_LONG = f"{ERROR}still running after {TIMEOUT_SECONDS:.0f} s, so it was killed\n"
LAST_LINES = 3  # of the output, in the message about a launch that failed


@dataclass(frozen=True)
class Ended:
    """How a launch ended."""

    status: int  # the exit status; below 0, the signal that ended the process
    log: Path  # all that it printed
    seconds: float

    def problem(self) -> str:
        """Return in one line how the launch ended, with the last error that it printed."""
        return ending_in_words(self.status, self.log, LAST_LINES)


def observed_command(recipe: Path, words: Sequence[str], processes: int) -> list[str]:
    """Return the command that runs a recipe under observation.

    Args:
        words: its flags.
        processes: with more than one, `accelerate launch` starts them on this machine.
    """
    return launch_command(options_for(processes), str(PROBE), [str(recipe), *words])


def launch(
    command: Sequence[str], plan: ProbePlan, log: Path, environment: Mapping[str, str]
) -> Ended:
    """Run a launch to its end, and return how it ended.

    A launch that takes longer than `TIMEOUT_SECONDS` is killed. No process outlives this call.

    Args:
        command: see `observed_command`.
        log: receives all output.
        environment: variables besides those of this process.
    """
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = psutil.Popen(
            [*command],
            env={**variables(plan), **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C reaches only this process, which kills the launch then.
            **start_in_own_group(ends_with_parent=True),
        )
        patience = 0.0  # with Ctrl-C, all processes are killed at once
        try:
            status = process.wait(TIMEOUT_SECONDS)
            patience = ENDING_SECONDS
        except psutil.TimeoutExpired:
            status = KILLED
            output.write(TOO_LONG)
        finally:
            end_all(process, plan, patience)
    return Ended(int(status), log, time.monotonic() - began)


def launch_warm(
    warm: WarmProcess, recipe: Path, words: Sequence[str], plan: ProbePlan, log: Path
) -> Ended:
    """Run a launch of one process as `launch` does, but as a fork of a warm process."""
    began = time.monotonic()
    process = psutil.Process(warm.start([str(recipe), *words], variables(plan), log))
    is_over = False
    try:
        status = warm.wait(TIMEOUT_SECONDS)
        is_over = True
    except TimeoutError:
        status = KILLED
        with log.open("a", encoding="utf-8") as output:
            output.write(TOO_LONG)
    finally:
        if not is_over:
            process.kill()
            warm.wait(ENDING_SECONDS)
    return Ended(status, log, time.monotonic() - began)


def variables(plan: ProbePlan) -> dict[str, str]:
    """Return the environment of a launch."""
    return {**environment_of_launches(), **watch_for_parent(), **plan.variable()}


def end_all(process: psutil.Popen, plan: ProbePlan, patience: float) -> None:
    """Wait until all processes of a launch have ended; kill those that stay after `patience` s."""
    processes: list[psutil.Process] = []
    if process.is_running():
        processes.append(process)
    with contextlib.suppress(psutil.NoSuchProcess):
        processes += process.children(recursive=True)
    for path in plan.path.glob(f"launch-{plan.launch}-rank-*.pid"):
        with contextlib.suppress(psutil.NoSuchProcess, ValueError):
            processes.append(psutil.Process(int(path.read_text(encoding="utf-8"))))
    _, remaining = psutil.wait_procs(processes, patience)
    for each in remaining:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
