"""Draw copies from the grammar, and check that each one keeps every guarantee.

python -m tests.generated --cases 500 --seed 7
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.generated.drawing import drawn
from tests.generated.running import Copies, ViolationError, check
from tests.generated.writing import recipe_of
from tests.launch import Runner


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.generated", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=1, help="failed cases that are shown whole")
    options = parser.parse_args()
    began = time.monotonic()
    features: Counter[str] = Counter()
    failed_features: Counter[str] = Counter()
    symptoms: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        runner = Runner(Path(folder))
        copies = Copies(runner, Path(folder))
        try:
            for number, case in enumerate(drawn(options.cases, options.seed)):
                features.update(case.features())
                place = Path(folder) / f"case-{number}"
                try:
                    check(case, copies, place)
                except ViolationError as violation:
                    symptoms[violation.symptom] += 1
                    failed_features.update(case.features())
                    print(f"case {number}: {violation.symptom}\n  {case}", flush=True)
                    if symptoms.total() <= options.show:
                        print(f"{violation}\n\n{recipe_of(case)}", flush=True)
                shutil.rmtree(place)
        finally:
            copies.close()
            runner.close()
    minutes = (time.monotonic() - began) / 60
    print(f"\n{'cases':>6} {'failed':>6}")
    for feature, count in sorted(features.items()):
        print(f"{count:6} {failed_features[feature]:6}  {feature}")
    for symptom, count in symptoms.most_common():
        print(f"{count:6} times: {symptom}")
    print(
        f"{options.cases:,} cases of seed {options.seed}, {symptoms.total():,} failed, "
        f"{options.cases / minutes:.0f} cases a minute"
    )
    raise SystemExit(symptoms.total() > 0)


if __name__ == "__main__":
    main()
