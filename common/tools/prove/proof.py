"""Runs a proof: runs its checks one after the other, and writes the receipt."""

import errno
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile, mkdtemp

import torch

from common.console import say
from common.console.messages import CONSOLE
from common.errors import UserError
from common.failures.sentences import writing
from common.system.clock import current_time
from common.system.platforms.commands import command_line, shown_path
from common.tools.prove.checks import CHECKS, repeating
from common.tools.prove.checks.base import Check
from common.tools.prove.proof_runs.bench import Bench, RunFailedError
from common.tools.prove.proof_runs.recipe_flags import (
    FlagValues,
    built_in_dataset,
    flag_words,
    parse_flags,
    proof_flags,
)
from common.tools.prove.receipt import CheckResult, write_receipt
from common.tools.prove.receipt_making import make_proof_receipt
from common.tools.prove.report import show_report, show_result
from common.tools.prove.request import ProofRequest
from common.tools.prove.verdicts import Verdict
from common.tools.recipe import load_recipe

NOT_REPEATABLE = (
    "this may be a consequence: the check repeatable has failed, so two runs differ in any case"
)
REPEAT_FIRST = "change what the check repeatable names, and then repeat the proof"


def prove(request: ProofRequest) -> bool:
    """Run a proof, show its results, and return whether all checks that apply have passed.

    If no check applies, nothing is proven, and the proof has not passed.

    Raises:
        UserError: the recipe, a flag, a check, the folder or the receipt's file can't be used.
    """
    checks = chosen_checks(request.checks, request.skipped_checks)
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
    results = run_checks(checks, bench)
    receipt = make_proof_receipt(request, recipe, bench, results, began, time.monotonic() - start)
    write_receipt(request.output, receipt)
    show_report(receipt, request.output)
    if request.folder is None and receipt.passed and not bench.failed:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        say(f"runs: {shown_path(folder)}")
    return receipt.passed


def run_checks(checks: Sequence[Check], bench: Bench) -> list[CheckResult]:
    """Run checks one after the other, show each result, and close the bench."""
    results: list[CheckResult] = []
    try:
        for check in checks:
            is_doubtful = check.compares_runs and is_known_to_vary(results)
            results.append(run_check(check, bench, is_doubtful))
    finally:
        bench.close()
    return results


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


def chosen_checks(names: str | None, skipped_names: str | None) -> list[Check]:
    """Return the checks that `--checks` names and `--skip` does not, in their usual order.

    Args:
        names: comma-separated names; None: all checks that are not optional.
        skipped_names: comma-separated names; None: leave out no check.

    Raises:
        UserError: a name is not the name of a check, or no check is left.
    """
    checks = [check for check in CHECKS if not check.is_optional]
    if names is not None:
        named = split_names(names)
        checks = [check for check in CHECKS if check.name in named]
    if skipped_names is not None:
        skipped = split_names(skipped_names)
        checks = [check for check in checks if check.name not in skipped]
    if not checks:
        raise UserError(
            "--skip leaves no check to run",
            advice="skip fewer checks",
        )
    return checks


def split_names(names: str) -> list[str]:
    """Return the names of checks in a comma-separated list.

    Raises:
        UserError: a name is not the name of a check.
    """
    separate_names = [name.strip() for name in names.split(",")]
    known_names = [check.name for check in CHECKS]
    for name in separate_names:
        if name not in known_names:
            raise UserError(
                f"there is no check {name or '(empty)'}",
                advice=f"choose from {', '.join(known_names)}",
            )
    return separate_names


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


def is_known_to_vary(results: Sequence[CheckResult]) -> bool:
    """Whether an earlier check has found that the same command gives other results each time."""
    name = repeating.CHECK.name
    return any(result.name == name and result.passed is False for result in results)


def run_check(check: Check, bench: Bench, is_doubtful: bool) -> CheckResult:
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
    result = CheckResult(
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
