"""Prove broken copies of recipes, and print a table of the causes that `recipes prove` names.

Copies that are unusual but correct are proved too, and must pass.

    python benchmarks/broken_copies.py
    python benchmarks/broken_copies.py "EMA not kept" "loss not divided"     # only these
    python benchmarks/broken_copies.py "EMA not kept" --update               # into the file of all
    python benchmarks/broken_copies.py --show                                # the table of the file

`benchmarks/harness/mistaken_copies.py` lists the copies with one mistake each, and
`benchmarks/harness/correct_copies.py` the correct ones. The results of all copies go to
`benchmarks/results/broken-copies.json`; those of some of them only with `--update`, which replaces
their earlier results there, or to another file that `--output` names.
The exit status is 1 if a proof does not name the mistake, or fails a correct copy.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

if __package__ in (None, ""):  # started as a file: make the package importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.harness.correct_copies import CORRECT, Correct
from benchmarks.harness.edited_copies import EditedCopy
from benchmarks.harness.mistaken_copies import BROKEN, Broken
from benchmarks.harness.result_file import write_results
from benchmarks.harness.results import describe_machine
from benchmarks.harness.text_tables import markdown_table
from common.system.git import commit_of_library
from common.tools.prove.receipt import CheckResult, read_receipt

RESULTS = Path(__file__).parent / "results" / "broken-copies.json"


class BrokenProof(TypedDict):
    """The proof of one broken copy."""

    mistake: str
    recipe: str
    check: str  # the check that has to fail
    failed: bool  # whether it failed
    names_the_cause: bool  # whether its causes contain the phrases that the tests demand
    causes: list[str]
    seconds: float  # of the whole command, which runs this check and at most one other
    commit: NotRequired[str]  # of the code, if the result is from a later update


class CorrectProof(TypedDict):
    """The proof of one correct copy."""

    edit: str
    recipe: str
    checks: list[str]  # the checks that have to pass
    skipped: list[str]  # the checks that have to find that they do not apply
    failed: list[str]  # those of both that did not
    causes: list[str]
    seconds: float
    commit: NotRequired[str]  # as above


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("copies", nargs="*", help="copies to prove, by name (default: all)")
    parser.add_argument("--output", type=Path, help="file of the results")
    parser.add_argument(
        "--update", action="store_true", help="replace the results of these copies in the file"
    )
    parser.add_argument("--show", action="store_true", help="prove nothing; print the tables")
    options = parser.parse_args()
    # A file with some copies alone must not replace that of all.
    output: Path | None = options.output or (None if options.copies else RESULTS)
    if options.show:
        results = json.loads((output or RESULTS).read_text(encoding="utf-8"))
        print(markdown(results["proofs"], results["correct"]))
        return
    broken_copies, correct_copies = chosen_copies(options.copies)
    proofs, correct_proofs = prove_all(broken_copies, correct_copies, output)
    if options.update:
        update_results(options.output or RESULTS, proofs, correct_proofs)
    print(markdown(proofs, correct_proofs))
    missed = [proof["mistake"] for proof in proofs if not proof["names_the_cause"]]
    if missed:
        raise SystemExit(f"error: the cause is not named: {', '.join(missed)}")
    wrongly_failed = [proof["edit"] for proof in correct_proofs if proof["failed"]]
    if wrongly_failed:
        raise SystemExit(f"error: correct copies fail: {', '.join(wrongly_failed)}")


def prove_all(
    broken_copies: Sequence[Broken], correct_copies: Sequence[Correct], output: Path | None
) -> tuple[list[BrokenProof], list[CorrectProof]]:
    """Prove copies one after the other, and return the results.

    Args:
        output: the file that gets the results so far after each proof; None: no file.
    """
    machine = describe_machine()  # before `output` changes, because it has the commit
    proofs: list[BrokenProof] = []
    correct_proofs: list[CorrectProof] = []

    def write() -> None:
        if output is not None:
            write_results(output, {"machine": machine, "proofs": proofs, "correct": correct_proofs})

    for broken in broken_copies:
        proof = prove_broken(broken)
        proofs.append(proof)
        print(f"{broken.name}: {'; '.join(proof['causes']) or 'no cause named'}", flush=True)
        write()
    for correct in correct_copies:
        correct_proof = prove_correct(correct)
        correct_proofs.append(correct_proof)
        print(f"{correct.name}: {'; '.join(correct_proof['causes']) or 'passes'}", flush=True)
        write()
    return proofs, correct_proofs


def update_results(
    file: Path, proofs: Sequence[BrokenProof], correct_proofs: Sequence[CorrectProof]
) -> None:
    """Replace the results of some copies in a file of results. The order is that of the copies."""
    results = json.loads(file.read_text(encoding="utf-8"))
    commit = commit_of_library()
    by_mistake = {proof["mistake"]: proof for proof in results["proofs"]}
    by_mistake |= {proof["mistake"]: {**proof, "commit": commit} for proof in proofs}
    by_edit = {proof["edit"]: proof for proof in results["correct"]}
    by_edit |= {proof["edit"]: {**proof, "commit": commit} for proof in correct_proofs}
    results["proofs"] = [by_mistake[copy.name] for copy in BROKEN if copy.name in by_mistake]
    results["correct"] = [by_edit[copy.name] for copy in CORRECT if copy.name in by_edit]
    write_results(file, results)


def chosen_copies(names: list[str]) -> tuple[list[Broken], list[Correct]]:
    """Return the broken and the correct copies of these names, or all copies if none is named.

    Raises:
        SystemExit: there is no copy of such a name.
    """
    if not names:
        return list(BROKEN), list(CORRECT)
    broken_copies = {copy.name: copy for copy in BROKEN}
    correct_copies = {copy.name: copy for copy in CORRECT}
    known_names = [*broken_copies, *correct_copies]
    unknown_names = [name for name in names if name not in known_names]
    if unknown_names:
        raise SystemExit(
            f"error: no copy is named {unknown_names[0]!r}: choose from {', '.join(known_names)}"
        )
    return (
        [broken_copies[name] for name in names if name in broken_copies],
        [correct_copies[name] for name in names if name in correct_copies],
    )


def prove_broken(broken: Broken) -> BrokenProof:
    """Run the proof that has to find the mistake of a copy."""
    checks = [name for name in (broken.check, broken.passes) if name is not None]
    results, seconds = prove(broken, checks)
    result = results[broken.check]
    has_failed = result.passed is False
    others_pass = broken.passes is None or results[broken.passes].passed is True
    text = "\n".join(result.causes)
    return BrokenProof(
        mistake=broken.name,
        recipe=broken.recipe,
        check=broken.check,
        failed=has_failed,
        names_the_cause=has_failed
        and others_pass
        and all(phrase in text for phrase in broken.words),
        causes=result.causes,
        seconds=seconds,
    )


def prove_correct(correct: Correct) -> CorrectProof:
    """Run the proof that a correct copy has to pass."""
    results, seconds = prove(correct, [*correct.checks, *correct.skipped])
    failed = [name for name in correct.checks if results[name].passed is not True]
    failed += [name for name in correct.skipped if results[name].passed is not None]
    causes: list[str] = []
    for name in failed:
        causes += results[name].causes
    return CorrectProof(
        edit=correct.name,
        recipe=correct.recipe,
        checks=[*correct.checks],
        skipped=[*correct.skipped],
        failed=failed,
        causes=causes,
        seconds=seconds,
    )


def prove(copy: EditedCopy, checks: Sequence[str]) -> tuple[dict[str, CheckResult], float]:
    """Write a copy into a temporary folder, prove it, and return its results and the seconds.

    Raises:
        SystemExit: the proof wrote no receipt.
    """
    with tempfile.TemporaryDirectory() as folder:
        recipe = copy.write(Path(folder))
        receipt_path = Path(folder) / "proof.json"
        command = [sys.executable, "-m", "common.tools", "prove", str(recipe), *copy.flags]
        command += ["--checks", ",".join(checks), "--updates", str(copy.updates)]
        command += ["--output", str(receipt_path), "--folder", str(Path(folder) / "runs")]
        start = time.perf_counter()
        finished = subprocess.run(command, capture_output=True, encoding="utf-8")
        seconds = round(time.perf_counter() - start, 1)
        if not receipt_path.exists():
            raise SystemExit(f"{copy.name}: the proof wrote no receipt\n{finished.stderr}")
        results = {result.name: result for result in read_receipt(receipt_path).checks}
    for result in results.values():
        result.causes[:] = [cause.replace(folder, "") for cause in result.causes]
    return results, seconds


def markdown(proofs: Sequence[BrokenProof], correct_proofs: Sequence[CorrectProof]) -> str:
    """Return a table of the broken copies, and one of the correct ones if there are any.

    Of several causes, the first table has the first.
    """
    rows = [["mistake", "copy of", "check that fails", "cause that it names"]]
    for proof in proofs:
        cause = proof["causes"][0] if proof["names_the_cause"] else "**not named**"
        cells = [proof["mistake"], f"`{proof['recipe']}.py`", f"`{proof['check']}`", cause]
        rows.append(cells)
    lines = markdown_table(rows, "llll")
    if correct_proofs:
        correct_rows = [["correct edit", "copy of", "checks that pass"]]
        for correct_proof in correct_proofs:
            recipe = f"`{correct_proof['recipe']}.py`"
            correct_rows.append([correct_proof["edit"], recipe, results_in_words(correct_proof)])
        lines += ["", *markdown_table(correct_rows, "lll")]
    return "\n".join(lines)


def results_in_words(proof: CorrectProof) -> str:
    """Return the checks that pass as they have to, and those that do not apply."""
    passed = [f"`{name}`" for name in proof["checks"] if name not in proof["failed"]]
    skipped = [f"`{name}`" for name in proof["skipped"] if name not in proof["failed"]]
    words = ", ".join(passed) or "**none**"
    if skipped:
        words += f" ({', '.join(skipped)} does not apply)"
    return words


if __name__ == "__main__":
    main()
