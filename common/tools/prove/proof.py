"""Runs a proof: runs its checks one after the other, and writes the receipt."""

import errno
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile, mkdtemp

import torch

from common.console import say
from common.console.messages import CONSOLE
from common.errors import UserError
from common.failures.sentences import writing
from common.run_directory.provenance import saved_attempts
from common.run_directory.stored_run import StoredRun
from common.storage.digests import sha256_of_file
from common.system.clock import current_time
from common.system.platforms import command_line, shown_path
from common.tools.prove import receipt as receipts
from common.tools.prove.bench import Bench, RunFailedError, RunSpec
from common.tools.prove.checks import CHECKS, repeating
from common.tools.prove.flags import (
    FlagValues,
    built_in_dataset,
    flag_words,
    parse_flags,
    proof_flags,
)
from common.tools.prove.report import show_report, show_result
from common.tools.prove.verdicts import Check, Verdict
from common.tools.recipe import Recipe, load_recipe

NOT_REPEATABLE = (
    "this may be a consequence: the check repeatable has failed, so two runs differ in any case"
)
REPEAT_FIRST = "change what the check repeatable names, and then repeat the proof"


@dataclass(frozen=True)
class ProofRequest:
    """The proof that the command line asks for."""

    recipe: Path
    flags: Sequence[str]  # the recipe's flags, as words of a command line
    checks: str | None  # comma-separated names; None: all checks that are not optional
    output: Path  # the file of the receipt
    folder: Path | None  # the folder that keeps the runs; None: a temporary folder
    seed: int  # the seed of the random interruption points
    updates: int  # the number of updates of a training


def prove(request: ProofRequest) -> bool:
    """Run a proof, show its results, and return whether all checks that apply have passed.

    If no check applies, nothing is proven, and the proof has not passed.

    Raises:
        UserError: the recipe, a flag, a check, the folder or the receipt's file can't be used.
    """
    checks = chosen_checks(request.checks)
    recipe = load_recipe(request.recipe)
    user_flags = parse_flags(request.flags)
    flags = proof_flags(
        with_determinism(user_flags),
        recipe.config_class,
        built_in_dataset(recipe.path),
        request.updates,
    )
    require_writable(request.output)
    folder = new_folder(request.folder)
    bench = Bench(recipe, folder, flags, request.seed)
    shown_flags = command_line(flag_words(flags.values))
    say(f"proof: {len(checks)} checks of {request.recipe} with {shown_flags}")
    began = current_time()
    start = time.monotonic()
    try:
        results: list[receipts.CheckResult] = []
        for check in checks:
            is_doubtful = check.compares_runs and is_known_to_vary(results)
            results.append(run_check(check, bench, is_doubtful))
    finally:
        bench.close()
    receipt = make_receipt(request, recipe, bench, results, began, time.monotonic() - start)
    receipts.write_receipt(request.output, receipt)
    show_report(receipt, request.output)
    if request.folder is None and receipt.passed and not bench.failed:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        say(f"runs: {shown_path(folder)}")
    return receipt.passed


def require_writable(output: Path) -> None:
    """Raise a `UserError` if the receipt's file can't be written, before a proof of minutes."""
    folder = output.resolve().parent
    with writing(f"--output {output}"):
        if output.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass


def with_determinism(flags: FlagValues) -> FlagValues:
    """Return the user's flags, with `--deterministic` added on an accelerator.

    Only with this flag does an accelerator give equal bits. A CPU gives them anyway.
    """
    is_chosen_by_user = {"--deterministic", "--no-deterministic"} & flags.keys()
    if is_chosen_by_user or not torch.accelerator.is_available():
        return flags
    return {**flags, "--deterministic": []}


def chosen_checks(names: str | None) -> list[Check]:
    """Return the checks that `--checks` names, in their usual order.

    Raises:
        UserError: a name is not the name of a check.
    """
    if names is None:
        return [check for check in CHECKS if not check.is_optional]
    chosen_names = [name.strip() for name in names.split(",")]
    known_names = {check.name for check in CHECKS}
    unknown = [name for name in chosen_names if name not in known_names]
    if unknown:
        raise UserError(
            f"there is no check {unknown[0] or '(empty)'}",
            advice=f"choose from {', '.join(check.name for check in CHECKS)}",
        )
    return [check for check in CHECKS if check.name in chosen_names]


