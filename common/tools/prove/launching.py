"""Launches a recipe in new processes, as a user would, and observes it."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from common.system.platforms import start_in_own_group, watch_for_parent
from common.tools.prove.plan import ProbePlan
from common.tools.prove.warm import WarmProcess, environment_of_launches

# Started as a script, not as a module: then no folder named `common` beside the user hides ours.
PROBE = Path(__file__).with_name("probe.py")
TIMEOUT_SECONDS = 1800.0  # a launch that takes longer hangs
ENDING_SECONDS = 30.0  # in which all processes of a launch end after the first one
FRAME = " │╭╮╰╯─"  # characters that some libraries draw around a message
KILLED = -int(getattr(signal, "SIGKILL", signal.SIGTERM))  # the status of a killed launch
TOO_LONG = f"error: still running after {TIMEOUT_SECONDS:.0f} s, so it was killed\n"
LAST_LINES = 3  # of the output, in the message about a launch that failed


@dataclass(frozen=True)
class Ended:
    """How a launch ended."""

    status: int  # the exit status; below 0, the signal that ended the process
    log: Path  # all that it printed
    seconds: float

    def problem(self) -> str:
        """Return in one line how the launch ended, with the last error that it printed."""
        end = f"status {self.status}"
        if self.status < 0:
            end = f"ended by {signal.Signals(-self.status).name}"
        text = self.log.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip(FRAME) for line in text.splitlines()]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        last = errors[-1:] or [line for line in lines if line][-LAST_LINES:]
        return f"{end}: {' / '.join(last) or 'it printed nothing'} ({self.log} has all of it)"


def launch_command(recipe: Path, words: Sequence[str], processes: int) -> list[str]:
    """Return the command that runs a recipe under observation.

    Args:
        words: its flags.
        processes: with more than one, `accelerate launch` starts them on this machine.
    """
    if processes == 1:
        return [sys.executable, str(PROBE), str(recipe), *words]
    launcher = ["-m", "accelerate.commands.accelerate_cli", "launch"]
    launcher += ["--multi_gpu", "--num_processes", str(processes)]
    launcher += ["--main_process_port", "0"]  # any free port
    return [sys.executable, *launcher, str(PROBE), str(recipe), *words]


def launch(
    command: Sequence[str], plan: ProbePlan, log: Path, environment: Mapping[str, str]
) -> Ended:
    """Run a launch to its end, and return how it ended.

    A launch that takes longer than `TIMEOUT_SECONDS` is killed. No process outlives this call.

    Args:
        command: see `launch_command`.
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
