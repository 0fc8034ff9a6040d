"""Search for inputs on which the code neither succeeds nor ends with one sentence.

python -m tests.fuzz --inputs 1000 --seed 0 [TARGET ...]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import traceback
from pathlib import Path


def search(name: str, inputs: int, seed: int, folder: Path) -> int:
    """Try a target with `inputs` inputs, all in one folder; return how many were tried.

    Raises:
        Exception: the target failed. The notes of the exception have the smallest such input.
    """
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from hypothesis import strategies as st

    from tests.fuzz.targets import TARGETS

    count = 0

    @seeded(seed)
    @settings(
        max_examples=inputs,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[*HealthCheck],
    )
    @given(st.data())
    def try_target(data: st.DataObject) -> None:
        nonlocal count
        count += 1
        TARGETS[name](data, folder)

    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    try:
        try_target()
    finally:
        os.environ.pop("XDG_CACHE_HOME")
        os.environ |= {} if before is None else {"XDG_CACHE_HOME": before}
    return count


def main() -> None:
    from tests.fuzz.targets import ENDED, TARGETS

    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--inputs", type=int, default=1000, help="for each target (default: 1000)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    failures = 0
    for name in options.targets or TARGETS:
        ENDED.clear()
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                count = search(name, options.inputs, options.seed, Path(folder))
                ends = ", ".join(f"{n:,} {end}" for end, n in sorted(ENDED.items()))
                result = f"{count:,} inputs ({ends})"
            except BaseException:
                traceback.print_exc()
                failures += 1
                result = "FAILED, see above"
        print(f"{name:14} {result}, {time.monotonic() - began:.0f} s", flush=True)
    raise SystemExit(failures > 0)


if __name__ == "__main__":
    main()
