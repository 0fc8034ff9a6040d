"""Draw copies from the grammar, and check that each one keeps every guarantee.

python -m tests.generated --cases 500 --seed 7
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.generated.drawing import drawn
from tests.generated.running import Copies, ViolationError, check
from tests.generated.writing import recipe_of
from tests.launch import Runner


def main() -> None:
    """Check as many cases as the command line asks for; the status is 1 if one has failed."""
    options = read_command_line()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        tally = checked(options, Path(folder))
    report(tally, options, minutes=(time.monotonic() - began) / 60)
    raise SystemExit(tally.symptoms.total() > 0)


def read_command_line() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.generated", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=1, help="failed cases that are shown whole")
    return parser.parse_args()


@dataclass(frozen=True)
class Tally:
    """How often each feature was drawn, how often a case with it failed, and what failed."""

    features: Counter[str] = field(default_factory=Counter)
    failed_features: Counter[str] = field(default_factory=Counter)
    symptoms: Counter[str] = field(default_factory=Counter)


def checked(options: argparse.Namespace, folder: Path) -> Tally:
    """Draw the cases and check each one, in a folder of its own."""
    tally = Tally()
    runner = Runner(folder)
    copies = Copies(runner, folder)
    try:
        for number, case in enumerate(drawn(options.cases, options.seed)):
            tally.features.update(case.features())
            place = folder / f"case-{number}"
            try:
                check(case, copies, place)
            except ViolationError as violation:
                tally.symptoms[violation.symptom] += 1
                tally.failed_features.update(case.features())
                print(f"case {number}: {violation.symptom}\n  {case}", flush=True)
                if tally.symptoms.total() <= options.show:
                    print(f"{violation}\n\n{recipe_of(case)}", flush=True)
            shutil.rmtree(place)
    finally:
        copies.close()
        runner.close()
    return tally


def report(tally: Tally, options: argparse.Namespace, minutes: float) -> None:
    """Print the features, what failed how often, and the speed."""
    print(f"\n{'cases':>6} {'failed':>6}")
    for feature, count in sorted(tally.features.items()):
        print(f"{count:6} {tally.failed_features[feature]:6}  {feature}")
    for symptom, count in tally.symptoms.most_common():
        print(f"{count:6} times: {symptom}")
    print(
        f"{options.cases:,} cases of seed {options.seed}, {tally.symptoms.total():,} failed, "
        f"{options.cases / minutes:.0f} cases a minute"
    )


if __name__ == "__main__":
    main()
