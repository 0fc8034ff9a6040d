"""Run a recipe that pretends to run on another operating system, in a fork of the template.

python tests/platforms/launch.py PLATFORM ENCODING SCRIPT [--FLAG VALUE ...]

It is not a test. In a fresh interpreter, `site/sitecustomize.py` does the same as Python starts.
There is one difference: here Python does not warn of default encodings, because the libraries in
the template would warn as well. The errors that `sitecustomize.py` raises itself remain.
"""

import importlib.util
import os
import runpy
import sys
from pathlib import Path

SITE = Path(__file__).parent / "site"


def pretend(platform: str, encoding: str) -> None:
    """Hide the features that the platform lacks, here and in the processes that this one starts."""
    os.environ |= {
        "PYTHONPATH": str(SITE),
        "PRETENDED_PLATFORM": platform,
        "PYTHONIOENCODING": f"{encoding}:strict",
    }
    for stream in (sys.stdout, sys.stderr):
        errors = "strict" if stream is sys.stdout else "backslashreplace"
        stream.reconfigure(encoding=encoding, errors=errors)  # type: ignore[union-attr]
    spec = importlib.util.spec_from_file_location("sitecustomize", SITE / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def main() -> None:
    """Pretend to run on the platform, and run the script as if it had been launched directly."""
    platform, encoding, script, *flags = sys.argv[1:]
    pretend(platform, encoding)
    sys.argv = [script, *flags]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
