"""Run a recipe in a process of its own, and follow it by the files in its run directory."""

import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from common.run_directory.records import CONFIG
from common.run_directory.status import read_status
from common.storage.files import open_to_append
from common.system.platforms.process_tree import own_group_arguments, parent_watch_variables
from common.system.platforms.signals import polite_stop_signal
from common.tools.compare.readers.directory import read_directory
from common.tools.compare.readers.run_record import RunRecord
from common.tools.launching.endings import ending_in_words

POLL_SECONDS = 0.2
STOP_SECONDS = 120.0  # the time in which a recipe must finish its update and save


class LaunchedRun:
    """Starts, follows and stops a run. A run that has already finished is read, but not started."""

    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the run, unless it has finished.

        If this process ends first, the run saves itself and ends as well.

        Args:
            command: see `command_of_run`.
            directory: the run's directory, absolute. The log lies beside it.
            environment: all environment variables of the run. By default, they are those of this
                process, and the name of the directory's parent is the run's group at W&B, unless
                `WANDB_RUN_GROUP` names another group.
        """
        self.directory = directory
        self.log = directory.with_name(f"{directory.name}.log")
        self.process: psutil.Popen | None = None
        if read_status(directory).status == "finished":
            return
        variables = environment
        if variables is None:
            variables = {"WANDB_RUN_GROUP": directory.parent.name, **os.environ}
        with open_to_append(self.log) as log:
            self.process = psutil.Popen(
                command,
                env={**variables, **parent_watch_variables()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches only this process, which passes it on.
                **own_group_arguments(),
            )

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def follow(self) -> Iterator[RunRecord]:
        """Yield the record of the run so far every `POLL_SECONDS`, and once more after its end.

        Yield nothing as long as the run has no `config.json`, which it writes before it trains.
        """
        is_running = True
        while is_running:
            # Look at the process before the files. In the other order, a run could write its last
            # rows and end in between, and these rows would be missed.
            is_running = self.is_running()
            if (self.directory / CONFIG).exists():
                yield read_directory(self.directory)
            if is_running:
                time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Ask a running run to save itself and end, and wait; kill it after `STOP_SECONDS`.

        A tool does so when it needs no more of the run, and when an error or Ctrl-C ends the tool.
        Nothing happens if the run has ended.
        """
        if self.process is None or not self.is_running():
            return
        # A launcher may end before the recipe that it launched, so wait for all processes.
        processes = [self.process, *self.process.children(recursive=True)]
        self.process.send_signal(polite_stop_signal())
        _, remaining = psutil.wait_procs(processes, STOP_SECONDS)
        for process in remaining:
            process.kill()

    def reason(self) -> str:
        """Return one line on why the run failed, for a tool's message.

        If the run could still write its status, the reason is there. Otherwise the line says how
        the process ended, and repeats the last error in the log.
        """
        status = read_status(self.directory)
        if status.status == "failed" and status.reason:
            return status.reason
        # Without a process, the run had finished before, so its exit status was 0. A tool then
        # asks for a reason only if files of the run are missing.
        exit_status = self.process.returncode if self.process is not None else 0
        return ending_in_words(exit_status, self.log)
