"""Runs generated copies in forks of a process that has the libraries, and checks their results."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.generated.figures import Record, check_figures
from tests.generated.grammar import Case
from tests.generated.notes import FOLDER, KILL
from tests.generated.writing import recipe_of
from tests.jobs import final_weights, rows_without_clock
from tests.launch import (
    REPOSITORY,
    Runner,
    Template,
    clean_environment,
    usable_cores,
    wait_or_kill,
)

MAX_SECONDS = 90  # of one run, on a machine that others use as well
TRACEBACK = "Traceback (most recent call last)"
ERROR = re.compile(r"([\w.]*(Error|Exception)|error)\b")
MAX_LETTERS = 160  # of a reason
UNREAD_FLAG = ("--warmup-steps", "2")  # for a copy that has a scheduler of its own


class ViolationError(AssertionError):
    """A copy broke a guarantee: `symptom` is a short text for counts, the message has details."""

    def __init__(self, symptom: str, details: str) -> None:
        super().__init__(f"{symptom}\n{details}")
        self.symptom = symptom


@dataclass(frozen=True)
class Ended:
    """A launch of a copy that has ended."""

    returncode: int | None  # below 0: the signal that ended it; None: it took too long
    output: str
    directory: Path  # of the run
    notes: Path

    def records(self, event: str) -> list[list[Record]]:
        """Return the notes of one event for each rank."""
        notes_of_ranks = []
        for path in sorted(self.notes.glob("rank-*.jsonl")):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            notes_of_ranks.append([line for line in lines if line["event"] == event])
        return notes_of_ranks

    @property
    def reason(self) -> str:
        """The error that ended the first rank to fail, without numbers, for counts."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        lines = [re.sub(r"^\[rank\d\]: ", "", line) for line in lines]
        errors = [line for line in lines if ERROR.match(line)]
        # A rank whose peer has ended reports an error of gloo, which is not the cause.
        causes = [line for line in errors if "gloo" not in line]
        reason = (causes or errors or lines or ["(no output)"])[0]
        return re.sub(r"[\d.:]*\d+", "N", reason)[:MAX_LETTERS]


class Copies:
    """Launches copies as forks of one warm process; what they write is under one folder."""

    def __init__(self, runner: Runner, folder: Path) -> None:
        """Start the warm process, as a fork of the runner's template."""
        self.environment = clean_environment(folder)
        path = folder / "warm"
        words = [str(REPOSITORY / "tests" / "generated" / "warm.py"), str(path)]
        with path.with_suffix(".log").open("w") as output:
            self.process = runner.template.fork(
                words, self.environment, folder, output, output, cores=usable_cores()
            )
        deadline = time.monotonic() + MAX_SECONDS
        while not path.exists():
            log = path.with_suffix(".log").read_text()
            assert self.process.poll() is None, log
            assert time.monotonic() < deadline, log
            time.sleep(0.01)
        self.template = Template(path, self.environment)

    def close(self) -> None:
        """End the copies that still run, and the warm process."""
        self.template.close()
        self.process.wait(30)

    def launch(
        self, recipe: Path, directory: Path, processes: int, *flags: str, kill: str = ""
    ) -> Ended:
        """Run a copy to its end; `kill` is the place where it kills itself, see `Notes.reached`."""
        notes = directory.with_name(f"{directory.name}-notes")
        variables = {FOLDER: str(notes)} | ({KILL: kill} if kill else {})
        log = directory.with_name(f"{directory.name}.log")
        words = [str(recipe), "--output-dir", str(directory), *flags]
        with log.open("w") as output:
            process = self.template.fork(
                words,
                self.environment | variables,
                recipe.parent,
                output,
                output,
                processes=processes,
                cores=usable_cores(),
            )
            returncode = wait_or_kill(process, MAX_SECONDS)
        return Ended(returncode, log.read_text(errors="replace"), directory, notes)


def check(case: Case, copies: Copies, folder: Path) -> None:
    """Run a case's copy to its end, killed and resumed, and only evaluating, in a new folder.

    Raises:
        ViolationError: the copy broke a guarantee.
    """
    folder.mkdir(parents=True)
    recipe = folder / "copied.py"
    recipe.write_text(recipe_of(case))
    if case.mistake is not None:
        check_refusal(case, copies, recipe)
        return
    whole = copies.launch(recipe, folder / "whole", case.processes)
    check_success(whole, "the run")
    check_figures(case, whole.records, rows_of(whole), read(whole, "summary.json"), violate)
    check_clipping(case, whole)
    check_weights(whole)
    check_kill(case, copies, recipe, whole)
    if case.evaluation_draws:
        check_evaluation_alone(case, copies, recipe, whole)


def violate(symptom: str, details: str) -> None:
    """Raise a `ViolationError`."""
    raise ViolationError(symptom, details)


def check_success(ended: Ended, name: str) -> None:
    """Raise a `ViolationError` unless a run succeeded and its status is "finished"."""
    if ended.returncode is None:
        raise ViolationError(f"{name} hangs", ended.output[-3000:])
    if ended.returncode != 0:
        raise ViolationError(f"{name} failed: {ended.reason}", ended.output[-6000:])
    status = read(ended, "status.json")["status"]
    if status != "finished":
        raise ViolationError(f"{name} has the status {status}", ended.output[-3000:])


