"""Prove every recipe and every example with `recipes prove`, and print one table of the answers.

    python benchmarks/proofs.py
    python benchmarks/proofs.py recipes/bert.py examples/gan.py     # only these
    python benchmarks/proofs.py --show                              # the table of the receipts

Each proof is a command of its own, with the built-in data. `examples/lora.py` adapts a pretrained
model: `recipes/bert.py` trains one for it first, in `runs/for-lora`. The receipts go to
`benchmarks/results/proofs/`. The exit status is 1 if a proof fails.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

if __package__ in (None, ""):  # started as a file: make the package importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.harness.text_tables import markdown_table
from common.tools.prove.receipt import CheckResult, ProofReceipt, read_receipt

REPOSITORY = Path(__file__).resolve().parents[1]
RECEIPTS = REPOSITORY / "benchmarks" / "results" / "proofs"
NEED_CHECKPOINT = ("examples/lora.py",)
CHECKPOINT_RUN = "runs/for-lora"  # relative, so that receipts name no folder of this machine
SYMBOLS = {True: "✓", False: "**✗**", None: "–"}  # by whether a check passed; None: does not apply


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", help="files to prove (default: recipes and examples)")
    parser.add_argument("--checks", help="names of checks, separated by commas (default: all)")
    parser.add_argument("--receipts", type=Path, default=RECEIPTS, help="folder of the receipts")
    parser.add_argument("--show", action="store_true", help="prove nothing; print the table")
    options = parser.parse_args()
    files = options.files or provable_files()
    failed_files: list[str] = []
    if not options.show:
        failed_files = prove_all(files, options.receipts, options.checks)
    receipts = [
        read_receipt(receipt_path(options.receipts, file))
        for file in files
        if receipt_path(options.receipts, file).exists()
    ]
    print(markdown(receipts))
    if failed_files:
        raise SystemExit(f"error: not proven: {', '.join(failed_files)}; see the answers above")


def provable_files() -> list[str]:
    """Return the recipes and the examples, relative to the repository."""
    paths = [*(REPOSITORY / "recipes").glob("*.py"), *(REPOSITORY / "examples").glob("*.py")]
    names = [path.relative_to(REPOSITORY).as_posix() for path in paths if path.stem != "__init__"]
    return sorted(names, key=lambda name: (not name.startswith("recipes/"), name))


def receipt_path(folder: Path, file: str) -> Path:
    """Return where the receipt of a file is."""
    return folder / f"{Path(file).stem}.json"


def prove_all(files: list[str], folder: Path, checks: str | None) -> list[str]:
    """Prove files one after the other, and return those that failed.

    The commands run in the repository, so that receipts name the files relative to it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failed_files = []
    for file in files:
        print(f"{file}:", flush=True)
        output = receipt_path(folder, file).resolve()
        output.unlink(missing_ok=True)  # a failed command must not leave an old receipt
        command = [sys.executable, "-m", "common.tools", "prove", file, "--output", str(output)]
        if checks is not None:
            command += ["--checks", checks]
        if file in NEED_CHECKPOINT:
            command += ["--model", trained_checkpoint()]
        if subprocess.run(command, cwd=REPOSITORY).returncode != 0:
            failed_files.append(file)
    return failed_files


def trained_checkpoint() -> str:
    """Return the folder of a BERT trained on the built-in data; train it if there is none yet."""
    folder = f"{CHECKPOINT_RUN}/model"
    if not (REPOSITORY / folder / "model.safetensors").exists():
        command = [sys.executable, "recipes/bert.py", "--dataset", "docstrings"]
        command += ["--tracker", "none", "--output-dir", CHECKPOINT_RUN]
        subprocess.run(command, cwd=REPOSITORY, check=True)
    return folder


def markdown(receipts: list[ProofReceipt]) -> str:
    """Return a table with a row for each file, and a column for each check."""
    names = list(dict.fromkeys(check.name for receipt in receipts for check in receipt.checks))
    rows = [["", *(f"`{name}`" for name in names), "seconds"]]
    for receipt in receipts:
        checks = {check.name: check for check in receipt.checks}
        answers = [symbol(checks.get(name)) for name in names]
        rows.append([f"`{receipt.recipe}`", *answers, f"{receipt.seconds:.0f}"])
    return "\n".join(markdown_table(rows, "l" + "c" * len(names) + "r"))


def symbol(check: CheckResult | None) -> str:
    """Return the symbol of a check's answer; empty if the check did not run."""
    return "" if check is None else SYMBOLS[check.passed]


if __name__ == "__main__":
    main()
