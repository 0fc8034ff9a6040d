"""Reads the records of a run that a reproduction compares: the old run, or the new one."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from common.errors import UserError
from common.flags import spelled
from common.metric_names import STEP
from common.run_directory.directory import INITIAL
from common.run_directory.finished_model import WEIGHTS
from common.run_directory.model_records import WeightsDigest
from common.run_directory.provenance import saved_attempts
from common.run_directory.record_files import parse_record, read_record_if_there
from common.run_directory.records import (
    CHECKPOINT_DIGESTS,
    MODEL_FOLDER,
    MODEL_JSON,
    Attempt,
    CheckpointDigests,
    MetricsRow,
    RunConfig,
)
from common.run_directory.stored_run import StoredRun
from common.storage.json_files import read_lines
from common.system.wording import counted, listed
from common.tools.rows import step_of_row

# The fields of `Attempt` that a gap names if they changed, with the text before the value.
TEXTS_OF_CHANGES = {
    "world_size": "processes:",
    "threads_per_process": "threads per process:",
    "mixed_precision": "precision:",
}
NO_FOLDER = "removed when the run was published"  # replaces the path of a code folder


@dataclass(frozen=True)
class ComparedRun:
    """The records of a run. A record that the run did not write is empty here.

    A reproduction compares bits, so this has what a comparison of figures (`RunRecord`) leaves out:
    NaN, digests, and the code and machine of each start.

    A reproduction also compares records that are not those in the files, such as the records that
    it expects of the new run. So the configuration and the attempts are fields.
    """

    stored: StoredRun
    saved_config: RunConfig  # the contents of `config.json`
    # The starts that led to the run's weights, in order. A start that changed nothing is left out.
    attempts: list[Attempt]

    @property
    def directory(self) -> Path:
        return self.stored.directory

    @property
    def is_edited(self) -> bool:
        """Whether `config.json` was edited after the run wrote it, or is another run's."""
        return self.stored.edited_config_error is not None

    @property
    def attempt(self) -> Attempt:
        """The last start of the run; an empty record if the run saved none."""
        return self.attempts[-1] if self.attempts else Attempt(global_step=0)

    @cached_property
    def rows(self) -> dict[int, MetricsRow]:
        """The rows of `metrics.jsonl` by update, in order. NaN is None."""
        rows = {step_of_row(row): row for row in self.stored.rows}
        return {step: rows[step] for step in sorted(rows)}

    @property
    def last_step(self) -> int:
        """The update of the last row; 0 without rows."""
        return max(self.rows, default=0)

    @cached_property
    def digests(self) -> dict[int, dict[str, str]]:
        """The SHA-256 of each checkpoint's files: by update, then by file name."""
        digests = {}
        for line in read_lines(self.directory / CHECKPOINT_DIGESTS, STEP):
            record = parse_record(line, CheckpointDigests, CHECKPOINT_DIGESTS)
            digests[record.step] = record.files
        return digests

    @property
    def is_published(self) -> bool:
        """Whether these are the records of a published run, without weights and paths."""
        return any(tree.folder == NO_FOLDER for tree in self.attempt.trees)

    @property
    def nondeterministic_device(self) -> str | None:
        """The name of the device if its kernels were free to round differently in each run.

        Such a device is not a CPU, and the run lacked `--deterministic`. Otherwise it is None.
        """
        environment = self.saved_config.environment
        if environment.device_type == "cpu" or environment.deterministic is not False:
            return None
        return environment.device

    @property
    def exported_digest(self) -> str | None:
        """The SHA-256 of the exported weights; None if there are none."""
        if self.is_published:  # the weights were not copied, but their digest was
            return stated_digest(self.directory / MODEL_FOLDER)
        return digest_in(self.directory / MODEL_FOLDER)

    @property
    def initial_digest(self) -> str | None:
        """The SHA-256 of the weights of `--init-from`; None without that flag."""
        return digest_in(self.directory / INITIAL)

    def gaps(self) -> list[str]:
        """Return sentences on what the run did not record for an exact reproduction."""
        sentences = []
        if self.saved_config.initial_weights is None:
            sentences.append(
                "it has no digest of its initial weights, because they had more than 1 GB or were "
                "sharded"
            )
        for tree in self.attempt.trees:
            sentences += [f"its patch lacks {item}" for item in tree.not_saved]
            if tree.commit is None:
                code = "its code" if tree.folder == NO_FOLDER else tree.folder
                sentences.append(
                    f"{code} was not in a git repository: the run saved only the files there that "
                    "it had imported"
                )
        if self.attempts and self.attempts[0].global_step > 0:
            updates = counted(self.attempts[0].global_step, "update")
            sentences.append(f"the code and machine of its first {updates} were not recorded")
        for previous, attempt in pairwise(self.attempts):
            sentences.append(
                f"it resumed with {changes_in_words(previous, attempt)} at update "
                f"{attempt.global_step}; the reproduction uses the last values from its start"
            )
        for change in self.saved_config.source.changes:
            sentences.append(f"its recipe was changed at update {change.global_step}")
        if self.is_edited:
            sentences.append("its config.json was edited after the run wrote it")
        return sentences


def changes_in_words(previous: Attempt, attempt: Attempt) -> str:
    """Return how an attempt differs from the previous one."""
    changes = []
    for name, text in TEXTS_OF_CHANGES.items():
        previous_value = getattr(previous, name)
        value = getattr(attempt, name)
        if None not in (previous_value, value) and previous_value != value:
            changes.append(f"{text} {value} instead of {previous_value}")
    changes += [f"a different {spelled(name)}" for name in attempt.changed_flags]
    # An attempt is recorded only if something has changed.
    return listed(changes) if changes else "other code, packages, hardware or variables"


def digest_in(folder: Path) -> str | None:
    """Return the SHA-256 of the weights in a folder, which its `model.json` states.

    The result is None if the weights are not in the folder.
    """
    return stated_digest(folder) if (folder / WEIGHTS).exists() else None


def stated_digest(folder: Path) -> str | None:
    """Return the digest in a folder's `model.json`, even if the weights are not in the folder."""
    record = read_record_if_there(folder / MODEL_JSON, WeightsDigest)
    return None if record is None else record.weights_sha256


def read_compared_run(directory: Path) -> ComparedRun:
    """Return the run in a directory. Its status, summary and rows are read when they are needed.

    Raises:
        UserError: the directory does not hold a run that began to train, or its `config.json` is
            damaged.
    """
    stored = StoredRun(directory)
    return ComparedRun(stored, stored.saved_config, saved_attempts(directory))


def read_old_run(directory: Path) -> ComparedRun:
    """Read a run that is to be reproduced.

    Raises:
        UserError: the run is still training, trained nothing or logged no rows, or
            `read_compared_run` can't read it.
    """
    old = read_compared_run(directory)
    if old.saved_config.flags.get("evaluate_only"):
        raise UserError(
            f"{directory} only evaluated a model, and trained nothing",
            advice="reproduce the run that trained the model",
        )
    if old.stored.status.status == "running":
        raise UserError(
            f"the run in {directory} is still training", advice="wait until it has finished"
        )
    if not old.rows:
        raise UserError(
            f"{directory} logged no updates, so there is nothing to compare",
            advice="pass a run that logged some updates",
        )
    return old
