"""Starts one of pytest's workers, in a fork that has the libraries imported. Not a test.

`conftest.py` gives pytest-xdist this command instead of `python`:

FORKING_PYTHON tests/worker.py INTERPRETER [OPTION ...] -c STATEMENT
"""

import sys


def main() -> None:
    """Run the statement with which execnet starts a worker, as the interpreter would."""
    sys.executable = sys.argv[1]
    statement = sys.argv[-1]
    sys.argv = ["-c"]
    sys.path[0] = ""
    exec(statement, sys.modules["__main__"].__dict__)


if __name__ == "__main__":
    main()