def new_folder(path: Path | None) -> Path:
    """Create the folder for the runs of a proof, and return its absolute path.

    Args:
        path: the folder that the user has named; None: create a temporary folder.

    Raises:
        UserError: the folder already has files, or can't be created.
    """
    if path is None:
        return Path(mkdtemp(prefix="recipes-prove-"))
    with writing(f"--folder {path}"):
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise UserError(
                f"--folder {path} already contains files", advice="name a new or empty folder"
            )
    return path.resolve()


def is_known_to_vary(results: Sequence[receipts.CheckResult]) -> bool:
    """Whether an earlier check has found that the same command gives other results each time."""
    name = repeating.CHECK.name
    return any(result.name == name and result.passed is False for result in results)


def run_check(check: Check, bench: Bench, is_doubtful: bool) -> receipts.CheckResult:
    """Run a check, show its result, and return it. If a run of the check fails, the check fails.

    Args:
        is_doubtful: whether a failure may come from runs that differ each time. The result then
            says so first.
    """
    start = time.monotonic()
    with CONSOLE.status(f"{check.name}: {check.question}"):
        try:
            verdict = check.run(bench)
        except RunFailedError as problem:
            verdict = Verdict(
                passed=False,
                compared="",
                causes=(str(problem),),
                # The same command may not be repeated as it is: a --folder must be new or empty.
                advice="fix the reported error",
            )
    if verdict.passed is False and is_doubtful:
        verdict = replace(verdict, causes=(NOT_REPEATABLE, *verdict.causes), advice=REPEAT_FIRST)
    result = receipts.CheckResult(
        name=check.name,
        question=check.question,
        passed=verdict.passed,
        compared=verdict.compared,
        causes=[*verdict.causes],
        advice=verdict.advice,
        seconds=round(time.monotonic() - start, 1),
    )
    show_result(result)
    return result


def has_passed(results: Sequence[receipts.CheckResult]) -> bool:
    """Whether at least one check applies, and all that apply have passed."""
    passed = [result.passed for result in results]  # None: the check does not apply
    return True in passed and False not in passed


def proven_code(directories: Sequence[Path]) -> list[receipts.ProvenCode]:
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
                receipts.ProvenCode(
                    commit=tree.commit,
                    patch_sha256=tree.patch_sha256,
                    not_saved=tree.not_saved,
                )
                for tree in attempts[0].trees
            ]
    return []


def make_receipt(
    request: ProofRequest,
    recipe: Recipe,
    bench: Bench,
    results: list[receipts.CheckResult],
    began: str,
    seconds: float,
) -> receipts.ProofReceipt:
    """Return the receipt of a finished proof."""
    reference = bench.finished.get(RunSpec("reference"))
    processor, cores = receipts.hardware()
    runs = list(bench.finished.values()) if reference is None else [reference]
    environment = StoredRun(runs[0].directory).saved_config.environment if runs else None
    if environment is not None:
        processor = environment.processor  # more exact than the processor's name alone
    words = ["recipes", "prove", str(request.recipe), *request.flags]
    return receipts.ProofReceipt(
        format=receipts.FORMAT,
        passed=has_passed(results),
        recipe=str(request.recipe),
        recipe_sha256=sha256_of_file(recipe.path),
        recipe_commit=receipts.commit_of_file(recipe.path),
        recipe_is_edited=receipts.is_edited(recipe.path),
        code=proven_code([run.directory for run in bench.finished.values()]),
        command=command_line(
            [*words, "--draws", str(request.seed), "--updates", str(request.updates)]
        ),
        flags=flag_words(bench.flags.values),
        seed=request.seed,
        updates=0 if reference is None else reference.started.total_steps,
        processor=processor,
        cores=cores,
        environment=environment,
        began=began,
        seconds=round(seconds, 1),
        checks=results,
    )
