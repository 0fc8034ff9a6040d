"""Launches a recipe in new processes, as a user would, under observation."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from common.system.platforms.process_tree import own_group_arguments, parent_watch_variables
from common.tools.launching.command import launch_command, options_for
from common.tools.launching.endings import ERROR, ending_in_words
from common.tools.prove.observation.launch_plan import ProbePlan
from common.tools.prove.proof_runs.warm_process import WarmProcess, environment_of_launches

# A script, not a module: then a folder named `common` in the user's directory can't hide ours.
PROBE = Path(__file__).parents[1] / "observation" / "probe.py"
TIMEOUT_SECONDS = 1800.0  # a longer launch counts as hanging
ENDING_SECONDS = 30.0  # the time for all processes to end after the first one
KILLED = -int(getattr(signal, "SIGKILL", signal.SIGTERM))  # the exit status of a killed launch
TOO_LONG = f"{ERROR}still running after {TIMEOUT_SECONDS:.0f} s, so it was killed\n"
LAST_LINES = 3  # the last lines that a message repeats if a failed launch printed no error


@dataclass(frozen=True)
class LaunchResult:
    """The end of a launch."""

    status: int  # the exit status; if negative, the signal that ended the process
    log: Path  # the file with all output
    seconds: float

    def problem(self) -> str:
        """Return one line about the end of the launch, with the last error that it printed."""
        return ending_in_words(self.status, self.log, LAST_LINES)


def observed_command(recipe: Path, words: Sequence[str], processes: int) -> list[str]:
    """Return the command that runs a recipe under observation.

    Args:
        words: the recipe's flags.
        processes: the number of processes. `accelerate launch` starts more than one.
    """
    return launch_command(options_for(processes), str(PROBE), [str(recipe), *words])


def launch(
    command: Sequence[str], plan: ProbePlan, log: Path, environment: Mapping[str, str]
) -> LaunchResult:
    """Run a launch to its end.

    A launch that takes longer than `TIMEOUT_SECONDS` is killed. No process outlives this call.

    Args:
        command: see `observed_command`.
        log: the file for all output.
        environment: additional variables.
    """
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = psutil.Popen(
            [*command],
            env={**environment_of(plan), **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C reaches only this process, which then kills the launch.
            **own_group_arguments(),
        )
        seconds_to_end = 0.0  # after Ctrl-C or a timeout, all processes are killed at once
        try:
            status = process.wait(TIMEOUT_SECONDS)
            seconds_to_end = ENDING_SECONDS
        except psutil.TimeoutExpired:
            status = KILLED
            output.write(TOO_LONG)
        finally:
            end_all(process, plan, seconds_to_end)
    return LaunchResult(int(status), log, time.monotonic() - began)


def launch_warm(
    warm: WarmProcess, recipe: Path, words: Sequence[str], plan: ProbePlan, log: Path
) -> LaunchResult:
    """Run a launch of one process like `launch`, but as a fork of a warm process."""
    began = time.monotonic()
    process = psutil.Process(warm.start([str(recipe), *words], environment_of(plan), log))
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
            warm.wait(ENDING_SECONDS)  # else the next launch would read this exit status
    return LaunchResult(status, log, time.monotonic() - began)


def environment_of(plan: ProbePlan) -> dict[str, str]:
    """Return the variables of a launch: those of this process, and the plan for the probe."""
    return {**environment_of_launches(), **parent_watch_variables(), **plan.as_environment()}


def end_all(process: psutil.Popen, plan: ProbePlan, seconds: float) -> None:
    """Wait for the end of all processes of a launch; kill those that remain after `seconds`."""
    processes: list[psutil.Process] = []
    if process.is_running():
        processes.append(process)
    with contextlib.suppress(psutil.NoSuchProcess):
        processes += process.children(recursive=True)
    # If the launcher has ended, the ranks are no longer its children. But each rank has written its
    # process id into a file.
    for path in plan.path.glob(f"launch-{plan.launch}-rank-*.pid"):
        with contextlib.suppress(psutil.NoSuchProcess, ValueError):
            processes.append(psutil.Process(int(path.read_text(encoding="utf-8"))))
    _, remaining = psutil.wait_procs(processes, seconds)
    for remaining_process in remaining:
        with contextlib.suppress(psutil.NoSuchProcess):
            remaining_process.kill()
