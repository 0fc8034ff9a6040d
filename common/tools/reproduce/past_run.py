"""Reads a run that is to be reproduced, or the one that reproduces it."""

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from common.errors import UserError
from common.json_files import read_json, read_lines
from common.run_directory.directory import INITIAL
from common.run_directory.finished_model import WEIGHTS
from common.run_directory.identity import EditedConfigError, insist_on_written_config
from common.run_directory.provenance import saved_attempts
from common.run_directory.records import (
    CHECKPOINT_DIGESTS,
    CONFIG,
    MODEL_JSON,
    SUMMARY,
    Attempt,
    CheckpointDigests,
    RunConfig,
    Status,
    Summary,
    WeightsDigest,
    parse_record,
    read_record_if_there,
)
from common.run_directory.standing import present_status
from common.tools.rows import Row, read_rows, step_of
from common.track.names import STEP


@dataclass(frozen=True)
class PastRun:
    """The records of a run. A record that the run did not write is empty here."""

    directory: Path
    config: RunConfig
    is_edited: bool  # whether `config.json` was edited after the run wrote it
    attempts: list[Attempt]
    status: Status

    @property
    def attempt(self) -> Attempt:
        """The last start of the run; an empty record if the run saved none."""
        return self.attempts[-1] if self.attempts else Attempt(global_step=0)

    @cached_property
    def rows(self) -> dict[int, Row]:
        """The rows of `metrics.jsonl` by update, in order. NaN is None."""
        rows = {step_of(row): row for row in read_rows(self.directory)}
        return {step: rows[step] for step in sorted(rows)}

    @property
    def last_step(self) -> int:
        """The update of the last row; 0 without rows."""
        return max(self.rows, default=0)

    @cached_property
    def summary(self) -> dict[str, float]:
        """The final figures; none if the run did not reach its end."""
        record = read_record_if_there(self.directory / SUMMARY, Summary)
        return {} if record is None or not self.is_complete else record.figures

    @property
    def is_complete(self) -> bool:
        """Whether the run was trained to its end; a run that missed its target was, too."""
        has_summary = (self.directory / SUMMARY).exists()
        return self.status.status in ("finished", "failed") and has_summary

    @cached_property
    def digests(self) -> dict[int, dict[str, str]]:
        """The SHA-256 of each file of each checkpoint, by update and name."""
        digests = {}
        for line in read_lines(self.directory / CHECKPOINT_DIGESTS, STEP):
            record = parse_record(line, CheckpointDigests, CHECKPOINT_DIGESTS)
            digests[record.step] = record.files
        return digests

    @property
    def exported_digest(self) -> str | None:
        """The SHA-256 of the exported weights; None if there are none."""
        return digest_in(self.directory / "model")

    @property
    def initial_digest(self) -> str | None:
        """The SHA-256 of the weights of `--init-from`; None without that flag."""
        return digest_in(self.directory / INITIAL)

    def gaps(self) -> list[str]:
        """Return in sentences what the run lacks for an exact reproduction."""
        sentences = []
        if not self.attempts:
            sentences.append(
                "the run is of a version that saved no patch of uncommitted changes, no list of "
                "packages, and no digests of checkpoints"
            )
        elif self.attempt.problem is not None:
            sentences.append(f"its code was not saved, because {self.attempt.problem}")
        for tree in self.attempt.trees:
            sentences += [f"its patch lacks {item}" for item in tree.not_saved]
            if tree.commit is None:
                sentences.append(
                    f"{tree.folder} was in no git repository: the run saved only the files there "
                    "that it had imported"
                )
        if len(self.attempts) > 1:
            steps = ", ".join(str(attempt.global_step) for attempt in self.attempts[1:])
            sentences.append(
                f"it went on with other code, packages or hardware at update {steps}; what it "
                "used last is used from the start here"
            )
        for change in self.config.source.changes:
            sentences.append(f"its recipe was changed at update {change.global_step}")
        if self.is_edited:
            sentences.append("its config.json was edited after the run wrote it")
        return sentences


def digest_in(folder: Path) -> str | None:
    """Return the digest of weights that `model.json` in a folder states."""
    if not (folder / WEIGHTS).exists():
        return None
    record = read_record_if_there(folder / MODEL_JSON, WeightsDigest)
    return None if record is None else record.weights_sha256


def read_past_run(directory: Path) -> PastRun:
    """Read the run in a directory.

    Raises:
        UserError: there is no run that began to train, or a file of it is damaged.
    """
    if not (directory / CONFIG).is_file():
        raise UserError(
            f"{directory} is not a run that began to train, because it contains no {CONFIG}",
            advice="pass a run's directory, such as runs/NAME",
        )
    contents = read_json(directory / CONFIG)
    is_edited = True
    with suppress(EditedConfigError):
        insist_on_written_config(directory, contents)
        is_edited = False
    config = parse_record(contents, RunConfig, str(directory / CONFIG))
    attempts = saved_attempts(directory)
    return PastRun(directory, config, is_edited, attempts, present_status(directory))


def read_original(directory: Path) -> PastRun:
    """Read a run that is to be reproduced.

    Raises:
        UserError: there is nothing that could be trained again and compared.
    """
    past = read_past_run(directory)
    if past.config.config.get("evaluate_only"):
        raise UserError(
            f"{directory} only evaluated a model, and trained nothing",
            advice="reproduce the run that trained the model",
        )
    if past.status.status == "running":
        raise UserError(
            f"the run in {directory} is still training", advice="wait until it has finished"
        )
    if not past.rows:
        raise UserError(
            f"{directory} has no rows to compare", advice="pass a run that logged some updates"
        )
    return past
