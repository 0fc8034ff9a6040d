"""Prove each broken copy of a recipe, and print a table of the causes that `recipes prove` names.

    python benchmarks/broken_copies.py
    python benchmarks/broken_copies.py "EMA not kept" "loss not divided"     # only these
    python benchmarks/broken_copies.py --show                                # the table of the file

`benchmarks/harness/broken_copies.py` lists the copies: each is a recipe with one mistake. The
results go to `benchmarks/results/broken-copies.json`. The exit status is 1 if a proof does not name
the mistake.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TypedDict

if __package__ in (None, ""):  # started as a file: make the package importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.harness.broken_copies import BROKEN, Broken
from benchmarks.harness.result_file import write_results
from benchmarks.harness.results import describe_machine
from benchmarks.harness.text_tables import markdown_table
from common.tools.prove.receipt import read_receipt

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mistakes", nargs="*", help="mistakes to prove (default: all)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="file of the results")
    parser.add_argument("--show", action="store_true", help="prove nothing; print the table")
    options = parser.parse_args()
    if options.show:
        print(markdown(json.loads(options.output.read_text(encoding="utf-8"))["proofs"]))
        return
    proofs = prove_all(chosen_copies(options.mistakes), options.output)
    print(markdown(proofs))
    missed = [proof["mistake"] for proof in proofs if not proof["names_the_cause"]]
    if missed:
        raise SystemExit(f"error: the cause is not named: {', '.join(missed)}")


def prove_all(copies: list[Broken], output: Path) -> list[BrokenProof]:
    """Prove copies one after the other, and return the results, which are also in `output`."""
    machine = describe_machine()  # before `output` changes, because it has the commit
    proofs: list[BrokenProof] = []
    for broken in copies:
        proof = prove(broken)
        proofs.append(proof)
        print(f"{broken.name}: {'; '.join(proof['causes']) or 'no cause named'}", flush=True)
        write_results(output, {"machine": machine, "proofs": proofs})
    return proofs


def chosen_copies(mistakes: list[str]) -> list[Broken]:
    """Return the copies with these mistakes, or all copies if none is named.

    Raises:
        SystemExit: there is no copy with such a mistake.
    """
    by_name = {broken.name: broken for broken in BROKEN}
    unknown = [mistake for mistake in mistakes if mistake not in by_name]
    if unknown:
        names = ", ".join(by_name)
        raise SystemExit(f"error: no copy has the mistake {unknown[0]!r}: choose from {names}")
    return [by_name[mistake] for mistake in mistakes] or list(BROKEN)


def prove(broken: Broken) -> BrokenProof:
    """Write the copy into a temporary folder, and run the proof that has to find its mistake.

    Raises:
        SystemExit: the proof wrote no receipt.
    """
    with tempfile.TemporaryDirectory() as folder:
        recipe = broken.write(Path(folder))
        receipt_path = Path(folder) / "proof.json"
        checks = [name for name in (broken.check, broken.passes) if name is not None]
        command = [sys.executable, "-m", "common.tools", "prove", str(recipe), *broken.flags]
        command += ["--checks", ",".join(checks), "--updates", str(broken.updates)]
        command += ["--output", str(receipt_path), "--folder", str(Path(folder) / "runs")]
        start = time.perf_counter()
        finished = subprocess.run(command, capture_output=True, encoding="utf-8")
        seconds = time.perf_counter() - start
        if not receipt_path.exists():
            raise SystemExit(f"{broken.name}: the proof wrote no receipt\n{finished.stderr}")
        results = {check.name: check for check in read_receipt(receipt_path).checks}
        result = results[broken.check]
        causes = [cause.replace(folder, "") for cause in result.causes]
    has_failed = result.passed is False
    text = "\n".join(causes)
    return BrokenProof(
        mistake=broken.name,
        recipe=broken.recipe,
        check=broken.check,
        failed=has_failed,
        names_the_cause=has_failed and all(phrase in text for phrase in broken.words),
        causes=causes,
        seconds=round(seconds, 1),
    )


def markdown(proofs: list[BrokenProof]) -> str:
    """Return a table with a row for each copy; of several causes, it has the first."""
    rows = [["mistake", "copy of", "check that fails", "cause that it names"]]
    for proof in proofs:
        cause = proof["causes"][0] if proof["names_the_cause"] else "**not named**"
        cells = [proof["mistake"], f"`{proof['recipe']}.py`", f"`{proof['check']}`", cause]
        rows.append(cells)
    return "\n".join(markdown_table(rows, "llll"))


if __name__ == "__main__":
    main()