def check_refusal(case: Case, copies: Copies, recipe: Path) -> None:
    """A mistake ends the run in one sentence, before anything is saved."""
    flags = UNREAD_FLAG if case.mistake == "unread flag" else ()
    ended = copies.launch(recipe, recipe.parent / "refused", case.processes, *flags)
    if ended.returncode is None:
        raise ViolationError("a mistake hangs", ended.output[-3000:])
    if ended.returncode == 0:
        raise ViolationError(
            f"nobody was told of the mistake: {case.mistake}", ended.output[-3000:]
        )
    if TRACEBACK in ended.output:
        raise ViolationError(f"a mistake ends in a traceback: {ended.reason}", ended.output[-6000:])
    sentences = ended.output.count("error: ")
    if sentences != 1:
        raise ViolationError(f"a mistake is told {sentences} times", ended.output[-6000:])
    if saved := [*ended.directory.glob("checkpoints/step-*")]:
        details = f"{ended.output[-3000:]}\n{saved}"
        raise ViolationError(f"updates were made and saved before: {case.mistake}", details)


def check_clipping(case: Case, whole: Ended) -> None:
    """After `run.clip_grad_norm_`, the norm of the gradients is at most `--max-grad-norm`."""
    if not case.max_grad_norm:
        return
    for rank, records in enumerate(whole.records("clipped")):
        for record in records:
            if record["norm"] > case.max_grad_norm * (1 + 1e-4):
                details = f"rank {rank}, update {record['update']}: a norm of {record['norm']}"
                raise ViolationError("gradients are not clipped yet", details)


def check_weights(whole: Ended) -> None:
    """All ranks end with the same weights, bit for bit."""
    digests = [records[0]["digests"] for records in whole.records("end")]
    if any(other != digests[0] for other in digests):
        raise ViolationError("the ranks' weights differ", json.dumps(digests, indent=1))


def check_kill(case: Case, copies: Copies, recipe: Path, whole: Ended) -> None:
    """A run that was killed and resumed ends with the same bits as one that was not stopped."""
    directory = recipe.parent / "killed"
    killed = copies.launch(recipe, directory, case.processes, kill=case.kill_words)
    if killed.returncode == 0:  # it stopped early, before the place of the kill
        resumed = killed
    else:
        # Move the notes of the killed run aside, because their last line may be incomplete.
        killed.notes.rename(folder_of_killed(killed.notes))
        resumed = copies.launch(recipe, directory, case.processes, "--resume", "auto")
        check_success(resumed, "the resumed run")
    at = f"killed at {case.kill_words}\n{killed.output[-1500:]}\n{resumed.output[-3000:]}"
    expected = rows_without_clock(whole.directory)
    rows = rows_without_clock(directory)
    if rows != expected:
        raise ViolationError("a kill changes rows", f"{at}\n{differing(expected, rows)}")
    if final_weights(directory) != final_weights(whole.directory):
        raise ViolationError("a kill changes the weights", at)
    digests = [[rank[-1]["digests"] for rank in run.records("end")] for run in (whole, resumed)]
    if digests[0] != digests[1]:
        raise ViolationError("a kill changes the weights of a part", f"{at}\n{digests}")


def folder_of_killed(notes: Path) -> Path:
    """Return the folder to which the notes of a killed run are moved."""
    return notes.with_name(f"{notes.name}-before")


def check_evaluation_alone(case: Case, copies: Copies, recipe: Path, whole: Ended) -> None:
    """With --evaluate-only, an evaluation that draws random numbers gives the same metrics."""
    flags = ("--evaluate-only", "--init-from", str(whole.directory))
    again = copies.launch(recipe, recipe.parent / "again", case.processes, *flags)
    check_success(again, "--evaluate-only")
    prefix = "val/" if case.test is None else "test/"
    expected = final_metrics(whole, prefix)
    metrics = final_metrics(again, prefix)
    if metrics != expected:
        raise ViolationError("--evaluate-only has other figures", f"{expected}\n{metrics}")


def final_metrics(ended: Ended, prefix: str) -> dict[str, Any]:
    """Return the metrics of `summary.json` that begin with a prefix, without the best value."""
    summary = read(ended, "summary.json")
    names = [name for name in summary if name.startswith(prefix) and "best" not in name]
    return {name: summary[name] for name in names}


def read(ended: Ended, name: str) -> Mapping[str, Any]:
    """Return a JSON file of the run's directory."""
    return json.loads((ended.directory / name).read_text())


def rows_of(ended: Ended) -> list[Record]:
    """Return the rows of `metrics.jsonl`."""
    return [json.loads(line) for line in (ended.directory / "metrics.jsonl").open()]


def differing(expected: list[Record], rows: list[Record]) -> str:
    """Return the rows in which two runs differ, as text."""
    pairs = zip(expected, rows, strict=False)
    lines = [f"- {before}\n+ {after}" for before, after in pairs if before != after]
    return f"{len(expected)} and {len(rows)} rows\n" + "\n".join(lines)
