"""Run a recipe or a tool in a process that has the simulated device. It is not a test.

python tests/simulated/launch.py VARIANT REPORT SCRIPT [--FLAG VALUE ...]

VARIANT is read by `Variant.parse`. SCRIPT is a path, or the name of a module that can be run. The
process counts the device's waits and kernels in the file REPORT, unless that is "-".
"""

import atexit
import json
import os
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.simulated import kernels, streams
from tests.simulated.device import Variant, install


def write_report(path: Path) -> None:
    """Write how often the host waited for the device, and which kernels ran how often."""
    path.write_text(json.dumps({"waits": streams.WAITS, "kernels": kernels.USED}))


def main() -> None:
    """Install the device and run the script as if it had been launched directly."""
    words, report, script, *flags = sys.argv[1:]
    if sys.platform == "darwin":
        os.environ.pop("ACCELERATE_USE_CPU", None)  # by which other tests avoid Apple's GPU
    install(Variant.parse(words))
    if "LOCAL_RANK" in os.environ:
        from tests.simulated import collectives

        collectives.register()
    if report != "-":
        atexit.register(write_report, Path(report))
    sys.argv = [script, *flags]
    if script.endswith(".py"):
        runpy.run_path(script, run_name="__main__")
    else:
        runpy.run_module(script, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
