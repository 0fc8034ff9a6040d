"""Makes the receipt of a finished proof: collects its results, the code, and the machine."""

from collections.abc import Sequence
from pathlib import Path

from common.run_directory.provenance import saved_attempts
from common.run_directory.stored_run import StoredRun
from common.storage.digests import sha256_of_file
from common.system.git import ask_git, commit_of
from common.system.platforms.commands import command_line
from common.system.platforms.limits import usable_cores
from common.system.processor import processor_name
from common.tools.prove.proof_runs.bench import Bench, RunSpec
from common.tools.prove.proof_runs.recipe_flags import flag_words
from common.tools.prove.receipt import FORMAT, CheckResult, ProofReceipt, ProvenCode
from common.tools.prove.request import ProofRequest
from common.tools.recipe import Recipe


def make_proof_receipt(
    request: ProofRequest,
    recipe: Recipe,
    bench: Bench,
    results: list[CheckResult],
    began: str,
    seconds: float,
) -> ProofReceipt:
    """Return the receipt of a finished proof."""
    reference = bench.finished.get(RunSpec("reference"))
    processor, cores = hardware()
    runs = list(bench.finished.values()) if reference is None else [reference]
    environment = StoredRun(runs[0].directory).saved_config.environment if runs else None
    if environment is not None:
        processor = environment.processor  # more exact than the processor's name alone
    words = ["recipes", "prove", str(request.recipe), *request.flags]
    return ProofReceipt(
        format=FORMAT,
        passed=has_passed(results),
        recipe=str(request.recipe),
        recipe_sha256=sha256_of_file(recipe.path),
        recipe_commit=commit_of_file(recipe.path),
        recipe_is_edited=is_edited(recipe.path),
        code=proven_code([run.directory for run in bench.finished.values()]),
        command=command_line(
            [*words, "--draws", str(request.seed), "--updates", str(request.updates)]
        ),
        flags=flag_words(bench.flags.values),
        seed=request.seed,
        updates=0 if reference is None else reference.start_record.total_steps,
        processor=processor,
        cores=cores,
        environment=environment,
        began=began,
        seconds=round(seconds, 1),
        checks=results,
    )


def has_passed(results: Sequence[CheckResult]) -> bool:
    """Whether at least one check applies, and all that apply have passed."""
    passed = [result.passed for result in results]  # None: the check does not apply
    return True in passed and False not in passed


def proven_code(directories: Sequence[Path]) -> list[ProvenCode]:
    """Return the commit and the patch of each folder of code that the proof's runs used.

    All runs of a proof use the same code, so those of the first run that recorded any are enough.
    The list is empty if no run has.

    Args:
        directories: the directories of the runs.
    """
    for directory in directories:
        attempts = saved_attempts(directory)
        if attempts:
            return [
                ProvenCode(
                    commit=tree.commit,
                    patch_sha256=tree.patch_sha256,
                    not_saved=tree.not_saved,
                )
                for tree in attempts[0].trees
            ]
    return []


def commit_of_file(path: Path) -> str | None:
    """Return the commit of a file's repository; None if the file is not in a repository."""
    return commit_of(path.resolve().parent)


def is_edited(path: Path) -> bool | None:
    """Whether a file differs from its commit or is new; None if it is not in a repository."""
    if commit_of_file(path) is None:
        return None
    file = path.resolve()
    return ask_git(file.parent, "status", "--porcelain", "--", file.name) != b""


def hardware() -> tuple[str, int]:
    """Return the name of this machine's processor, and how many cores this process may use."""
    return processor_name(), usable_cores()
