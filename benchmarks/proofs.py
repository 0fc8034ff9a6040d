"""Prove every recipe and every example with `recipes prove`, and print one table of the answers.

    python benchmarks/proofs.py
    python benchmarks/proofs.py recipes/bert.py examples/gan.py     # only these
    python benchmarks/proofs.py --show                              # the table of the receipts

Each proof is a command of its own, with the built-in data. `examples/lora.py` adapts a pretrained
model: `recipes/bert.py` trains one for it first, and its head is removed, because a model that has
learned the task already can't show that the example learns. The receipts go to
`benchmarks/results/proofs/`. The exit status is 1 if a proof fails.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

if __package__ in (None, ""):  # started as a file: make the package importable
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import REPOSITORY
from benchmarks.harness.text_tables import markdown_table
from common.tools.prove.receipt import CheckResult, ProofReceipt, read_receipt

RECEIPTS = REPOSITORY / "benchmarks" / "results" / "proofs"
NEED_CHECKPOINT = ("examples/lora.py",)
# Relative to the repository, so that receipts name no folder of this machine. Git ignores `runs/`.
CHECKPOINT_RUN = "runs/for-lora"
CHECKPOINT = "runs/for-lora-without-head"
NEW_RECEIPTS = "runs/receipts"
HEAD = "classifier."  # begins the names of the head's tensors
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

    The receipts reach `folder` at the end. A receipt records the repository's uncommitted changes,
    and the new receipts of other files would be such changes. If the command is killed, the
    receipts so far are in `NEW_RECEIPTS`.
    """
    failed_files: list[str] = []
    new_receipts = REPOSITORY / NEW_RECEIPTS
    new_receipts.mkdir(parents=True, exist_ok=True)
    for file in files:
        receipt_path(new_receipts, file).unlink(missing_ok=True)
    try:
        for file in files:
            print(f"{file}:", flush=True)
            if not prove(file, receipt_path(new_receipts, file), checks):
                failed_files.append(file)
    finally:
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            new_receipt = receipt_path(new_receipts, file)
            replace_receipt(receipt_path(folder, file), new_receipt, file in failed_files)
    return failed_files


def prove(file: str, receipt: Path, checks: str | None) -> bool:
    """Write the receipt of a file, and return whether it passed.

    The command runs in the repository, so that the receipt names the file relative to it.
    """
    command = [sys.executable, "-m", "common.tools", "prove", file, "--output", str(receipt)]
    if checks is not None:
        command += ["--checks", checks]
    if file in NEED_CHECKPOINT:
        try:
            command += ["--model", trained_checkpoint()]
        except subprocess.CalledProcessError:
            return False  # the training has printed why
    return subprocess.run(command, cwd=REPOSITORY).returncode == 0


def replace_receipt(target: Path, new_receipt: Path, failed: bool) -> None:
    """Move a new receipt to its place. A proof that failed without one removes the old receipt."""
    if new_receipt.exists():
        shutil.move(new_receipt, target)
        print(f"receipt: {target}")
    elif failed:
        target.unlink(missing_ok=True)


def trained_checkpoint() -> str:
    """Return the folder of a BERT without a head, trained on the built-in data; make it if absent.

    The folder is relative to the repository.
    """
    checkpoint = REPOSITORY / CHECKPOINT
    if checkpoint.exists():
        return CHECKPOINT
    model = REPOSITORY / CHECKPOINT_RUN / "model"
    if not (model / "model.safetensors").exists():
        command = [sys.executable, "recipes/bert.py", "--dataset", "docstrings"]
        command += ["--tracker", "none", "--output-dir", CHECKPOINT_RUN]
        subprocess.run(command, cwd=REPOSITORY, check=True)
    unfinished = checkpoint.with_name(f"{checkpoint.name}.unfinished")
    shutil.copytree(model, unfinished, dirs_exist_ok=True)
    remove_head(unfinished / "model.safetensors")
    unfinished.rename(checkpoint)
    return CHECKPOINT


def remove_head(weights: Path) -> None:
    """Remove the classifier from a file of a BERT's weights."""
    tensors = load_file(weights)
    body = {name: tensor for name, tensor in tensors.items() if not name.startswith(HEAD)}
    save_file(body, weights, metadata={"format": "pt"})


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
